"""The encoding kernels in plain Python and NumPy: what the compiled ones must equal, value for value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.encoding_types import RefusedValueError


def numbers_of_list(values: list[Any], *, whole: bool = False) -> NDArray[np.float64]:
    """float64[n] from a list of numbers, or of `whole` ones; None and ``""`` are missing, which is NaN."""
    numbers = np.empty(len(values), dtype=np.float64)
    for row, value in enumerate(values):
        try:
            numbers[row] = _whole(value) if whole else _number(value)
        except (OverflowError, ValueError):
            raise RefusedValueError(row) from None
    return numbers


def _number(value: Any) -> float:
    if value is None or (isinstance(value, str) and value == ""):
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or math.isinf(value):
        raise ValueError
    return float(value)


def _whole(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError
    return float(value)
