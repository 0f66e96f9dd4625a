# SPDX-License-Identifier: Apache-2.0
"""Integers that tables hold as floats, such as ids of a column that has missing values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def float_bound(dtype: np.dtype[Any]) -> float:
    """Return the first integer that a float type does not tell from its successor: 2^11, 2^24 or 2^53.

    From there on the id of a value would be that of others, which were rounded to the same float.
    """
    # Never above that of float64, which longer floats become.
    return 2.0 ** min(np.finfo(dtype).nmant + 1, 53)


def integers_of_floats(values: NDArray[np.floating[Any]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the integers that floats hold, and which of them are no integers below the `float_bound` of their type.

    Args:
        values: Floats of n values; NaN is missing, and not bad.

    Returns:
        int64[n], 0 for bad and missing values, and bool[n].
    """
    good = (np.abs(values) < float_bound(values.dtype)) & (np.floor(values) == values)
    return np.where(good, values, 0).astype(np.int64), ~good & ~np.isnan(values)


def accepted_integers(dtype: np.dtype[Any]) -> str:
    """Describe the integers that are accepted as floats of a type, for errors."""
    bound = float_bound(dtype)
    return f"an integer below 2^{int(np.log2(bound))} ({dtype.name} holds larger ones only rounded)"
