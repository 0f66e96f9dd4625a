"""The stream of batches that all readers share: from a saved position on, read ahead by threads."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, groupby, pairwise
from operator import itemgetter

from terarec.batch import Batch
from terarec.data.decode import cut
from terarec.data.sampling import OwnRows, RankShare, Sampler, mixed_places, places_in_order, read_rows, spans_of
from terarec.errors import ConfigError, FormatError
from terarec.formats import ColumnBlock, merge
from terarec.parallel import ordered_map, prefetched
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
        drop_last: Whether a last batch of fewer samples is left out. A stream that repeats has none.
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
        for name, minimum in (("batch_size", 1), ("threads", 1), ("prefetch", 0)):
            checks.argument(name, getattr(self, name), checks.integer(minimum))
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
class _Position:
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
        index: Number of the window in the epoch.
        groups: The groups.
        start: Rows of the epoch before them.
        kept: Rows of each group that are not left out, where a rank reads its share; else all rows.
        first: Number of its first row since the begin of a batch; < 0 for rows that earlier batches had.
        end: Number of the row after the last batch's last one; None if that is not known, or there is none.
    """

    epoch: int
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


class BatchStream:
    """Iteration of a reader, at most one at a time, with a position that can be saved after any batch.

    Args:
        feed: Input of the stream.
        options: Options for cutting and ordering it.

    Raises:
        FormatError: No rows that could repeat.
    """

    def __init__(self, feed: Feed, options: StreamOptions) -> None:
        self.options = options
        self._feed = _checked(feed, options)
        self._position = _Position()
        self._restored = False
        self._batch_rows = 0
        # Weak, so that leaving a for loop drops the last reference to its iterator, which closes it.
        self._running: weakref.ref[Generator[Batch, None, None]] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of an epoch, before any are left out."""
        return sum(self._feed.group_rows)

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch, before any rows are left out."""
        size = self.options.batch_size
        return sum(rows // size if self.options.drop_last else -(-rows // size) for rows in self._feed.part_rows)

    @property
    def num_skipped(self) -> int:
        """Number of rows left out so far, up to the last batch that was yielded."""
        return self._position.skipped

    @property
    def batch_rows(self) -> int:
        """Samples of the last batch that was yielded, those of all ranks."""
        return self._batch_rows

    @property
    def share(self) -> RankShare | None:
        """The rank whose samples are read alone; None for whole batches."""
        return self._feed.share

    def take_share(self, share: RankShare | None) -> None:
        """Read the samples of one rank alone; the running iteration ends."""
        self.replace_feed(replace(self._feed, share=share))

    def replace_feed(self, feed: Feed) -> None:
        """Read `feed` from its start on; the running iteration ends.

        Raises:
            FormatError: No rows that could repeat; the feed before stays.
        """
        feed = _checked(feed, self.options)
        self.close()
        self._feed, self._restored = feed, False

    def start(self) -> Iterator[Batch]:
        """Iterate from the restored position, or from the start of the current epoch on."""
        self.close()
        if not self._restored:
            # An epoch that was left early starts over, unless `load_state_dict` asked to continue.
            self._position = replace(self._position, rows=0)
        self._restored = False
        iterator = self._iterate()
        # Remembered, because a new iteration ends the previous one: both would move the one position.
        self._running = weakref.ref(iterator)
        return iterator

    def close(self) -> None:
        """End the running iteration and its threads."""
        iterator = self._running() if self._running is not None else None
        if iterator is not None:
            iterator.close()
        self._running = None

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position and the options that it depends on, as small JSON data."""
        at = self._position
        return {
            "epoch": at.epoch,
            "rows_read": at.rows,
            "rows_skipped": at.skipped,
            "seed": self.options.seed,
            **self._cut(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from `state` at the next `start`.

        States of earlier versions have ``batches`` (of the epoch) in place of ``rows_read``, and no ``repeat``.

        Raises:
            ConfigError: The state is of other data or other options, or is not a state.
        """
        # Fields that earlier versions did not write have the values that were the only ones then.
        state = {"repeat": False, "rows_skipped": 0, **state}
        for field, here in {"parts": None, **self._cut()}.items():
            if state.get(field) != here:
                raise ConfigError(
                    "reader state", f"{field} is {state.get(field)!r}, expected {here!r} as in this reader"
                )
        if "rows_read" not in state:
            batches: int = checks.argument("state['batches']", state.get("batches"), _COUNT)
            if batches > self.num_batches:
                raise ConfigError("reader state", f"batches is {batches}, expected at most {self.num_batches}")
            state["rows_read"] = min(batches * self.options.batch_size, self.num_rows)
        epoch, rows, skipped, seed = (
            checks.argument(f"state[{field!r}]", state.get(field), _COUNT)
            for field in ("epoch", "rows_read", "rows_skipped", "seed")
        )
        if rows > self.num_rows:
            raise ConfigError("reader state", f"rows_read is {rows}, expected at most {self.num_rows}")
        self.close()
        self._position = _Position(epoch=epoch, rows=rows, skipped=skipped)
        # The seed is the state's, as the rest of the epoch has to come in its order.
        self.options = replace(self.options, seed=seed)
        self._restored = True

    def _cut(self) -> dict[str, int | bool]:
        options = self.options
        return {
            "shuffle": options.shuffle,
            "batch_size": options.batch_size,
            "drop_last": options.drop_last,
            "repeat": options.repeat,
            "rows": self.num_rows,
            **({} if self._feed.parts is None else {"parts": len(self._feed.parts)}),
        }

    def _iterate(self) -> Generator[Batch, None, None]:
        batches = prefetched(_batches(self._feed, self.options, self._position), self.options.prefetch)
        try:
            # The position moves before the batch is handed over: a state saved while it is used is that after it.
            for batch, self._position, rows in batches:
                if batch is not None:
                    self._batch_rows = rows
                    yield batch
        finally:
            batches.close()


def _batches(
    feed: Feed, options: StreamOptions, position: _Position
) -> Generator[tuple[Batch | None, _Position, int], None, None]:
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
    part_ends = list(accumulate(feed.part_rows))

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

    held: deque[_Held] = deque()
    epoch, kept, skipped = position.epoch, position.rows, position.skipped

    def blocks() -> Iterator[tuple[int, OwnRows]]:
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
            held.append(_Held(window, block.num_rows, min(used, block.num_rows)))
            yield bisect_right(part_ends, window.start) if feed.parts is not None else 0, block

    windows = _windows(feed, sampler, position, repeat=options.repeat)
    first = next(windows, None)
    # One window is being cut, and one waits for that: with fewer ahead than this, a thread would wait, too, which takes
    # 5 % of the throughput of Criteo's Parquet files (two cores, two threads).
    ahead = options.threads + 2
    loaded = ordered_map(load, () if first is None else chain((first,), windows), options.threads, ahead)
    skip = 0 if first is None else _used_rows(first, position)
    try:
        # Parts are cut one by one, so that no batch crosses their border.
        for part, of_part in groupby(blocks(), key=itemgetter(0)):
            rest = (block for _, block in of_part)
            batches = cut(rest, options.batch_size, slice_of=OwnRows.slice, skip=skip, drop_last=options.drop_last)
            for pieces in batches:
                size = sum(piece.num_rows for piece in pieces)
                at, rows = _advance(held, sampler, size)
                # A rank may have no sample of a batch. It still takes part in the step, with a batch of no rows.
                own = [piece.block for piece in pieces if piece.block is not None]
                if not own:
                    assert feed.empty is not None, "without a share all blocks are read"
                    own = [feed.empty]
                yield feed.to_batch(own), _Position(epoch=at, rows=rows, skipped=skipped), size
            # Only the first part begins within a window.
            skip = 0
            while held and held[0].window.start < part_ends[part] and feed.parts is not None:
                held.popleft()  # its rest is the last batch that was left out
        yield None, _Position(epoch=position.epoch + 1, skipped=skipped), 0
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


def _windows(feed: Feed, sampler: Sampler, position: _Position, *, repeat: bool) -> Iterator[_Window]:
    """Yield the windows that are not finished at `position`, in order; those before it are never read."""
    counts = feed.kept if feed.share is not None else None
    part_ends = list(accumulate(feed.part_rows))
    at: tuple[int, int] | None = None  # row after the window before, since the begin of a batch, and its part
    for epoch in count(position.epoch) if repeat else (position.epoch,):
        start = 0
        for index, groups in enumerate(sampler.windows(epoch)):
            rows = sampler.window_rows(groups)
            part = min(bisect_right(part_ends, start), len(part_ends) - 1)  # groups at the end may have no rows
            if epoch > position.epoch or start + rows > position.rows:
                kept = tuple(feed.group_rows[group] if counts is None else counts(group) for group in groups)
                # Counted from the position at which this stream began, a border of batches: an endless stream cuts
                # batches across the ends of epochs, and each part begins with a new one.
                if at is None:
                    first = -max(0, position.rows - start) if epoch == position.epoch else 0
                else:
                    first = at[0] if at[1] == part else 0
                # How many rows follow is known where none are left out. Else a last batch is cut as a full one.
                end = None if repeat or counts is not None else first + part_ends[part] - start
                yield _Window(epoch, index, groups, start, kept, first, end)
                at = first + sum(kept), part
            start += rows


def _used_rows(window: _Window, position: _Position) -> int:
    """Return the number of rows of `window` that batches before `position` used."""
    return max(0, position.rows - window.start) if window.epoch == position.epoch else 0


def _advance(held: deque[_Held], sampler: Sampler, rows: int) -> tuple[int, int]:
    """Take the next `rows` rows out of the windows `held`; returns the epoch after them, and its rows read."""
    epoch = at = 0
    # Windows without any kept rows count as read as soon as they are held, because their skipped rows are counted.
    while held and (rows or held[0].used == held[0].kept):
        first = held[0]
        step = min(rows, first.kept - first.used)
        first.used += step
        rows -= step
        epoch, at = first.window.epoch, first.window.start + first.used
        if first.used == first.kept:
            at = first.window.start + sampler.window_rows(first.window.groups)
            held.popleft()
    return epoch, at


def _checked(feed: Feed, options: StreamOptions) -> Feed:
    if options.repeat and not sum(feed.group_rows):
        raise FormatError("reader", "the source holds no records, expected some to repeat")
    if options.repeat and feed.parts is not None:
        raise ConfigError(
            "reader", "got repeat with parts, expected one of them: batches would cross the parts' borders"
        )
    return feed


_COUNT = checks.integer(0)
