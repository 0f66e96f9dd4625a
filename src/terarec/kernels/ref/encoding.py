"""The encoding kernels in plain Python and NumPy: what the compiled ones must equal, value for value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.encoding_types import RefusedValueError


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
