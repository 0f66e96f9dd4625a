# SPDX-License-Identifier: Apache-2.0
"""Arguments, results and errors of the encoding kernels and of the parser of delimited text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError

HASH_SEED = 42
"""Of the XXH64 that gives hash buckets: Spark's ``xxhash64`` has it built in."""


class InvalidValueError(FormatError):
    """A value of a column that does not have the column's type.

    Attributes:
        row: Position of the value in the column, from 0.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"position {row}", "got a value of another type or out of range")
        self.row = row


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

FAULTS_KEPT = 10
FAULT_BYTES_KEPT = 80
"""Bytes of a fault that are kept."""


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
        text: Content of the field, the first `FAULT_BYTES_KEPT` bytes.
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
        faults: The first `FAULTS_KEPT`, and that of kind "quote", if there is one, as the last. The rows end before it,
            and with policy "raise" before the first one.
    """

    columns: tuple[pa.Array | None, ...]
    num_lines: int
    num_rows: int
    kept: NDArray[np.int64] | None
    fault_counts: Mapping[FaultKind, int]
    faults: tuple[FieldFault, ...]
