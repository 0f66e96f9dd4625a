"""How HugeCTR's files hold keys: uint32 or int64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError

_RANGES = {4: (0, 2**32 - 1), 8: (-(2**63), 2**63 - 1)}


def key_dtype(key_bytes: int) -> np.dtype[Any]:
    """uint32 for 4 bytes a key, int64 for 8."""
    return np.dtype("<u4" if key_bytes == 4 else "<i8")


def check_key_range(keys: NDArray[Any], key_bytes: int, where: str) -> None:
    """Raise `FormatError`, which starts with `where`, if a key does not fit into `key_bytes` bytes."""
    low, high = _RANGES[key_bytes]
    wrong = (keys < low) | (keys > high)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise FormatError(
            f"{where}: key {int(keys[position])} at position {position}, "
            f"expected {low} to {high} ({key_bytes}-byte keys)"
        )
