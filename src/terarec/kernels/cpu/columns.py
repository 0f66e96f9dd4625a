"""Columns of numbers side by side as rows, keys one after another, numbers under nulls; without the GIL.

One call takes all columns: of several threads that convert column by column, each waits for the GIL after each column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding


def stack_columns(columns: Sequence[NDArray[Any]], out: NDArray[np.float32]) -> None:
    """Write the F columns side by side into rows, as ``numpy.stack(columns, axis=1, out=out)`` does.

    Args:
        columns: Columns of n numbers each, of type float32, float64, int32 or int64, with any stride.
        out: float32[n, F].

    Raises:
        ValueError: An array of another type or length.
    """
    _encoding.stack_columns(list(columns), out)


def concatenate_keys(arrays: Sequence[NDArray[Any]], offsets: Sequence[int], out: NDArray[np.int64]) -> None:
    """Write keys one array after another, each array plus its offset.

    Args:
        arrays: Contiguous int32[n] or int64[n], each of its own n.
        offsets: Integer to add to each array; sums wrap around at 2^63.
        out: int64[sum of n].

    Raises:
        ValueError: An array of another type, another number of offsets, or an `out` of another length.
    """
    _encoding.concatenate_keys(list(arrays), list(offsets), out)


def nulls_hold(numbers: NDArray[Any], valid: NDArray[np.uint8], fill: float) -> bool:
    """Return whether each number under a null is `fill`; NaN is NaN.

    Args:
        numbers: Contiguous int64[n], float64[n] or uint32[n].
        valid: Arrow's validity bitmap, a bit for each number, 0 for a null.
        fill: A number of the type of `numbers`.

    Raises:
        TypeError: Arrays of other types, or a number that the type does not hold.
        ValueError: A bitmap that is shorter than the array.
    """
    return _encoding.nulls_hold(numbers, valid, fill)
