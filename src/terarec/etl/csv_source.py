"""CSV files, read block by block as columns of trimmed text, with the row of every fault."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl.csv_options import CsvLayout

_BLOCK_BYTES = 4 << 20
"""Text read at once; also the longest line that is accepted."""

_WRONG_WIDTH = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
"""In Arrow's message about a row of another number of fields; the header line counts."""


@dataclass(frozen=True, slots=True)
class CsvBlock:
    """Some rows of a file.

    Attributes:
        path: the file.
        first_row: rows of the file before this block; the header line and empty lines do not count.
        columns: name -> string array, white space trimmed, null where missing.
        num_rows: rows n in the block.
    """

    path: Path
    first_row: int
    columns: dict[str, pa.Array]
    num_rows: int

    def rows(self, start: int, stop: int) -> CsvBlock:
        """The rows ``start <= i < stop`` of this block."""
        part = {name: column.slice(start, stop - start) for name, column in self.columns.items()}
        return CsvBlock(self.path, self.first_row + start, part, stop - start)

    def numbers(self, name: str, accepted: str = "a finite number") -> pa.Array:
        """Column `name` as float64 array, null where missing (or written as NaN); errors say what is `accepted`.

        Raises:
            FormatError: a field that is no finite number.
        """
        texts = self.columns[name]
        try:
            numbers = texts.cast(pa.float64())
        except pa.ArrowInvalid:
            raise self.fault(name, _first_refused(texts, pa.float64()), accepted) from None
        infinite = pc.index(pc.is_inf(numbers), True).as_py()
        if infinite >= 0:
            raise self.fault(name, infinite, accepted)
        return pc.if_else(pc.is_nan(numbers), pa.scalar(None, type=pa.float64()), numbers)

    def integers(self, name: str) -> pa.Array:
        """Column `name` as int64 array, null where missing.

        Raises:
            FormatError: a field that is no 64-bit integer.
        """
        texts = self.columns[name]
        try:
            return texts.cast(pa.int64())
        except pa.ArrowInvalid:
            raise self.fault(name, _first_refused(texts, pa.int64()), "an integer of 64 bits") from None

    def fault(self, name: str, row: int, expected: str) -> FormatError:
        """The error that field `name` of the block's row `row` is not what is `expected`."""
        got = repr(self.columns[name][row].as_py()) if self.columns[name][row].is_valid else "a missing value"
        return FormatError(
            f"{self.path}: row {self.first_row + row + 1}, column {name!r}: got {got}, expected {expected}"
        )


def read_csv(path: Path, layout: CsvLayout, columns: Sequence[str]) -> Iterator[CsvBlock]:
    """The rows of `path`, block by block, with the named `columns` alone.

    Raises:
        DataNotFoundError: there is no such file.
        ConfigError: the file has no such column.
        FormatError: a row with another number of fields, text that is not UTF-8, or a damaged file.
    """
    if not path.is_file():
        raise DataNotFoundError(f"{path}: no such file")
    names = layout.names or _header(path, layout)
    for column in columns:
        if column not in names:
            raise _no_column(path, column, names, layout)
    first_row = 0
    for batch in _batches(path, layout, names, columns):
        trimmed = {name: _clean(batch.column(name), layout) for name in columns}
        yield CsvBlock(path, first_row, trimmed, batch.num_rows)
        first_row += batch.num_rows


def _batches(path: Path, layout: CsvLayout, names: Sequence[str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    # No invalid_row_handler: Arrow's threads would call into Python, and abort the process if it is about to end.
    header_rows = 0 if layout.names else 1
    read_options = csv.ReadOptions(
        use_threads=False, block_size=_BLOCK_BYTES, column_names=list(names), skip_rows=header_rows
    )
    convert_options = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), include_columns=list(columns), strings_can_be_null=False
    )
    try:
        with csv.open_csv(path, read_options, csv.ParseOptions(delimiter=layout.delimiter), convert_options) as reader:
            yield from reader
    except (pa.ArrowInvalid, OSError) as error:
        if found := _WRONG_WIDTH.search(str(error)):
            row, expected, got = map(int, found.groups())
            raise FormatError(
                f"{path}: row {row - header_rows}: got {got} {'field' if got == 1 else 'fields'}, expected {expected} "
                f"separated by {layout.delimiter!r}"
            ) from None
        raise _unreadable(path, error) from error


def _header(path: Path, layout: CsvLayout) -> tuple[str, ...]:
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            first_line = stream.read(_BLOCK_BYTES).split(b"\n", 1)[0] + b"\n"
        header = csv.read_csv(
            pa.BufferReader(first_line),
            csv.ReadOptions(use_threads=False),
            csv.ParseOptions(delimiter=layout.delimiter),
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    names = tuple(name.strip() for name in header.column_names)
    for name in names:
        if names.count(name) > 1:
            raise FormatError(f"{path}: the header names column {name!r} {names.count(name)} times, expected once")
    return names


def _clean(column: pa.Array, layout: CsvLayout) -> pa.Array:
    trimmed = pc.utf8_trim_whitespace(column)
    missing = pc.is_in(trimmed, value_set=pa.array(layout.missing, type=pa.string()))
    return pc.if_else(missing, pa.scalar(None, type=pa.string()), trimmed)


def _first_refused(texts: pa.Array, number_type: pa.DataType) -> int:
    """The first row of `texts` that is no number of that type; there is one."""
    low, high = 0, len(texts)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            texts.slice(low, middle - low).cast(number_type)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def _no_column(path: Path, column: str, names: Sequence[str], layout: CsvLayout) -> ConfigError:
    if len(names) == 1 and not layout.names:
        return ConfigError(
            f"{path}: has no column {column!r}; its header is the single column {names[0]!r}, expected names "
            f"separated by {layout.delimiter!r} (--delimiter)"
        )
    return ConfigError(f"{path}: has no column {column!r}{_hint(column, names)}, expected {', '.join(names)}")


def _hint(column: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(column, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _unreadable(path: Path, error: Exception) -> FormatError:
    reason = str(error).splitlines()[0]
    return FormatError(f"{path}: cannot be read as CSV ({reason}), expected delimited UTF-8 text")
