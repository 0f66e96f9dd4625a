"""The compiled parser of delimited text: single-threaded, without the GIL."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding
from terarec.kernels.delimited_types import (
    FAULT_KINDS,
    FAULT_POLICIES,
    FIELD_TYPES,
    UNQUOTED,
    DelimitedLayout,
    FieldFault,
    FieldType,
    ParsedColumn,
    ParsedLines,
    Quoting,
)

_DTYPES = {kind: np.dtype(dtype) for kind, dtype in (("integer", "i8"), ("number", "f8"), ("hex32", "u4"))}


class RowCount(NamedTuple):
    """What a text holds.

    Attributes:
        lines: a last one without its end included.
        rows: records that are not empty.
        complete_bytes: to the end of the last record that has a line end.
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
    return ParsedLines(
        columns=tuple(
            None if column is None else _column(memory, column, field.type, num_kept)
            for field, column in zip(layout.fields, columns, strict=True)
        ),
        num_lines=num_lines,
        num_rows=num_rows,
        kept=kept,
        fault_counts={kind: count for kind, count in zip(FAULT_KINDS, counts[1:], strict=True) if count},
        faults=tuple(FieldFault(line, FAULT_KINDS[kind - 1], field, found) for line, kind, field, found in faults),
    )


def _column(memory: NDArray[np.uint8], parts: tuple[Any, ...], field_type: FieldType, rows: int) -> ParsedColumn:
    """Return a column whose arrays are views of the `memory` of all rows where their parts are positions in it."""
    items, values, missing, text_offsets, list_offsets = parts
    if isinstance(values, int):
        values = np.frombuffer(memory, _DTYPES[field_type], items, values)
    if isinstance(missing, int):
        missing = np.frombuffer(memory, np.bool_, items, missing)
    if isinstance(text_offsets, int):
        text_offsets = np.frombuffer(memory, np.int64, items + 1, text_offsets)
    if isinstance(list_offsets, int):
        list_offsets = np.frombuffer(memory, np.int64, rows + 1, list_offsets)
    return ParsedColumn(values, missing, text_offsets, list_offsets)


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
