"""The encoding kernels in plain Python and NumPy: what the compiled ones must equal, value for value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.encoding_types import RefusedValueError


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
