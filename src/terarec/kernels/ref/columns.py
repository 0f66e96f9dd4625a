"""The column kernels in plain NumPy, which the compiled ones equal bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def stack_columns(columns: Sequence[NDArray[Any]], out: NDArray[np.float32]) -> None:
    """Write the F ``columns`` of n numbers side by side into ``out float32[n, F]``."""
    for target, column in zip(out.T, columns, strict=True):
        target[:] = column


def concatenate_keys(arrays: Sequence[NDArray[Any]], offsets: Sequence[int], out: NDArray[np.int64]) -> None:
    """Write int32[n] or int64[n] arrays one after another into ``out int64[sum of n]``, each plus its offset."""
    moved = [array.astype(np.int64) + np.int64(offset) for array, offset in zip(arrays, offsets, strict=True)]
    np.concatenate([np.empty(0, dtype=np.int64), *moved], out=out)


def nulls_hold(numbers: NDArray[Any], valid: NDArray[np.uint8], fill: float) -> bool:
    """Return whether the numbers[n] whose bits in the bitmap `valid` are 0 are all `fill`; NaN is NaN."""
    nulls = numbers[np.unpackbits(valid, count=len(numbers), bitorder="little") == 0]
    return bool((np.isnan(nulls) if np.isnan(fill) else nulls == fill).all())
