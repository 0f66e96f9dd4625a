# SPDX-License-Identifier: Apache-2.0
"""The compiled parser of delimited text: single-threaded, without the GIL."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding
from terarec.kernels.encoding_types import (
    ARROW_TYPES,
    FAULT_KINDS,
    FAULT_POLICIES,
    FIELD_TYPES,
    UNQUOTED,
    DelimitedLayout,
    FieldFault,
    FieldType,
    ParsedLines,
    Quoting,
)


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
