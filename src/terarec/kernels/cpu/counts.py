"""How often each value of a column occurs, in compiled tables that several threads may use at the same time.

While one thread works on a table others wait for it, without the GIL.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding


class Hex32Counts:
    """Counts of 32-bit values; they stop at 2^32 - 1."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = _encoding.Hex32Counts()

    def add(
        self,
        values: NDArray[np.uint32],
        missing: NDArray[np.bool_] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count ``values uint32[n]`` that are not ``missing bool[n]``; value i ``times[i]`` >= 1 times if given."""
        self._table.add(values, missing, times)

    def add_bit(self, values: NDArray[np.uint32], missing: NDArray[np.uint64], bit: int) -> None:
        """Count ``values uint32[n]`` but those whose `bit` is set in ``missing uint64[n]``."""
        self._table.add_bit(values, missing, bit)

    def at_least(self, min_count: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Values and counts of those that occurred `min_count` times, by falling count, ties by rising value."""
        return self._table.at_least(min_count)

    def drain(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All values, rising, and their counts; the table is empty afterwards."""
        return self._table.drain()

    @property
    def memory_bytes(self) -> int:
        """Memory of the table."""
        return self._table.memory_bytes()

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._table)


class Int64Counts:
    """Counts of 64-bit integers."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = _encoding.Int64Counts()

    def add(
        self,
        values: NDArray[np.int64],
        missing: NDArray[np.bool_] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count ``values int64[n]`` that are not ``missing bool[n]``; value i ``times[i]`` >= 1 times if given."""
        self._table.add(values, missing, times)

    def at_least(self, min_count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Values and counts of those that occurred `min_count` times, by falling count, ties by rising value."""
        return self._table.at_least(min_count)

    def drain(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All values, rising, and their counts; the table is empty afterwards."""
        return self._table.drain()

    @property
    def memory_bytes(self) -> int:
        """Memory of the table."""
        return self._table.memory_bytes()

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._table)


class TextCounts:
    """Counts of texts, compared byte by byte. Text i of n is ``text[offsets[i]:offsets[i + 1]]``, as in Arrow."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = _encoding.TextCounts()

    def add(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        missing: NDArray[np.bool_] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count n texts that are neither empty nor ``missing bool[n]``; text i ``times[i]`` >= 1 times if given."""
        self._table.add(text, offsets, missing, times)

    def at_least(self, min_count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Texts, as bytes and offsets, and counts of those that occurred `min_count` times.

        They come by falling count, ties by rising bytes.
        """
        return self._table.at_least(min_count)

    def drain(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """All texts by rising bytes, as bytes and offsets, and their counts; the table is empty afterwards."""
        return self._table.drain()

    @property
    def memory_bytes(self) -> int:
        """Memory of the table."""
        return self._table.memory_bytes()

    def __len__(self) -> int:
        """Number of distinct texts."""
        return len(self._table)
