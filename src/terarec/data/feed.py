# SPDX-License-Identifier: Apache-2.0
"""The input of a stream, and its batches from a position on, read ahead by threads."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count, groupby, pairwise
from operator import itemgetter

from terarec.batch import Batch
from terarec.closer import stream
from terarec.data.decode import cut
from terarec.data.sampling import OwnRows, RankShare, Sampler, mixed_places, places_in_order, read_rows, spans_of
from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, merge
from terarec.parallel import ordered_map
from terarec.spec import checks

ReadGroup = Callable[[int], tuple[ColumnBlock, int]]
"""Group number -> its rows, and how many more were left out; called from several threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """Options for how a stream is cut, ordered and read ahead.

    Attributes:
        batch_size: Samples B in a batch.
        shuffle: Whether the order is random, a new one in every epoch.
        seed: Shuffle seed.
        drop_last: Whether a last batch of fewer samples is left out. Most streams that repeat have none.
        repeat: Whether each epoch follows the previous one without an end.
        threads: Threads that read and decode.
        prefetch: Batches ready ahead; 0 for none, without a thread.
    """

    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    repeat: bool
    threads: int
    prefetch: int

    def __post_init__(self) -> None:
        checks.argument("batch_size", self.batch_size, checks.integer(1, checks.MOST_BATCH))
        checks.argument("threads", self.threads, checks.integer(1, checks.MOST_THREADS))
        checks.argument("prefetch", self.prefetch, checks.integer(0, checks.MOST_WIDTH))
        checks.argument("seed", self.seed, checks.integer(0, 2**64 - 1))
        for name in ("shuffle", "drop_last", "repeat"):
            checks.argument(name, getattr(self, name), checks.FLAG)


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """Input of a stream.

    Attributes:
        group_rows: Rows of each group, before any are left out.
        read: Reads a group.
        to_batch: Rows -> batch.
        runs: Lengths of the runs of groups that stay in order when shuffling; None if each group is a run.
        mixes_rows: Whether shuffling mixes the rows of several groups; otherwise it moves complete groups.
        parts: Numbers of the consecutive groups of each part: parts come in their order, shuffling stays within a part,
            and no batch holds rows of two. None for one part; not together with `runs`.
        ends_batches: Whether the end of an epoch ends its last batch also in a stream that repeats, where it otherwise
            gets rows of the next epoch.
        share: The rank that reads, of several that share every batch; None for whole batches.
        kept: Group number -> rows that `read` does not leave out, in less time than it takes; None where it never
            leaves out any. Ranks ask for it, since which samples are in a batch depends on all rows before.
        read_part: Reads some spans ``start <= i < stop`` of the rows of a group that are not left out, decoding no
            others; None where a group can only be decoded as a whole.
        empty: A block without rows; needed with `share`.
    """

    group_rows: Sequence[int]
    read: ReadGroup
    to_batch: Callable[[Sequence[ColumnBlock]], Batch]
    runs: Sequence[int] | None = None
    mixes_rows: bool = True
    parts: Sequence[int] | None = None
    ends_batches: bool = False
    share: RankShare | None = None
    kept: Callable[[int], int] | None = None
    read_part: Callable[[int, Sequence[slice]], ColumnBlock] | None = None
    empty: ColumnBlock | None = None

    @property
    def part_rows(self) -> tuple[int, ...]:
        """Rows of each part."""
        if self.parts is None:
            return (sum(self.group_rows),)
        ends = list(accumulate(self.group_rows, initial=0))
        stops = list(accumulate(self.parts, initial=0))
        return tuple(ends[stop] - ends[start] for start, stop in pairwise(stops))


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Position between two batches.

    Attributes:
        epoch: Finished epochs.
        rows: Rows read of the current epoch: all rows of a finished window, left out or not, and of the window that is
            begun those that batches hold. So it does not depend on what is left out later.
        skipped: Rows left out so far, in all epochs.
    """

    epoch: int = 0
    rows: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class _Window:
    """Window of groups that are read together.

    Attributes:
        epoch: Number of the epoch.
        section: The epoch and the part, as far as they end batches: no batch has rows of two sections.
        index: Number of the window in the epoch.
        groups: The groups.
        start: Rows of the epoch before them.
        kept: Rows of each group that are not left out, where a rank reads its share; else all rows.
        first: Number of its first row since the begin of a batch; < 0 for rows that earlier batches had.
        end: Number of the row after the last batch's last one; None if that is not known, or there is none.
    """

    epoch: int
    section: tuple[int, int]
    index: int
    groups: tuple[int, ...]
    start: int
    kept: tuple[int, ...]
    first: int
    end: int | None


@dataclass(slots=True)
class _Held:
    """Window in memory: the rows that it holds, and how many of them batches used already."""

    window: _Window
    kept: int
    used: int


Step = tuple[Batch | None, Position, int]
"""A batch, the position after it and its rows; None in place of a batch at the end of an epoch."""


@stream
def batches_after(feed: Feed, options: StreamOptions, position: Position) -> Generator[Step, None, None]:
    """Yield each batch after `position`, the position after it and its rows; then None and the start of the next epoch.

    It holds no reader, so that an unreferenced reader ends its threads.
    """
    sampler = Sampler(
        feed.group_rows,
        shuffle=options.shuffle,
        seed=options.seed,
        runs=feed.runs,
        mixes_rows=feed.mixes_rows,
        parts=feed.parts,
    )

    # Runs in reading threads, several windows at once; all that it shares with them is read only.
    def load(window: _Window) -> tuple[_Window, OwnRows, int]:
        if feed.share is not None:
            left_out = sampler.window_rows(window.groups) - sum(window.kept)
            return window, _rows_of_share(feed, feed.share, options, sampler, window), left_out
        read = [feed.read(group) for group in window.groups]
        blocks = [block for block, _ in read]
        order = sampler.order(window.epoch, window.index, sum(block.num_rows for block in blocks))
        # Mixed by the reading thread, not by the consumer: the permutation is a copy of all columns.
        merged = merge(blocks, order)
        return window, OwnRows(merged.num_rows, merged), sum(left_out for _, left_out in read)

    queue: deque[_Held] = deque()
    epoch, kept, skipped = position.epoch, position.rows, position.skipped

    def blocks() -> Iterator[tuple[tuple[int, int], OwnRows]]:
        nonlocal epoch, kept, skipped
        for window, block, left_out in loaded:
            if window.epoch > epoch:
                if not kept:
                    # Without this, a stream that repeats would search for a record for ever.
                    raise FormatError("reader", "the checksum of every record fails, expected some to repeat")
                epoch, kept = window.epoch, 0
            kept += block.num_rows
            used = _used_rows(window, position)
            if not used:  # otherwise they were counted before the position was saved
                skipped += left_out
            queue.append(_Held(window, block.num_rows, min(used, block.num_rows)))
            yield window.section, block

    windows = _windows(feed, sampler, position, repeat=options.repeat)
    first = next(windows, None)
    # One window is being cut, and one waits for that: with fewer ahead than this, a thread would wait, too, which takes
    # 5 % of the throughput of Criteo's Parquet files (two cores, two threads).
    ahead = options.threads + 2
    loaded = ordered_map(load, () if first is None else chain((first,), windows), options.threads, ahead)
    skip = 0 if first is None else _used_rows(first, position)
    try:
        # Sections are cut one by one, so that no batch crosses their border.
        for section, of_section in groupby(blocks(), key=itemgetter(0)):
            rest = (block for _, block in of_section)
            batches = cut(rest, options.batch_size, slice_of=OwnRows.slice, skip=skip, drop_last=options.drop_last)
            for pieces in batches:
                size = sum(piece.num_rows for piece in pieces)
                at, rows = _advance(queue, sampler, size)
                # A rank may have no sample of a batch. It still takes part in the step, with a batch of no rows.
                own = [piece.block for piece in pieces if piece.block is not None]
                if not own:
                    assert feed.empty is not None, "without a share all blocks are read"
                    own = [feed.empty]
                yield feed.to_batch(own), Position(epoch=at, rows=rows, skipped=skipped), size
            # Only the first section begins within a window.
            skip = 0
            while queue and queue[0].window.section == section:
                queue.popleft()  # its rest is the last batch that was left out
        yield None, Position(epoch=position.epoch + 1, skipped=skipped), 0
    finally:
        loaded.close()


def _rows_of_share(feed: Feed, share: RankShare, options: StreamOptions, sampler: Sampler, window: _Window) -> OwnRows:
    """Read a rank's rows of a window, in the window's order."""
    total = sum(window.kept)
    # Every rank computes the order of the whole window, so ranks agree without a message.
    order = sampler.order(window.epoch, window.index, total)
    if order is None or share.is_span:
        places = places_in_order(window.first, total, options.batch_size, window.end, share)
    else:
        places = mixed_places(order, window.kept, share)
    rows = places if order is None else order[places]
    if order is None and feed.read_part is not None:  # a window in order is one group
        return OwnRows(total, feed.read_part(window.groups[0], spans_of(rows)) if len(rows) else None, places)
    block = read_rows(lambda number: feed.read(window.groups[number])[0], window.kept, rows)
    return OwnRows(total, block, places)


def _windows(feed: Feed, sampler: Sampler, position: Position, *, repeat: bool) -> Iterator[_Window]:
    """Yield the windows that are not finished at `position`, in order; those before it are never read."""
    counts = feed.kept if feed.share is not None else None
    part_ends = list(accumulate(feed.part_rows))
    at: tuple[int, tuple[int, int]] | None = None  # row after the window before, since a batch's begin, and its section
    for epoch in count(position.epoch) if repeat else (position.epoch,):
        start = 0
        for index, groups in enumerate(sampler.windows(epoch)):
            rows = sampler.window_rows(groups)
            part = min(bisect_right(part_ends, start), len(part_ends) - 1)  # groups at the end may have no rows
            section = (epoch if feed.ends_batches else 0, part)
            if epoch > position.epoch or start + rows > position.rows:
                kept = tuple(feed.group_rows[group] if counts is None else counts(group) for group in groups)
                # Counted from the position at which this stream began, a border of batches: most endless streams cut
                # batches across the ends of epochs, and each section begins with a new one.
                if at is None:
                    first = -max(0, position.rows - start) if epoch == position.epoch else 0
                else:
                    first = at[0] if at[1] == section else 0
                # How many rows follow is known where none are left out. Else a last batch is cut as a full one.
                is_open = (repeat and not feed.ends_batches) or counts is not None
                end = None if is_open else first + part_ends[part] - start
                yield _Window(epoch, section, index, groups, start, kept, first, end)
                at = first + sum(kept), section
            start += rows


def _used_rows(window: _Window, position: Position) -> int:
    """Return the number of rows of `window` that batches before `position` used."""
    return max(0, position.rows - window.start) if window.epoch == position.epoch else 0


def _advance(queue: deque[_Held], sampler: Sampler, rows: int) -> tuple[int, int]:
    """Take the next `rows` rows out of the windows `queue`; returns the epoch after them, and its rows read."""
    epoch = at = 0
    # Windows without any kept rows count as read as soon as they are held, because their skipped rows are counted.
    while queue and (rows or queue[0].used == queue[0].kept):
        first = queue[0]
        step = min(rows, first.kept - first.used)
        first.used += step
        rows -= step
        epoch, at = first.window.epoch, first.window.start + first.used
        if first.used == first.kept:
            at = first.window.start + sampler.window_rows(first.window.groups)
            queue.popleft()
    return epoch, at
