"""Memory for arrays that readers allocate repeatedly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALLEST = 128 << 10
"""Bytes from which memory is recycled: glibc's malloc maps larger arrays from the kernel one by one."""
_BYTES_KEPT = 64 << 20
"""Free memory kept for each size."""
_SIZES_KEPT = 16

_free: dict[int, list[NDArray[np.uint8]]] = {}


def empty_from_pool(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array in memory of an earlier one, if one of its size has been dropped.

    Fresh memory costs a page fault every 4 KiB, 3 us each in a virtual machine: as much as decoding the Parquet columns
    that the memory is for, and twice as much as building a batch (Zen 4, 65,536 Criteo samples).

    Args:
        shape: Shape.
        dtype: Type of the elements.
    """
    kind = np.dtype(dtype)
    size = kind.itemsize
    for length in shape:
        size *= length
    if size < _SMALLEST:
        return np.empty(shape, dtype=kind)
    # Eight sizes an octave, so that batches of about as many keys share memory.
    step = 1 << (size.bit_length() - 4)
    memory = _Memory(-(-size // step) * step)
    return np.asarray(memory)[:size].view(kind).reshape(shape)


class _Memory:
    """Bytes that become free again when the last array that views them is dropped."""

    __slots__ = ("__array_interface__", "_bytes")

    def __init__(self, size: int) -> None:
        try:
            self._bytes = _free[size].pop()
        except (KeyError, IndexError):
            self._bytes = np.empty(size, dtype=np.uint8)
        self.__array_interface__ = self._bytes.__array_interface__

    def __del__(self) -> None:
        # Called by any thread, and inside other calls of this module: each step is one that the interpreter never
        # interrupts, and none depends on the one before.
        size = len(self._bytes)
        if size not in _free and len(_free) >= _SIZES_KEPT:
            _free.clear()
        free = _free.setdefault(size, [])
        if (len(free) + 1) * size <= _BYTES_KEPT:
            free.append(self._bytes)
