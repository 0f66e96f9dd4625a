"""The encoding kernels in plain Python and NumPy: what the compiled ones must equal, value for value."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.encoding_types import (
    COLUMN_NAMES,
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

_INTEGER = re.compile(rb"-?[0-9]+")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
_INT32 = np.iinfo(np.int32)


def count_lines(block: bytes) -> int:
    """Number of lines in `block`; a last one may lack its line end."""
    return block.count(b"\n") + (block != b"" and not block.endswith(b"\n"))


def parse_criteo(block: bytes) -> CriteoBlock:
    """Parse whole lines in Criteo's layout; see `terarec.kernels.cpu.encoding.parse_criteo`."""
    lines = block.removesuffix(b"\n").split(b"\n") if block else []
    parsed = CriteoBlock(
        label=np.zeros(len(lines), dtype=np.float32),
        integers=np.zeros((NUM_INTEGERS, len(lines)), dtype=np.int32),
        categories=np.zeros((NUM_CATEGORIES, len(lines)), dtype=np.uint32),
        missing=np.zeros(len(lines), dtype=np.uint64),
    )
    for row, line in enumerate(lines):
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) != len(COLUMN_NAMES):
            raise column_count_fault(row, len(fields))
        for column, field in enumerate(fields):
            _parse_field(parsed, row, column, field)
    return parsed


def _parse_field(parsed: CriteoBlock, row: int, column: int, field: bytes) -> None:
    if column == 0:
        if field not in (b"0", b"1"):
            raise field_fault(row, column, field, EXPECTED_LABEL)
        parsed.label[row] = int(field)
    elif not field:
        parsed.missing[row] |= np.uint64(1 << (column - 1))
    elif column <= NUM_INTEGERS:
        if not _INTEGER.fullmatch(field):
            raise field_fault(row, column, field, EXPECTED_INTEGER)
        if not _INT32.min <= int(field) <= _INT32.max:
            raise field_fault(row, column, field, EXPECTED_INTEGER_RANGE)
        parsed.integers[column - 1, row] = int(field)
    else:
        if not _HEX.fullmatch(field):
            raise field_fault(row, column, field, EXPECTED_CATEGORY)
        parsed.categories[column - 1 - NUM_INTEGERS, row] = int(field, 16)


def log_shift(
    values: NDArray[np.int32] | NDArray[np.float64], shift: float, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """ln(max(x, 1 - shift) + shift), a NaN x being 0; the outer maximum undoes the rounding of the sum."""
    numbers = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=np.inf)
    logs = np.log(np.maximum(np.maximum(numbers, 1.0 - shift) + shift, 1.0)).astype(np.float32)
    if out is None:
        return logs
    out[:] = logs
    return out


def numbers_of_list(values: list[Any]) -> NDArray[np.float64]:
    """float64[n] from a list of numbers; None and ``""`` are missing, which is NaN."""
    numbers = np.empty(len(values), dtype=np.float64)
    for row, value in enumerate(values):
        missing = value is None or (isinstance(value, str) and value == "")
        numeric = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        try:
            numbers[row] = math.nan if missing else float(value) if numeric else math.inf
        except OverflowError:
            raise RefusedValueError(row) from None
        if math.isinf(numbers[row]):
            raise RefusedValueError(row)
    return numbers
