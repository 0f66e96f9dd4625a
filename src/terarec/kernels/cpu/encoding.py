"""The compiled encoding kernels: single-threaded, and without the GIL wherever they work on arrays or bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding
from terarec.kernels.encoding_types import (
    EXPECTED_CATEGORY,
    EXPECTED_INTEGER,
    EXPECTED_INTEGER_RANGE,
    EXPECTED_LABEL,
    NUM_CATEGORIES,
    NUM_INTEGERS,
    CriteoBlock,
    RefusedValueError,
    column_count_fault,
    field_fault,
)

# The values of LineFault in csrc/encoding/criteo_lines.h.
_COLUMN_COUNT_FAULT = 1
_EXPECTED = {2: EXPECTED_LABEL, 3: EXPECTED_INTEGER, 4: EXPECTED_INTEGER_RANGE, 5: EXPECTED_CATEGORY}


def count_lines(block: bytes) -> int:
    """Number of lines in `block`; a last one may lack its line end."""
    return _encoding.count_lines(np.frombuffer(block, dtype=np.uint8))


def parse_criteo(block: bytes) -> CriteoBlock:
    r"""Parse whole lines in Criteo's layout; lines end in ``\n`` or ``\r\n``, the last one's end may be absent.

    Raises:
        LineFaultError: the first line with another number of columns or a field of another kind.
    """
    text = np.frombuffer(block, dtype=np.uint8)
    lines = _encoding.count_lines(text)
    parsed = CriteoBlock(
        label=np.empty(lines, dtype=np.float32),
        integers=np.empty((NUM_INTEGERS, lines), dtype=np.int32),
        categories=np.empty((NUM_CATEGORIES, lines), dtype=np.uint32),
        missing=np.empty(lines, dtype=np.uint64),
    )
    row, fault, column, begin, end = _encoding.parse_criteo(
        text, parsed.label, parsed.integers, parsed.categories, parsed.missing
    )
    if fault == _COLUMN_COUNT_FAULT:
        raise column_count_fault(row, column)
    if fault:
        raise field_fault(row, column, block[begin:end], _EXPECTED[fault])
    return parsed


def log_shift(
    values: NDArray[np.int32] | NDArray[np.float64], shift: float, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """ln(max(x, 1 - shift) + shift), a NaN x being 0; float32[n] from int32[n] or float64[n], into `out` if given."""
    if out is None:
        out = np.empty(len(values), dtype=np.float32)
    _encoding.log_shift(values, shift, out)
    return out


def numbers_of_list(values: list[Any]) -> NDArray[np.float64]:
    """float64[n] from a list of Python or NumPy numbers; None and ``""`` are missing, which is NaN.

    Raises:
        RefusedValueError: text, truth values, infinity, or anything else that is no number.
    """
    numbers = np.empty(len(values), dtype=np.float64)
    _accept(_encoding.numbers_of_list(values, numbers))
    return numbers


def _accept(refused_row: int) -> None:
    if refused_row >= 0:
        raise RefusedValueError(refused_row)
