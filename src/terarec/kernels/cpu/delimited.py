# SPDX-License-Identifier: Apache-2.0
"""The compiled parser of delimited text, single-threaded and without the GIL, its arguments and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding

FieldType = Literal["skip", "text", "integer", "number", "hex32"]
FaultPolicy = Literal["raise", "skip", "missing"]
FaultKind = Literal[
    "short_line",
    "long_line",
    "oversized_line",
    "quote",
    "integer",
    "integer_range",
    "number",
    "infinite",
    "hex",
    "utf8",
]

ARROW_TYPES: Mapping[FieldType, pa.DataType] = {
    "text": pa.large_string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "hex32": pa.uint32(),
}
"""Arrow type of the values of each type of field but "skip"."""

FIELD_TYPES: tuple[FieldType, ...] = ("skip", "text", "integer", "number", "hex32")
FAULT_POLICIES: tuple[FaultPolicy, ...] = ("raise", "skip", "missing")

EXPECTED: Mapping[FaultKind, str] = {
    "short_line": "more fields",
    "long_line": "fewer fields",
    "oversized_line": "a shorter line",
    "quote": "a closing quote before a delimiter or a line's end, and quotes inside written twice; no policy "
    "accepts another quote, since it is unknown where the next row begins",
    "integer": "an integer",
    "integer_range": "a signed integer of 64 bits",
    "number": "a number",
    "infinite": "a finite number",
    "hex": "up to 8 hexadecimal digits",
    "utf8": "UTF-8 text",
}
"""Accepted content for each kind of fault."""

FAULT_KINDS: tuple[FaultKind, ...] = tuple(EXPECTED)
"""In the order of csrc/encoding/fields.h."""


@dataclass(frozen=True, slots=True)
class DelimitedField:
    """One field of every line.

    Attributes:
        type: Type of its values. "skip" leaves it out unread. An integer is an optional minus and digits, of 64 bits; a
            point and zeros may follow. A number is decimal, with an optional point and exponent, rounded to the
            nearest float64; NaN of any case is missing. "hex32" has one to eight hexadecimal digits. Text is UTF-8.
        separator: The field is a list whose items it separates; empty for a single value.
    """

    type: FieldType
    separator: bytes = b""


@dataclass(frozen=True, slots=True)
class Quoting:
    """Quoting of the fields of a record, which determines where records end.

    Attributes:
        delimiter: Between fields.
        quote: Whether a field may be enclosed in double quotes, with two of them inside for one, and contain delimiters
            and line ends (RFC 4180).
        trim: Whether ASCII white space may surround the quotes.
    """

    delimiter: bytes
    quote: bool
    trim: bool


UNQUOTED = Quoting(delimiter=b"\t", quote=False, trim=False)
"""Every line is a record, as in JSON lines."""


@dataclass(frozen=True, slots=True)
class DelimitedLayout:
    r"""Layout of the fields of records.

    They end in ``\n`` or ``\r\n``; the last one's end may be absent. Empty ones are not rows.

    Attributes:
        fields: Fields of a line, in order.
        delimiter: Character between fields.
        quote: Quote character; see `Quoting`. An invalid quote ends parsing under every policy, since it is unknown
            where the rows behind it begin.
        trim: Whether ASCII white space around fields and around the items of lists is removed.
        trim_quoted: Whether it is also removed inside the quotes of a field.
        missing: Words for a missing value; an empty field or item does so always. A missing list is empty.
        policy: Policy for faults. "raise" ends parsing there. "skip" drops the line. "missing" makes the field
            missing; a line with too few fields has the others missing, one with too many is cut, and of one that is too
            long all is missing.
        max_line_bytes: Longest record.
    """

    fields: tuple[DelimitedField, ...]
    delimiter: bytes = b"\t"
    quote: bool = False
    trim: bool = False
    trim_quoted: bool = False
    missing: tuple[bytes, ...] = ()
    policy: FaultPolicy = "raise"
    max_line_bytes: int = 1 << 20

    @property
    def quoting(self) -> Quoting:
        """Ends of records."""
        return Quoting(self.delimiter, self.quote, self.trim)


@dataclass(frozen=True, slots=True)
class FieldFault:
    """A fault in a text.

    Attributes:
        line: Position of the line in which the record begins, from 0, empty lines included.
        kind: Kind of the fault; see `EXPECTED`.
        field: Position of the field, from 0; for a line with too few or too many, their number.
        text: Content of the field, the first 80 bytes.
    """

    line: int
    kind: FaultKind
    field: int
    text: bytes


@dataclass(frozen=True, slots=True)
class ParsedLines:
    """Numbers of lines and rows of a text.

    Attributes:
        columns: An array a field, of its type in `ARROW_TYPES` or a large_list of it, null where missing; None for a
            field that is skipped. A missing list is empty. Integers and hex32 are 0 under their nulls.
        num_lines: Lines, empty ones included.
        num_rows: Records that are not empty.
        kept: int64[n], the positions among `num_rows` of the rows that the columns hold; None if they hold all.
        fault_counts: Faults of each kind that occurred.
        faults: The first 10, and that of kind "quote", if there is one, as the last. The rows end before it,
            and with policy "raise" before the first one.
    """

    columns: tuple[pa.Array | None, ...]
    num_lines: int
    num_rows: int
    kept: NDArray[np.int64] | None
    fault_counts: Mapping[FaultKind, int]
    faults: tuple[FieldFault, ...]


class RowCount(NamedTuple):
    """Numbers of lines and rows of a text.

    Attributes:
        lines: Lines, including a last one without a line end.
        rows: Records that are not empty.
        complete_bytes: Bytes to the end of the last record that has a line end.
    """

    lines: int
    rows: int
    complete_bytes: int


def count_rows(text: bytes | memoryview, quoting: Quoting = UNQUOTED) -> RowCount:
    """Count lines and rows."""
    return RowCount(*_encoding.count_rows(np.frombuffer(text, dtype=np.uint8), _compiled_quoting(quoting)))


def first_record_bytes(text: bytes, quoting: Quoting) -> int:
    """Return the length of the first record of `text` with its line end."""
    return _encoding.first_record_bytes(np.frombuffer(text, dtype=np.uint8), _compiled_quoting(quoting))


def lines_of_rows(text: bytes, quoting: Quoting = UNQUOTED) -> NDArray[np.int64]:
    """Return the positions, from 0, of the lines in which rows begin, int64[rows]."""
    lines = _encoding.lines_of_rows(np.frombuffer(text, dtype=np.uint8), _compiled_quoting(quoting))
    return np.array(lines, dtype=np.int64)


def parse_delimited(text: bytes, layout: DelimitedLayout) -> ParsedLines:
    """Parse whole lines. Faults are returned, never raised; see `DelimitedLayout`."""
    memory, columns, num_lines, num_rows, num_kept, kept, counts, faults = _encoding.parse_delimited(
        np.frombuffer(text, dtype=np.uint8), _compiled_layout(layout)
    )
    # The core parses into one allocation, of which the buffers of all columns are slices, without a copy.
    rows = pa.py_buffer(memory)
    return ParsedLines(
        columns=tuple(
            None if column is None else _column(rows, column, field.type, num_kept)
            for field, column in zip(layout.fields, columns, strict=True)
        ),
        num_lines=num_lines,
        num_rows=num_rows,
        kept=kept,
        # Kind 0 of the core means "no fault", hence from 1 on.
        fault_counts={kind: count for kind, count in zip(FAULT_KINDS, counts[1:], strict=True) if count},
        faults=tuple(
            FieldFault(line, FAULT_KINDS[kind - 1], field, field_text) for line, kind, field, field_text in faults
        ),
    )


def _column(memory: pa.Buffer, parts: tuple[Any, ...], field_type: FieldType, rows: int) -> pa.Array:
    """Return a column whose buffers are slices of the `memory` of all rows where their parts are positions in it."""
    items, nulls, values, valid, text_offsets, list_offsets = parts
    arrow_type = ARROW_TYPES[field_type]
    # Parts are positions in the common memory; bytes of texts and items of lists are arrays of their own.
    if list_offsets is None and text_offsets is None and type(values) is int:  # most columns, in the shortest way
        bits = None if valid is None else memory.slice(valid, (items + 7) // 8)
        return pa.Array.from_buffers(
            arrow_type, items, [bits, memory.slice(values, items * arrow_type.bit_width // 8)], nulls
        )

    def buffer(part: int | NDArray[Any] | None, size: int) -> pa.Buffer | None:
        return memory.slice(part, size) if isinstance(part, int) else None if part is None else pa.py_buffer(part)

    # Buffers in the order of the Arrow format: validity, then offsets and data, or values.
    bits = buffer(valid, (items + 7) // 8)
    if field_type == "text":
        buffers = [bits, buffer(text_offsets, 8 * (items + 1)), buffer(values, 0)]
    else:
        buffers = [bits, buffer(values, items * arrow_type.bit_width // 8)]
    array = pa.Array.from_buffers(arrow_type, items, buffers, nulls)
    if list_offsets is None:
        return array
    return pa.Array.from_buffers(
        pa.large_list(arrow_type), rows, [None, buffer(list_offsets, 8 * (rows + 1))], 0, children=[array]
    )


# Cached, since a layout is converted for each block of a file.
@lru_cache(maxsize=64)
def _compiled_layout(layout: DelimitedLayout) -> _encoding.DelimitedLayout:
    return _encoding.DelimitedLayout(
        [FIELD_TYPES.index(field.type) for field in layout.fields],
        [field.separator for field in layout.fields],
        layout.delimiter,
        layout.quote,
        layout.trim,
        layout.trim_quoted,
        list(layout.missing),
        FAULT_POLICIES.index(layout.policy),
        layout.max_line_bytes,
    )


@lru_cache(maxsize=64)
def _compiled_quoting(quoting: Quoting) -> _encoding.Quoting:
    return _encoding.Quoting(quoting.delimiter, quoting.quote, quoting.trim)
