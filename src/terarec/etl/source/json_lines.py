# SPDX-License-Identifier: Apache-2.0
"""Files of one JSON object a line."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from terarec.etl.cleaning import Cleaning
from terarec.etl.source.arrow_files import read_table
from terarec.etl.source.blocks import (
    EXPECTED,
    MAX_LINE_BYTES,
    FieldFaults,
    InputFault,
    ParsedPart,
    Place,
    RawPart,
    SourceFile,
    apply_error_policy,
    report_fault,
    show,
)
from terarec.etl.source.text import (
    BLOCK_BYTES,
    check_rows,
    count_text_rows,
    first_rows,
    read_text,
    text_bytes,
)
from terarec.kernels.cpu.delimited import count_rows, lines_of_rows
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.codec import parse_json
from terarec.spec.preparation import BadInputPolicy

_TYPES = {"text": pa.string(), "hex32": pa.string(), "integer": pa.int64(), "number": pa.float64()}

_DEEP = 500
"""Levels that Python's parser reads at any stack depth."""
_MOST_DIGITS = 400
"""Digits that any integer which a float64 holds has at most."""
_OTHER_CONSTANTS = (re.compile(rb"Inf\s*[,\]}]"), re.compile(rb"-NaN\s*[,\]}]"))
"""Numbers that Arrow's reader takes, and Python's does not; each begins with a text that is found fast."""


WELL_FORMED = re.compile(
    r"(?:[^\\]|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
"""JSON text without lone surrogates, which are not text. Java reads the expression alike."""


class _FaultError(Exception):
    """A line or a field is wrong; its argument is the kind."""


def read_objects(text: bytes, spec: SourceSpec) -> tuple[pa.Table, list[FieldFaults]]:
    """Return the columns of `spec` in the lines of `text`, null for invalid values, and the faults.

    A list column comes as lists of texts.
    """
    rows = [line.removesuffix(b"\r") for line in text.split(b"\n")]
    values: dict[str, list[Any]] = {column.name: [] for column in spec.columns}
    faults: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    cleaning = Cleaning.of_files(spec)
    wanted = {column.name for column in spec.columns}
    for row, line in enumerate(filter(None, rows)):
        fields: Mapping[str, Any] = {}
        try:
            fields = _object(line, wanted)
        except _FaultError as fault:
            faults["", str(fault)].append((row, show(line)))
        for column in spec.columns:
            value = fields.get(column.name)
            try:
                read = _read(value, column, cleaning)
            except _FaultError as fault:
                faults[column.name, str(fault)].append((row, show(json.dumps(value, ensure_ascii=False))))
                read = None
            values[column.name].append(read)
    table = pa.table(
        {
            column.name: pa.array(
                values[column.name],
                type=pa.list_(pa.string()) if column.separator is not None else _arrow_type(column, lists=True),
            )
            for column in spec.columns
        }
    )
    objects = [
        FieldFaults(name or None, kind, EXPECTED[kind], np.array([row for row, _ in bad]), [got for _, got in bad])
        for (name, kind), bad in faults.items()
    ]
    return table, objects


class _Fields(dict[str, Any]):
    """Fields of an object, of which some may occur several times."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs) if len(self) < len(pairs) else {}
        self.repeated = {name for name, count in counts.items() if count > 1}


def _object(line: bytes, wanted: Set[str]) -> _Fields:
    """Return the fields of a line; as for Arrow's reader, only those that are `wanted` must not occur twice."""
    if len(line) > MAX_LINE_BYTES:
        raise _FaultError("oversized_line")
    try:
        text = line.decode()
        if "\\u" in text and not WELL_FORMED.fullmatch(text):
            raise _FaultError("json")
        fields = parse_json(text, parse_int=_integer_of, object_pairs_hook=_Fields)
    except ValueError:
        raise _FaultError("json") from None
    if not isinstance(fields, _Fields) or fields.repeated & wanted:
        raise _FaultError("json")
    return fields


def _integer_of(digits: str) -> int | float:
    """Return an integer as Arrow's reader takes it: with the sign of 0, and of any number of digits."""
    return float(digits) if digits == "-0" or len(digits) > _MOST_DIGITS else int(digits)


def _read(value: Any, column: SourceColumn, cleaning: Cleaning) -> Any:
    value = cleaning.value(value)
    if value is None:
        return None
    kind = column.type
    if kind == "time":
        kind = "integer" if column.format is None else "text"
    if column.separator is None:
        return _read_value(value, kind)
    if isinstance(value, str):
        return value.split(column.separator)
    if not isinstance(value, list):
        raise _FaultError("json")
    items = [None if item is None else _read_value(item, kind) for item in cleaning.values(value)]
    # As text, which `read_table` reads like the items of separated text.
    return [item if item is None or isinstance(item, str) else repr(item) for item in items]


def _read_value(value: Any, kind: str) -> Any:
    if kind in ("text", "hex32"):
        if not isinstance(value, str):
            raise _FaultError("text")
        return value
    # JSON's true is an int in Python, and no number here.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _FaultError(kind)
    if kind == "integer" and isinstance(value, float):
        # From 2**53 on a float may be one of several integers.
        if not (value.is_integer() and abs(value) < 2**53):
            raise _FaultError(kind)
        return int(value)
    if kind == "integer" and not -(2**63) <= value < 2**63:
        raise _FaultError("integer_range")
    return _finite(value) if kind == "number" else value


def _finite(value: int | float) -> float:
    """Return a number as the nearest float64."""
    try:
        number = float(value)
    except OverflowError:
        raise _FaultError("infinite") from None
    if math.isinf(number):
        raise _FaultError("infinite")
    return number


class JsonLinesReader:
    """Reads lines of JSON objects. Fields of other names are ignored; an absent one is missing."""

    def __init__(self, spec: SourceSpec, block_bytes: int = BLOCK_BYTES) -> None:
        self._spec = spec
        self._block_bytes = block_bytes
        self._schemas = [
            pa.schema([(column.name, _arrow_type(column, lists)) for column in spec.columns]) for lists in (True, False)
        ]

    is_text = True
    place: Place = "line"

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the lines of `file` in blocks; ``content`` is the text."""
        lines = rows = begin = 0
        if after is not None:
            lines, begin = after.before + count_rows(after.content).lines, after.text_end
        for text, read_bytes, end in read_text(file, self._block_bytes, begin):
            num_lines, num_rows, _ = count_rows(text)
            yield RawPart(file.path, lines, num_rows, read_bytes, text, end)
            lines += num_lines
            rows += num_rows
        if after is None:
            check_rows(file, rows)

    def head(self, part: RawPart, rows: int) -> RawPart:
        """Return the first rows of a part."""
        return part.cut(rows, first_rows(part.content, rows))

    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        """Return the columns of a block."""
        faults: list[FieldFaults] = []
        table = self._read_table(part)
        if table is None:  # line by line: something is wrong, or of a form that Arrow does not read
            table, faults = read_objects(part.content, self._spec)
        columns, nanoseconds = read_table(table, self._spec, faults, part.path)

        def fault_of(fields: FieldFaults, at: int) -> InputFault:
            line = int(lines_of_rows(part.content)[fields.rows[at]])
            return report_fault(fields, at, path=part.path, number=part.before + line + 1)

        return apply_error_policy(ParsedPart(columns, nanoseconds=nanoseconds), faults, policy, fault_of)

    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        """Return the line numbers in the file of rows at some positions of a part."""
        numbers: list[int] = (lines_of_rows(part.content)[positions] + part.before + 1).tolist()
        return numbers

    def count_rows(self, file: SourceFile, threads: int) -> int:
        """Count the rows of `file`, bad ones included."""
        rows = count_text_rows(file, threads)
        check_rows(file, rows)
        return rows

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the text in `file`."""
        return text_bytes(file)

    def _read_table(self, part: RawPart) -> pa.Table | None:
        """Return the block as Arrow's reader has it; None if it rejects it."""
        if len(part.content) > MAX_LINE_BYTES and max(map(len, part.content.split(b"\n"))) > MAX_LINE_BYTES:
            return None
        if _may_be_deep(part) or not _holds_objects(part):
            return None
        if any(constant.search(part.content) for constant in _OTHER_CONSTANTS):
            return None
        try:
            # Arrow's reader passes bytes on that are no UTF-8.
            part.content.decode()
        except UnicodeDecodeError:
            return None
        lists = any(column.separator is not None for column in self._spec.columns)
        # The file may write a list as a JSON list, or as text with a separator.
        for schema in self._schemas if lists else self._schemas[:1]:
            try:
                table = arrow_json.read_json(
                    pa.BufferReader(part.content),
                    # One block of Arrow for all, as it rejects a line that is longer than a block; threads have blocks
                    # of their own.
                    arrow_json.ReadOptions(use_threads=False, block_size=len(part.content) + 1),
                    arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
                )
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                continue
            # Arrow takes two objects in a line for two rows, and would number all later rows wrongly.
            if table.num_rows == part.num_rows and _is_finite(table):
                return table
        return None


def _may_be_deep(part: RawPart) -> bool:
    """Return whether a line may be nested too deeply for Python; Arrow passes over such a field that is not wanted."""
    text: bytes = part.content
    if text.count(b"[") + text.count(b"{") - part.num_rows < _DEEP:
        return False
    return any(len(line) > _DEEP and line.count(b"[") + line.count(b"{") > _DEEP for line in text.split(b"\n"))


def _holds_objects(part: RawPart) -> bool:
    """Return whether every line begins and ends as an object does.

    Arrow also takes objects that go over several lines, and null, which crashes it at the begin of a block.
    """
    text: bytes = part.content
    if text.startswith(b"{") and text.rstrip().endswith(b"}"):
        cuts = text.count(b"}\n{") + text.count(b"}\r\n{")
        if cuts == part.num_rows - 1:
            return True
    lines = filter(None, map(bytes.strip, text.split(b"\n")))
    return all(line.startswith(b"{") and line.endswith(b"}") for line in lines)


def _is_finite(table: pa.Table) -> bool:
    """Return whether all numbers are finite: Arrow reads one that no double holds as infinite, without its digits."""
    columns = [column for column in table.columns if pa.types.is_floating(column.type)]
    columns += [pc.list_flatten(column) for column in table.columns if _holds_lists_of_numbers(column.type)]
    return not any(pc.any(pc.is_inf(column)).as_py() for column in columns)


def _holds_lists_of_numbers(file_type: pa.DataType) -> bool:
    return bool(pa.types.is_list(file_type) and pa.types.is_floating(file_type.value_type))


def _arrow_type(column: SourceColumn, lists: bool) -> pa.DataType:
    if column.separator is not None and not lists:
        return pa.string()
    kind = column.type
    if kind == "time":
        kind = "integer" if column.format is None else "text"
    return pa.list_(_TYPES[kind]) if column.separator is not None else _TYPES[kind]
