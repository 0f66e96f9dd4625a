"""`ReservedRows`: rows that grow without moving."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from terarec.errors import StorageError


class ReservedRows:
    """Address space for an array ``[most_rows, ...]`` of which the first rows have memory.

    Growing never copies: every array has the same address, and one that was taken before sees the same memory. The
    address space is given back with the last of them.

    Attributes:
        shape: the array that address space is reserved for.
        dtype: NumPy type of an element.

    Args:
        memory: uint8[at least the bytes of `shape`], the reserved address space.
        shape: most rows, then the shape of a row.
        dtype: NumPy type of an element.
        commit: commit(begin, end) gives zeroed memory to these bytes; False if the system refuses it.
    """

    def __init__(
        self, memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: DTypeLike, commit: Callable[[int, int], bool]
    ) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._memory = memory
        self._commit = commit
        self._rows = 0

    def __len__(self) -> int:
        """Rows that have memory."""
        return self._rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def grow(self, rows: int) -> None:
        """Give zeroed memory to the first `rows` rows; those that have it keep their values.

        Raises:
            StorageError: more rows than are reserved, or the system refuses the memory; nothing has changed then.
        """
        if rows > self.shape[0]:
            raise StorageError(f"rows: got {rows}, expected at most the {self.shape[0]} that are reserved")
        if rows <= self._rows:
            return
        begin, end = self._rows * self.row_bytes, rows * self.row_bytes
        if not self._commit(begin, end):
            raise StorageError(f"rows {self.dtype}{list(self.shape)}: {end - begin:,} bytes more refused by the system")
        self._rows = rows

    def array(self, rows: int) -> NDArray[Any]:
        """The first `rows` rows, in the reserved memory, which lives as long as the array.

        Raises:
            StorageError: more rows than have memory.
        """
        if not 0 <= rows <= self._rows:
            raise StorageError(f"rows: got {rows}, expected 0 to the {self._rows} that have memory")
        part = self._memory[: rows * self.row_bytes].view(self.dtype)
        return part.reshape(rows, *self.shape[1:])
