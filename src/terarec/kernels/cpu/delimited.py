"""The compiled parser of delimited text: single-threaded, without the GIL."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from terarec.kernels.cpu import _encoding
from terarec.kernels.delimited_types import (
    FAULT_KINDS,
    FAULT_POLICIES,
    FIELD_TYPES,
    DelimitedLayout,
    FieldFault,
    ParsedColumn,
    ParsedLines,
)


def count_rows(text: bytes) -> tuple[int, int]:
    """Number of lines in `text`, a last one without its end included, and of those among them that are not empty."""
    return _encoding.count_rows(np.frombuffer(text, dtype=np.uint8))


def parse_delimited(text: bytes, layout: DelimitedLayout) -> ParsedLines:
    """Parse whole lines. Faults are returned, never raised; see `DelimitedLayout`."""
    columns, num_lines, num_rows, kept, counts, faults = _encoding.parse_delimited(
        np.frombuffer(text, dtype=np.uint8), _compiled_layout(layout)
    )
    return ParsedLines(
        columns=tuple(None if column is None else ParsedColumn(*column) for column in columns),
        num_lines=num_lines,
        num_rows=num_rows,
        kept=kept,
        fault_counts={kind: count for kind, count in zip(FAULT_KINDS, counts[1:], strict=True) if count},
        faults=tuple(FieldFault(line, FAULT_KINDS[kind - 1], field, found) for line, kind, field, found in faults),
    )


@lru_cache(maxsize=64)
def _compiled_layout(layout: DelimitedLayout) -> _encoding.DelimitedLayout:
    return _encoding.DelimitedLayout(
        [FIELD_TYPES.index(field.type) for field in layout.fields],
        [field.separator for field in layout.fields],
        layout.delimiter,
        layout.quote,
        layout.trim,
        list(layout.missing),
        FAULT_POLICIES.index(layout.policy),
        layout.max_line_bytes,
    )
