"""Records of one size, taken apart in pieces that stay in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE_ROWS = 512
"""Records transposed at once: 82 kB of Criteo's 160-byte records."""


class Strided:
    """n records that lie `stride` bytes apart. Fields need no alignment.

    Args:
        content: the bytes.
        first: byte of the first record.
        stride: bytes from one record to the next.
        count: number of records n.
    """

    def __init__(self, content: NDArray[np.uint8], first: int, stride: int, count: int) -> None:
        self._content = content
        self._first = first
        self._stride = stride
        self._count = count

    def matrix(self, byte: int, dtype: np.dtype[Any], columns: int, step: int | None = None) -> NDArray[Any]:
        """A view ``dtype[n, columns]`` of the fields from `byte` of each record on, `step` bytes apart."""
        if self._count == 0 or columns == 0:
            return np.empty((self._count, columns), dtype=dtype)
        return np.ndarray(
            (self._count, columns),
            dtype,
            buffer=self._content.data,
            offset=self._first + byte,
            strides=(self._stride, dtype.itemsize if step is None else step),
        )


def copy_transposed(fields: NDArray[Any], out: NDArray[np.int64]) -> None:
    """``out[:] = fields.T``, piece by piece, so that a line of the cache is read once for all columns that it holds."""
    for start in range(0, len(fields), _PIECE_ROWS):
        stop = start + _PIECE_ROWS
        out[:, start:stop] = fields[start:stop].T
