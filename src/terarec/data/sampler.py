"""In which order samples come: a pure function of seed, epoch and position, so that nothing but those is saved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

SHUFFLE_GROUPS = 4
"""Row groups whose samples are mixed with each other. Four of 65,536 Criteo samples are 42 MB once decoded."""

_GROUP_STREAM = 0
_ROW_STREAM = 1


class Sampler:
    """The order of the samples of every epoch.

    Shuffled, an epoch takes the row groups in random order, `SHUFFLE_GROUPS` at a time (a window), and mixes
    the samples of a window. Otherwise a window is one row group, and samples come in input order.

    Args:
        group_rows: samples in each row group, in input order.
        shuffle: whether to shuffle, anew in every epoch.
        seed: of the shuffling, 0 <= seed < 2^64.
        runs: Lengths of the runs of groups that stay in order when shuffling, such as the pieces of a large row group
            of a Parquet file, which can only be decoded from its start. None if each group is a run of its own.
        mixes_rows: Whether shuffling mixes the samples of a window. Otherwise a window is one group, its samples stay
            in order.
    """

    def __init__(
        self,
        group_rows: Sequence[int],
        *,
        shuffle: bool,
        seed: int,
        runs: Sequence[int] | None = None,
        mixes_rows: bool = True,
    ) -> None:
        self._group_rows = tuple(group_rows)
        self._shuffle = shuffle
        self._seed = seed
        self._runs = None if runs is None else tuple(runs)
        self._mixes_rows = mixes_rows

    def windows(self, epoch: int) -> list[tuple[int, ...]]:
        """The row groups of each window of `epoch`, in order."""
        if not self._shuffle:
            return [(group,) for group in range(len(self._group_rows))]
        order = self._group_order(epoch)
        size = SHUFFLE_GROUPS if self._mixes_rows else 1
        return [tuple(order[start : start + size]) for start in range(0, len(order), size)]

    def window_rows(self, window: Sequence[int]) -> int:
        """Number of samples in the row groups of `window`."""
        return sum(self._group_rows[group] for group in window)

    def order(self, epoch: int, index: int, num_rows: int) -> NDArray[np.int64] | None:
        """Order int64[n] of the `num_rows` samples in the `index`-th window of `epoch`; None for input order."""
        if not (self._shuffle and self._mixes_rows):
            return None
        return _permutation(num_rows, self._seed, epoch, _ROW_STREAM, index)

    def _group_order(self, epoch: int) -> list[int]:
        if self._runs is None:
            return _random_order(len(self._group_rows), self._seed, epoch)
        ends = list(accumulate(self._runs))
        runs = [range(end - length, end) for end, length in zip(ends, self._runs, strict=True)]
        return [group for run in _random_order(len(runs), self._seed, epoch) for group in runs[run]]


def _random_order(size: int, seed: int, epoch: int) -> list[int]:
    """The groups, or the runs of them, in random order, another one in every epoch."""
    order: list[int] = _permutation(size, seed, epoch, _GROUP_STREAM, 0).tolist()
    return order


def _permutation(size: int, seed: int, epoch: int, stream: int, index: int) -> NDArray[np.int64]:
    """A random permutation of ``range(size)``, the same on every machine and with every NumPy.

    Random words come from the counter-based Philox generator, whose raw output NumPy fixes for ever (it does not
    fix ``Generator.permutation``). Each word's low bits are replaced by its position: sorted, they are the permutation.
    """
    counter = np.array([0, index, stream, 0], dtype=np.uint64)
    words = np.random.Philox(counter=counter, key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    bits = np.uint64(max(size - 1, 1).bit_length())
    words = (words >> bits << bits) | np.arange(size, dtype=np.uint64)
    words.sort()
    return (words & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
