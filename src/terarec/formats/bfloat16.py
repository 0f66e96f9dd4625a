"""bfloat16 in NumPy, which lacks it: the bits as a record of one field, whose name tells them from integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""Element type of an array of bfloat16 bits; ``array.view(np.int16)`` are the bits themselves."""


def widen_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    """An array of `BFLOAT16` as float32; any other as it is."""
    if array.dtype != BFLOAT16:
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
