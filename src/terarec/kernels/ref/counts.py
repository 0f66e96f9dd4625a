"""The counting tables in plain Python: what the compiled ones must equal, value for value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.ref.texts import split_texts

_LAST_COUNT = 2**32 - 1


class _Counts:
    """Counts of any hashable values."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()

    def _add(self, values: Iterable[Any], missing: NDArray[np.bool_] | None, times: NDArray[np.int64] | None) -> None:
        for row, value in enumerate(values):
            if missing is None or not missing[row]:
                self._counts[value] += 1 if times is None else int(times[row])

    def _by_count(self, min_count: int) -> list[tuple[Any, int]]:
        kept = [(value, count) for value, count in self._counts.items() if count >= min_count]
        return sorted(kept, key=lambda item: (-item[1], item[0]))

    def _by_value(self) -> list[tuple[Any, int]]:
        all_counts = sorted(self._counts.items())
        self._counts.clear()
        return all_counts

    def __len__(self) -> int:
        """Number of distinct values."""
        return len(self._counts)


class _IntegerCounts(_Counts):
    """Counts of integers of one type."""

    dtype: type[np.integer[Any]]
    last_count: int

    def add(
        self, values: NDArray[Any], missing: NDArray[np.bool_] | None = None, times: NDArray[np.int64] | None = None
    ) -> None:
        """Count ``values[n]`` that are not ``missing bool[n]``; value i ``times[i]`` times if given."""
        self._add(values.tolist(), missing, times)

    def at_least(self, min_count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Values and counts of those that occurred `min_count` times, by falling count, ties by rising value."""
        return self._arrays(self._by_count(min_count))

    def drain(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All values, rising, and their counts; the table is empty afterwards."""
        return self._arrays(self._by_value())

    def _arrays(self, items: list[tuple[Any, int]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        counts = [min(count, self.last_count) for _, count in items]
        return np.array([value for value, _ in items], dtype=self.dtype), np.array(counts, dtype=np.int64)


class Hex32Counts(_IntegerCounts):
    """Counts of 32-bit values; they stop at 2^32 - 1."""

    dtype = np.uint32
    last_count = _LAST_COUNT


class Int64Counts(_IntegerCounts):
    """Counts of 64-bit integers."""

    dtype = np.int64
    last_count = 2**63 - 1


class TextCounts(_Counts):
    """Counts of texts. Text i of n is ``text[offsets[i]:offsets[i + 1]]``."""

    def add(
        self,
        text: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        missing: NDArray[np.bool_] | None = None,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        """Count n texts that are neither empty nor ``missing bool[n]``; text i ``times[i]`` times if given."""
        self._add((value.encode() for value in split_texts(text, offsets)), missing, times)
        self._counts.pop(b"", None)

    def at_least(self, min_count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Texts and counts of those that occurred `min_count` times, by falling count, ties by rising bytes."""
        return self._arrays(self._by_count(min_count))

    def drain(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """All texts by rising bytes, and their counts; the table is empty afterwards."""
        return self._arrays(self._by_value())

    @staticmethod
    def _arrays(items: list[tuple[bytes, int]]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        text = np.frombuffer(b"".join(value for value, _ in items), dtype=np.uint8)
        offsets = np.cumsum([0, *(len(value) for value, _ in items)], dtype=np.int64)
        return text, offsets, np.array([count for _, count in items], dtype=np.int64)
