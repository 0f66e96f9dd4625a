# SPDX-License-Identifier: Apache-2.0
"""Which samples a reader gives in which order, and which of them one of several ranks reads.

A batch has the samples that it has for one process. Each rank takes some of them, no two the same ones, and decodes
only the row groups that hold its own. Where a shuffle mixes the rows of several groups, ranks take the samples by the
groups that they come from; in input order a rank takes a span of the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from terarec.batch import share_of
from terarec.formats.block import ColumnBlock, merge, slice_rows
from terarec.spec import checks

SHUFFLE_GROUPS = 4
"""Row groups whose samples are mixed with each other. Four of 65,536 Criteo samples are 42 MB once decoded."""

_GROUP_STREAM = 0
_ROW_STREAM = 1


class Sampler:
    """Order of the samples of every epoch.

    Shuffled, an epoch takes the row groups in random order, `SHUFFLE_GROUPS` at a time (a window), and mixes
    the samples of a window. Otherwise a window is one row group, and samples come in input order.

    Args:
        group_rows: Samples in each row group, in input order.
        shuffle: Whether to shuffle, in a new order every epoch.
        seed: Shuffle seed, 0 <= seed < 2^64.
        runs: Lengths of the runs of groups that stay in order when shuffling, such as the pieces of a large row group
            of a Parquet file, which can only be decoded from its start. None if each group is a run of its own.
        mixes_rows: Whether shuffling mixes the samples of a window. Otherwise a window is one group, its samples stay
            in order.
        parts: Numbers of the consecutive groups of each part; shuffling mixes those of one part. None for one part.
    """

    def __init__(
        self,
        group_rows: Sequence[int],
        *,
        shuffle: bool,
        seed: int,
        runs: Sequence[int] | None = None,
        mixes_rows: bool = True,
        parts: Sequence[int] | None = None,
    ) -> None:
        self._group_rows = tuple(group_rows)
        self._parts = (len(self._group_rows),) if parts is None else tuple(parts)
        self._shuffle = shuffle
        self._seed = seed
        self._runs = None if runs is None else tuple(runs)
        self._mixes_rows = mixes_rows

    def windows(self, epoch: int) -> list[tuple[int, ...]]:
        """Return the row groups of each window of `epoch`, in order; each window is in one part."""
        if not self._shuffle:
            return [(group,) for group in range(len(self._group_rows))]
        size = SHUFFLE_GROUPS if self._mixes_rows else 1
        windows = []
        for part, end in enumerate(accumulate(self._parts)):
            # Within a part, as the keys of another one may not be in memory.
            order = self._group_order(epoch, part, end - self._parts[part], end)
            windows += [tuple(order[start : start + size]) for start in range(0, len(order), size)]
        return windows

    def window_rows(self, window: Sequence[int]) -> int:
        """Return the number of samples in the row groups of `window`."""
        return sum(self._group_rows[group] for group in window)

    def order(self, epoch: int, index: int, num_rows: int) -> NDArray[np.int64] | None:
        """Return the order int64[n] of the `num_rows` samples in a window of `epoch`; None for input order."""
        if not (self._shuffle and self._mixes_rows):
            return None
        return _permutation(num_rows, self._seed, epoch, _ROW_STREAM, index)

    def _group_order(self, epoch: int, part: int, first: int, end: int) -> list[int]:
        """Return the groups ``first <= group < end`` of a part in random order, another one in every epoch."""
        runs = [range(group, group + 1) for group in range(first, end)]
        if self._runs is not None:
            ends = accumulate(self._runs)
            runs = [range(stop - length, stop) for stop, length in zip(ends, self._runs, strict=True)]
        order = _permutation(len(runs), self._seed, epoch, _GROUP_STREAM, part).tolist()
        return [group for run in order for group in runs[run]]


def _permutation(size: int, seed: int, epoch: int, stream: int, index: int) -> NDArray[np.int64]:
    """Return a random permutation of ``range(size)``, the same on every machine and with every NumPy.

    Random words come from the counter-based Philox generator, whose raw output NumPy fixes permanently (it does not
    fix ``Generator.permutation``). Each word's low bits are replaced by its position: sorted, they are the permutation.
    """
    # The lowest word counts the draws; the others keep the sequences of windows and streams apart.
    counter = np.array([0, index, stream, 0], dtype=np.uint64)
    words = np.random.Philox(counter=counter, key=np.array([seed, epoch], dtype=np.uint64)).random_raw(size)
    # Positions make all words distinct, so that any sort gives the same order.
    bits = np.uint64(max(size - 1, 1).bit_length())
    words = (words >> bits << bits) | np.arange(size, dtype=np.uint64)
    words.sort()
    return (words & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


_UNEVEN = 0.05
"""Largest deviation of a rank's rows of a window from an equal part that whole groups may cause, as a part of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """One of several ranks that share every batch.

    Attributes:
        rank: Number of the rank.
        size: Number of ranks R.
        is_span: Whether it takes a span of each batch in any order, so that the samples of all ranks one after the
            other are the batch. Otherwise, where rows are mixed, it takes those of some groups and decodes no others.
    """

    rank: int
    size: int
    is_span: bool = False

    def __post_init__(self) -> None:
        checks.positive_int(self, "size")
        checks.argument("rank", self.rank, checks.integer(0, self.size - 1))


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Consecutive rows of a stream, of which a rank may have read some only.

    Attributes:
        num_rows: All rows.
        block: The rows that were read; None if no group was decoded.
        places: int64[n], rising: which of all rows those of `block` are; None for all.
    """

    num_rows: int
    block: ColumnBlock | None
    places: NDArray[np.int64] | None = None

    def slice(self, start: int, stop: int) -> OwnRows:
        """Return the rows ``start <= i < stop``, as views."""
        if self.places is None or self.block is None:
            return OwnRows(
                stop - start, None if self.block is None else slice_rows(self.block, start, stop), self.places
            )
        # `places` rise, and `block` has its rows in their order, so that a span of places is a span of rows.
        first, last = np.searchsorted(self.places, [start, stop]).tolist()
        return OwnRows(stop - start, slice_rows(self.block, first, last), self.places[first:last] - start)


def mixed_places(order: NDArray[np.int64], group_rows: Sequence[int], share: RankShare) -> NDArray[np.int64]:
    """Return the places int64[n] of a rank's samples in a window whose rows are mixed.

    Its groups, one after the other, are cut into a part for each rank: at the end of a group where the parts are even
    enough then, else within a group, which two ranks decode.

    Args:
        order: int64[sum of group_rows], the row of each place.
        group_rows: Rows of the window's groups.
        share: The rank.
    """
    total, ends = sum(group_rows), [0, *accumulate(group_rows)]
    low, high = (_bound(total, ends, number, share.size) for number in (share.rank, share.rank + 1))
    return np.flatnonzero((order >= low) & (order < high))


def _bound(total: int, ends: Sequence[int], number: int, size: int) -> int:
    """Return the first row of rank `number`."""
    bound = number * total // size
    at = bisect_left(ends, bound)
    # A group is decoded as a whole: a border within one makes two ranks decode it.
    nearest = min(ends[max(0, at - 1) : at + 1], key=lambda end: abs(end - bound))
    return nearest if abs(nearest - bound) * size <= _UNEVEN * total else bound


def places_in_order(first: int, count: int, batch_size: int, end: int | None, share: RankShare) -> NDArray[np.int64]:
    """Return the places int64[n] of a rank's samples in a window whose rows stay in order: a span of each batch.

    Args:
        first: Number of the window's first row since the begin of a batch; < 0 for rows before that.
        count: Rows of the window.
        batch_size: Samples of a batch of all ranks.
        end: Number of the row after the last batch's last one; None if the stream has no end.
        share: The rank.
    """
    spans = []
    # From the begin of the batch that holds the first row: the batch may have begun in the window before.
    for start in range(max(0, first) // batch_size * batch_size, first + count, batch_size):
        whole = batch_size if end is None else min(batch_size, end - start)
        part = share_of(whole, share.rank, share.size)
        spans.append(np.arange(max(start + part.start, first), min(start + part.stop, first + count)) - first)
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)


def spans_of(rows: NDArray[np.int64]) -> list[slice]:
    """Return the spans of consecutive numbers in ``rows int64[n]``, which rise."""
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    return [slice(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, ends) if len(part)]


def read_rows(
    read: Callable[[int], ColumnBlock], group_rows: Sequence[int], rows: NDArray[np.int64]
) -> ColumnBlock | None:
    """Decode the groups that hold some rows of a window, and return these rows.

    Args:
        read: Number of a group in the window -> its rows.
        group_rows: Rows of the window's groups.
        rows: int64[n], rows of the groups one after the other, in any order.
    """
    # Groups without any row of this rank are not decoded, so rows after them move forward by their lengths.
    starts = np.array([0, *accumulate(group_rows)])
    group = np.searchsorted(starts, rows, side="right") - 1
    # In the order of the groups, not of the rows, so that each group is decoded once.
    is_read = np.bincount(group, minlength=len(group_rows)) > 0
    blocks = [read(number) for number in np.flatnonzero(is_read).tolist()]
    if not blocks:
        return None
    left_out = np.cumsum(np.where(is_read, 0, group_rows))
    own = rows - left_out[group]
    # Rows of one group in their order are a view; all else is a gather.
    is_span = len(blocks) == 1 and own[-1] - own[0] + 1 == len(own) and bool((np.diff(own) == 1).all())
    return slice_rows(blocks[0], int(own[0]), int(own[-1]) + 1) if is_span else merge(blocks, own)
