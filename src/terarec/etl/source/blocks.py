# SPDX-License-Identifier: Apache-2.0
"""Files and their blocks before and after parsing, their faults, and the protocol of the readers of formats."""

from __future__ import annotations

import heapq
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import Rows, array_of, flat, list_lengths, list_offsets, lists_of
from terarec.etl.times import SECONDS
from terarec.kernels.cpu.delimited import EXPECTED as PARSER_EXPECTED
from terarec.ragged import offsets_of
from terarec.spec import SourceColumn
from terarec.spec.checks import did_you_mean, quoted
from terarec.spec.preparation import BadInputPolicy

Place = Literal["line", "row"]
"""Unit in which rows of a file are counted: lines or, in files without lines, rows."""

FAULTS_SHOWN = 10
MAX_LINE_BYTES = 1 << 20
"""Longest line; of a longer one only so much is kept that the parser sees that it is longer."""
EXPECTED: Mapping[str, str] = {
    **{str(kind): accepted for kind, accepted in PARSER_EXPECTED.items()},
    "oversized_line": f"a line of at most {MAX_LINE_BYTES} bytes",
    "json": "a JSON object in one line",
    "text": "text in quotes",
    "time": SECONDS,
}
"""Accepted content for each kind of fault, in files of all formats."""
FATAL = "quote"
"""The kind of fault that ends the reading under every policy: text behind an invalid quote may be part of a field, and
must not become a row."""
_SHOWN_CHARACTERS = 40
_LISTED_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of rows.

    Attributes:
        path: Path or URL.
        bytes: Size as it is stored.
        version: Text that changes when the file does: time of change in nanoseconds, or the remote store's key.
    """

    path: str
    bytes: int
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFault:
    """A fault in a file.

    Attributes:
        path: File.
        place: "line" or, in files without lines, "row".
        number: Number of the line or row in the file, from 1.
        kind: One word for the kind of fault.
        column: Column where it is in one field.
        got: Content found there.
        expected: Accepted values.
    """

    path: str
    place: Place = "line"
    number: int
    kind: str
    column: str | None
    got: str
    expected: str

    def error(self) -> FormatError:
        """Return the fault as an error."""
        column = "" if self.column is None else f", column {self.column!r}"
        return FormatError(f"{self.path}: {self.place} {self.number}{column}", f"{self.got}, expected {self.expected}")

    def __str__(self) -> str:
        return str(self.error())


@dataclass(frozen=True, slots=True)
class BadInputReport:
    """Bad input in all rows that were read.

    Attributes:
        counts: Faults of each kind that occurred.
        first: First `FAULTS_SHOWN` in the order of the sources.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    first: tuple[InputFault, ...] = ()


def show(content: bytes | str) -> str:
    """Return the content of a field for a message, cut if it is long."""
    text = content.decode("utf-8", errors="backslashreplace") if isinstance(content, bytes) else content
    return f"got {quoted(text, most=_SHOWN_CHARACTERS + 2)}"


class BadInputLog:
    """Gathers the faults of blocks. Any thread may add; a block that is read again counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, bool], Mapping[str, int]] = {}
        self._first: dict[int, dict[bool, Sequence[InputFault]]] = {}

    def add(
        self, first_row: int, counts: Mapping[str, int], faults: Sequence[InputFault], *, is_read: bool = False
    ) -> None:
        """Take in the faults of a block."""
        if not counts:
            return
        ordered = sorted(faults, key=lambda fault: fault.number)[:FAULTS_SHOWN]
        with self._lock:
            # By block: one that a later pass reads again replaces its entry instead of counting twice.
            self._counts[first_row, is_read] = counts
            self._first.setdefault(first_row, {})[is_read] = ordered
            # Blocks come in any order: faults of the last rows are never shown.
            if len(self._first) > FAULTS_SHOWN:
                del self._first[max(self._first)]

    def report(self, until_row: int | None = None) -> BadInputReport:
        """Return all faults, or those in the blocks before the one that begins with `until_row`."""
        with self._lock:
            counts: Counter[str] = Counter()
            for (first_row, _), block_counts in self._counts.items():
                if until_row is None or first_row < until_row:
                    counts.update(block_counts)
            faults: list[InputFault] = []
            for first_row, block in sorted(self._first.items()):
                if until_row is not None and first_row >= until_row:
                    break
                # Faults of reading and faults of steps, each in the order of the rows.
                faults += heapq.merge(*block.values(), key=lambda fault: fault.number)
        return BadInputReport(dict(sorted(counts.items())), tuple(faults[:FAULTS_SHOWN]))


@dataclass(frozen=True, slots=True)
class RawPart:
    """Rows of a file before they are parsed.

    Attributes:
        path: File.
        before: Lines of the file before these, or rows in a file without lines.
        num_rows: Rows.
        read_bytes: Bytes of the file that were read for them.
        content: Input of the format's parser.
        text_end: End of the rows in the text of the file; 0 in files that are not text.
    """

    path: str
    before: int
    num_rows: int
    read_bytes: int
    content: Any
    text_end: int = 0

    def cut(self, rows: int, content: Any) -> RawPart:
        """Return the part with `content` alone, its first rows."""
        # Bytes in proportion, since it is not known which bytes hold the rows.
        return replace(self, num_rows=rows, read_bytes=self.read_bytes * rows // self.num_rows, content=content)


@dataclass(frozen=True, slots=True)
class RawBlock:
    """Rows of the sources before they are parsed."""

    file: int
    first_row: int
    part: RawPart

    @property
    def num_rows(self) -> int:
        """Rows, those included that turn out to be bad."""
        return self.part.num_rows

    @property
    def read_bytes(self) -> int:
        """Bytes of the stored file that were read for it."""
        return self.part.read_bytes


@dataclass(frozen=True, slots=True)
class FieldFaults:
    """Fields of one column that do not have its type; they are missing in the column.

    Attributes:
        column: Name; None for faults of whole rows.
        kind: Kind of the faults.
        expected: Accepted values.
        rows: int64[k], positions of their rows, rising.
        got: Content of the first ones.
    """

    column: str | None
    kind: str
    expected: str
    rows: NDArray[np.int64]
    got: Sequence[str]


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """The n rows of a part that were kept.

    Attributes:
        columns: Name -> array of n rows.
        kept: int64[n], their positions in the part; None for all.
        counts: Faults of each kind that occurred.
        faults: First ones, in order. With the policy "raise" any is to be raised.
        zero_nulls: See `Rows`.
        nanoseconds: See `Rows`.
        bad_fields: Column -> rows, int64[k], whose field is missing since it is bad, and not absent.
    """

    columns: Mapping[str, pa.Array]
    kept: NDArray[np.int64] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[InputFault] = ()
    zero_nulls: frozenset[str] = frozenset()
    nanoseconds: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)
    bad_fields: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def rows(self, raw: RawBlock) -> Rows:
        """Return the rows with their ids."""
        ids = raw.first_row + (np.arange(raw.num_rows) if self.kept is None else self.kept)
        return Rows(self.columns, ids, zero_nulls=self.zero_nulls, nanoseconds=self.nanoseconds)


class FormatReader(Protocol):
    """Reads the files of one format. `parse` is called by several threads.

    Attributes:
        is_text: Whether the rows of a file cannot be counted but by reading it.
        place: Unit by which its rows are numbered.
    """

    is_text: bool
    place: Place

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the rows of `file` in order, or those behind a part that was yielded before."""
        ...

    def head(self, part: RawPart, rows: int) -> RawPart:
        """Return the first `rows` rows of a part that holds more: at least 1."""
        ...

    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        """Return the rows of a part."""
        ...

    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        """Return the numbers in the file, from 1, of the lines or rows at some positions of a part."""
        ...

    def count_rows(self, file: SourceFile, threads: int) -> int:
        """Count the rows of `file`, bad ones included, with up to `threads` threads."""
        ...

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the values in `file` as text."""
        ...


def apply_error_policy(
    parsed: ParsedPart,
    field_faults: Sequence[FieldFaults],
    policy: BadInputPolicy,
    fault_of: Callable[[FieldFaults, int], InputFault],
) -> ParsedPart:
    """Return `parsed` with the faults `field_faults` in its columns, whose rows are left out if the policy is "skip".

    Args:
        parsed: Rows and the faults before.
        field_faults: Faults in any order; a row that is left out counts once, for its first fault by column and kind.
        policy: Policy for bad input; see `BadInputPolicy`.
        fault_of: Function that describes the fault at a position in `FieldFaults.rows`.
    """
    if not field_faults:
        return parsed
    counts = Counter(parsed.counts)
    faults = list(parsed.faults)
    num_rows = len(next(iter(parsed.columns.values())))
    bad = np.zeros(num_rows, dtype=np.bool_)
    for fields in sorted(field_faults, key=lambda fields: (fields.column or "", fields.kind)):
        fresh = ~bad[fields.rows] if policy != "missing" else np.ones(len(fields.rows), dtype=np.bool_)
        if fresh.any():
            counts[fields.kind] += int(fresh.sum())
        faults += [fault_of(fields, int(at)) for at in np.flatnonzero(fresh)[:FAULTS_SHOWN] if at < len(fields.got)]
        bad[fields.rows] = True
    faults.sort(key=lambda fault: fault.number)
    # Under "raise" the caller raises the first fault; under "missing" the columns have nulls there already.
    if policy != "skip":
        bad_fields = {
            name: np.concatenate([fields.rows for fields in field_faults if fields.column == name])
            for name in {fields.column for fields in field_faults}
            if name is not None
        }
        faults = faults[:FAULTS_SHOWN]
        return replace(parsed, counts=counts, faults=faults, zero_nulls=frozenset(), bad_fields=bad_fields)
    good = np.flatnonzero(~bad)
    columns = {name: array.take(array_of(good)) for name, array in parsed.columns.items()}
    kept = good if parsed.kept is None else parsed.kept[good]
    nanoseconds = {name: parts[good] for name, parts in parsed.nanoseconds.items()}
    return ParsedPart(columns, kept, counts, faults[:FAULTS_SHOWN], nanoseconds=nanoseconds)


def without_bad(
    array: pa.Array, source: SourceColumn, bad: NDArray[np.bool_], kind: str, expected: str, values: pa.Array
) -> tuple[pa.Array, FieldFaults]:
    """Return `array`, a list with a bad item being empty, and the faults.

    Args:
        array: Array whose bad values are missing.
        source: Spec.
        bad: bool[m], which values are bad; one is at least.
        kind: Kind of the faults.
        expected: Accepted values.
        values: Arrow array [m] of the contents.
    """
    items = np.flatnonzero(bad)
    rows, offsets = items, list_offsets(array)
    if offsets is not None:
        # One fault a row: the first bad item of its list.
        rows, first = np.unique(np.searchsorted(offsets, items, side="right") - 1, return_index=True)
        items = items[first]
        array = _without_items(array, rows)
    shown = (values[int(item)] for item in items[:FAULTS_SHOWN])
    # As bytes, since Python makes no text of those that are not UTF-8.
    got = [show(one.as_buffer().to_pybytes() if isinstance(one, pa.StringScalar) else _written(one)) for one in shown]
    return array, FieldFaults(source.name, kind, expected, rows, got)


def _written(value: pa.Scalar) -> str:
    # Python has no times of other years than 1 to 9999, and without pandas none of nanoseconds.
    return str(value.cast(pa.string()) if pa.types.is_temporal(value.type) else value.as_py())


def _without_items(array: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """Return lists with no items at these rows."""
    lengths = list_lengths(array)
    good = np.ones(len(lengths), dtype=np.bool_)
    good[rows] = False
    kept = np.flatnonzero(np.repeat(good, lengths))
    return lists_of(flat(array).take(array_of(kept)), offsets_of(lengths * good))


def report_fault(fields: FieldFaults, at: int, *, path: str, number: int, place: Place = "line") -> InputFault:
    """Return the fault at position `at` of `fields`, in line or row `number` of a file."""
    return InputFault(
        path=path,
        place=place,
        number=number,
        kind=fields.kind,
        column=fields.column,
        got=fields.got[at],
        expected=fields.expected,
    )


def check_names(path: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Check that a file which names its columns has the wanted ones, each once.

    Raises:
        ConfigError: It lacks one.
        FormatError: It has one several times.
    """
    for name in wanted:
        if name not in names:
            listed = textwrap.shorten(", ".join(names), _LISTED_CHARACTERS, placeholder=" ...")
            raise ConfigError(path, f"has no column {name!r}{did_you_mean(name, names)}, expected {listed}")
        if names.count(name) > 1:
            raise FormatError(path, f"names column {name!r} {names.count(name)} times, expected once")
