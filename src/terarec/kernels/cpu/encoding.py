"""The compiled encoding kernels: single-threaded, and without the GIL wherever they work on arrays or bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding
from terarec.kernels.encoding_types import RefusedValueError


def numbers_of_list(values: list[Any], *, whole: bool = False) -> NDArray[np.float64]:
    """float64[n] from a list of Python or NumPy numbers; None and ``""`` are missing, which is NaN.

    Args:
        values: the list.
        whole: take Python integers of 64 bits and None only.

    Raises:
        RefusedValueError: text, truth values, infinity, or anything else that is no number.
    """
    numbers = np.empty(len(values), dtype=np.float64)
    refused_row = _encoding.numbers_of_list(values, whole, numbers)
    if refused_row >= 0:
        raise RefusedValueError(refused_row)
    return numbers
