"""How often each value of a column occurs, in compiled tables that several threads may use at the same time.

While one thread works on a table others wait for it, without the GIL.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding

IntegerT = TypeVar("IntegerT", np.uint32, np.int64)


class _Counts:
    """A compiled table."""

    __slots__ = ("_table",)

    def __init__(self, table: Any) -> None:
        self._table = table

    @property
    def memory_bytes(self) -> int:
        """Memory of the table."""
        num_bytes: int = self._table.memory_bytes()
        return num_bytes

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._table)


class _IntegerCounts(_Counts, Generic[IntegerT]):
    """A table of integers of one type."""

    __slots__ = ()

    def add(
        self,
        values: NDArray[IntegerT],
        missing: NDArray[np.bool_] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count ``values[n]`` that are not ``missing bool[n]``; value i ``times int64[n][i]`` >= 1 times if given."""
        self._table.add(values, missing, times)

    def at_least(self, min_count: int) -> tuple[NDArray[IntegerT], NDArray[np.int64]]:
        """Values and counts of those that occurred `min_count` times, by falling count, ties by rising value."""
        found: tuple[NDArray[IntegerT], NDArray[np.int64]] = self._table.at_least(min_count)
        return found

    def drain(self) -> tuple[NDArray[IntegerT], NDArray[np.int64]]:
        """All values, rising, and their counts; the table is empty afterwards."""
        found: tuple[NDArray[IntegerT], NDArray[np.int64]] = self._table.drain()
        return found


class Hex32Counts(_IntegerCounts[np.uint32]):
    """Counts of 32-bit values, ``uint32[n]``; they stop at 2^32 - 1."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_encoding.Hex32Counts())


class Int64Counts(_IntegerCounts[np.int64]):
    """Counts of 64-bit integers, ``int64[n]``."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_encoding.Int64Counts())


class TextCounts(_Counts):
    """Counts of texts, compared byte by byte. Text i of n is ``text[offsets[i]:offsets[i + 1]]``, as in Arrow."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_encoding.TextCounts())

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
        found: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]] = self._table.at_least(min_count)
        return found

    def drain(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """All texts by rising bytes, as bytes and offsets, and their counts; the table is empty afterwards."""
        found: tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]] = self._table.drain()
        return found
