"""`RecordReader`: batches of HugeCTR's files, read ahead by threads, whose number does not change the order."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import count, cycle

from terarec.batch import Batch
from terarec.data.decode import cut, to_batch
from terarec.data.prefetch import ordered_map, prefetched
from terarec.data.records.sources import RecordSource
from terarec.data.sampler import group_order
from terarec.errors import ConfigError, FormatError
from terarec.formats import ColumnBlock


class RecordReader:
    """Hands out batches one by one. Their order is that of the files or the seed's, whatever the number of threads.

    Reading begins with the first `next_batch` and goes on ahead of the consumer: at most `queued`
    batches and ``threads + 1`` groups of records wait for him.

    Args:
        source: where the records are.
        batch_size: samples B in a batch.
        repeat: whether the data starts over at its end, as one endless stream: then every batch is full.
        drop_last: whether, without `repeat`, a last batch of fewer samples is left out.
        threads: threads that read and decode; one more puts batches together.
        queued: batches ready ahead.
        shuffle_seed: takes the groups of records in random order, another one each time the data starts over; the
            records in a group stay in order. None keeps the order of the files.

    Attributes:
        num_skipped: records left out so far because their checksum failed, up to the last batch handed out.

    Raises:
        ConfigError: an argument out of range.
        FormatError: with `repeat`, a source without records.
    """

    def __init__(
        self,
        source: RecordSource,
        *,
        batch_size: int,
        repeat: bool,
        drop_last: bool,
        threads: int,
        queued: int = 2,
        shuffle_seed: int | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("threads", threads), ("queued", queued)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"record reader: {name} is {value!r}, expected an integer >= 1")
        self.batch_size = batch_size
        self.num_skipped = 0
        self._repeat = repeat
        self._drop_last = drop_last
        self._threads = threads
        self._queued = queued
        self._shuffle_seed = shuffle_seed
        self._epoch = 0
        self._batches: Generator[tuple[Batch | None, int], None, None] | None = None
        self._check_source(source)
        self.source = source

    @property
    def is_started(self) -> bool:
        """Whether threads are reading, or have read something that was not handed out yet."""
        return self._batches is not None

    def next_batch(self) -> Batch | None:
        """The next batch; None once at the end of the data, after which the next call starts over.

        The batch has one feature a slot, ``<input>.<slot>``, in the order of the layout, with final int64 keys.

        Raises:
            FormatError: a file is damaged. The next call starts over.
            StorageError: a disk or a server fails.
        """
        if self._batches is None:
            self._batches = prefetched(_stream(self._plan()), self._queued)
        try:
            batch, skipped = next(self._batches)
        except BaseException:
            self.close()
            raise
        self.num_skipped += skipped
        if batch is None:
            self._epoch += 1
            self.close()
        return batch

    def set_source(self, source: RecordSource) -> None:
        """Read `source` from its start on; what was read ahead is dropped.

        Raises:
            FormatError: with `repeat`, a source without records; the one before is kept.
        """
        self._check_source(source)
        self.close()
        self.source = source

    def close(self) -> None:
        """End the threads; the next `next_batch` starts over."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _plan(self) -> _Plan:
        return _Plan(
            source=self.source,
            batch_size=self.batch_size,
            repeat=self._repeat,
            drop_last=self._drop_last,
            threads=self._threads,
            shuffle_seed=self._shuffle_seed,
            first_epoch=self._epoch,
        )

    def _check_source(self, source: RecordSource) -> None:
        if self._repeat and not sum(source.group_rows):
            raise FormatError("record reader: the source holds no records, expected some to repeat")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What a stream needs; it holds no reader, so that a reader that nobody keeps ends its threads."""

    source: RecordSource
    batch_size: int
    repeat: bool
    drop_last: bool
    threads: int
    shuffle_seed: int | None
    first_epoch: int

    def groups(self) -> Iterator[int]:
        """The groups of records in the order in which they are read."""
        num_groups = len(self.source.group_rows)
        for epoch in count(self.first_epoch) if self.repeat else (self.first_epoch,):
            if self.shuffle_seed is None:
                yield from range(num_groups)
            else:
                yield from group_order(num_groups, seed=self.shuffle_seed, epoch=epoch)


def _stream(plan: _Plan) -> Generator[tuple[Batch | None, int], None, None]:
    """Each batch with the number of records left out on the way to it, and in the end None with the rest."""
    skipped = 0

    def blocks() -> Iterator[ColumnBlock]:
        nonlocal skipped
        kept = 0
        for position, (block, left_out) in zip(cycle(range(num_groups)), loaded, strict=False):
            skipped += left_out
            kept = block.num_rows + (kept if position else 0)
            if plan.repeat and position == num_groups - 1 and not kept:
                raise FormatError("record reader: the checksum of every record fails, expected some to repeat")
            yield block

    num_groups = len(plan.source.group_rows)
    loaded = ordered_map(plan.source.read, plan.groups(), plan.threads)
    try:
        for pieces in cut(blocks(), plan.batch_size, skip=0, drop_last=plan.drop_last):
            yield to_batch(plan.source.layout.slot_names, pieces), skipped
            skipped = 0
        yield None, skipped
    finally:
        loaded.close()
