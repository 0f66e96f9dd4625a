# SPDX-License-Identifier: Apache-2.0
"""The stream of batches that all readers are: one iteration at a time, with a position that can be saved."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from terarec.batch import Batch
from terarec.closer import Stream
from terarec.data.feed import Feed, Position, Step, StreamOptions, batches_after
from terarec.data.sampling import RankShare
from terarec.errors import ConfigError, FormatError
from terarec.parallel import prefetched
from terarec.spec import checks


@dataclass(slots=True)
class _Progress:
    """What an iteration has yielded: the position after its last batch, and that batch's samples on all ranks."""

    position: Position
    batch_rows: int = 0


class BatchStream(IterableDataset[Batch]):
    """Batches of a feed, at most one iteration at a time, with a position that can be saved after any batch.

    It is a `BatchReader`, which subclasses give their feed. As a `torch.utils.data.IterableDataset` it yields complete
    batches, for ``DataLoader(reader, batch_size=None)``. It reads ahead with threads of its own, so a `DataLoader`
    around it has no workers.

    Attributes:
        batch_size: Samples B in a batch.
        repeat: Whether each epoch follows the previous one without an end.

    Args:
        feed: Input of the stream; None for no rows until `replace_feed`.
        options: Options for cutting and ordering it.
    """

    def __init__(self, feed: Feed | None, options: StreamOptions) -> None:
        self.batch_size = options.batch_size
        self.repeat = options.repeat
        self._options = options
        self._feed = _NO_ROWS if feed is None else _checked(feed, options)
        self._num_rows = sum(self._feed.group_rows)  # once, as every step asks for the state
        self._progress = _Progress(Position())
        self._restored = False
        # Weak, so that leaving a for loop drops the last reference to its iterator, whose threads then end.
        self._running: weakref.ref[Stream[Step]] | None = None

    @property
    def num_rows(self) -> int:
        """Number of samples in an epoch, before any are left out."""
        return self._num_rows

    @property
    def num_skipped(self) -> int:
        """Number of records left out so far for a wrong checksum, up to the last batch that was yielded."""
        return self._progress.position.skipped

    @property
    def batch_rows(self) -> int:
        """Samples of the last batch that was yielded, those of all ranks."""
        return self._progress.batch_rows

    @property
    def share(self) -> RankShare | None:
        """The rank whose samples are read alone; None for whole batches."""
        return self._feed.share

    def take_share(self, share: RankShare | None) -> None:
        """Read the samples of one rank alone, of several that share every batch; see `BatchReader.take_share`.

        Of files with checksums all records are checked, and those of the rank decoded.
        """
        self._start_over(replace(self._feed, share=share))

    def replace_feed(self, feed: Feed) -> None:
        """Read `feed` from its start on; the running iteration ends. A rank continues with its share.

        Raises:
            FormatError: No rows that could repeat; the feed before stays.
        """
        self._start_over(replace(_checked(feed, self._options), share=self.share))

    def __len__(self) -> int:
        """Return the number of batches in an epoch, before any rows are left out."""
        size, drop_last = self.batch_size, self._options.drop_last
        return sum(rows // size if drop_last else -(-rows // size) for rows in self._feed.part_rows)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the current epoch, or from it on without an end; after `load_state_dict` over the rest.

        Raises:
            ConfigError: A worker process of a `DataLoader` iterates: each worker would yield every batch.
        """
        # A worker would be a copy of this reader, and each copy would read all batches.
        worker = get_worker_info()
        if worker is not None:
            raise ConfigError(
                "reader",
                f"got a DataLoader with num_workers={worker.num_workers}, expected num_workers=0: "
                f"{type(self).__name__}(threads=..., prefetch=...) reads ahead itself",
            )
        self.close()
        progress = self._progress
        if not self._restored:
            # An epoch that was left early starts over, unless `load_state_dict` asked to continue.
            progress.position = replace(progress.position, rows=0)
        self._restored = False
        batches = prefetched(batches_after(self._feed, self._options, progress.position), self._options.prefetch)
        # Remembered, because a new iteration ends the previous one: both would move the one position.
        self._running = weakref.ref(batches)
        return _iterate(batches, progress)

    def close(self) -> None:
        """End the running iteration and its threads. Leaving a ``for`` loop does so by itself."""
        batches = self._running() if self._running is not None else None
        if batches is not None:
            batches.close()
        self._running = None

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position of the reader as small JSON data.

        ``epoch`` counts finished epochs. ``rows_read`` counts the records read of the current one, with those that
        were left out, so that a resumed run reads exactly the rest. The other fields say to what they refer: the order
        and the batches.
        """
        at = self._progress.position
        return {
            "epoch": at.epoch,
            "rows_read": at.rows,
            "rows_skipped": at.skipped,
            "seed": self._options.seed,
            **self._cut(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the next ``iter()`` with the batch after the one at which `state` was saved.

        If that was the last one of its epoch, the next ``iter()`` yields nothing and ends the epoch.

        Raises:
            ConfigError: The state is of other data, another batch size or another type of order, or is not a state.
        """
        for field, here in {"parts": None, **self._cut()}.items():
            if state.get(field) != here:
                raise ConfigError(
                    "reader state", f"{field} is {state.get(field)!r}, expected {here!r} as in this reader"
                )
        epoch, rows, skipped, seed = (
            checks.argument(f"state[{field!r}]", state.get(field), _COUNT)
            for field in ("epoch", "rows_read", "rows_skipped", "seed")
        )
        if rows > self.num_rows:
            raise ConfigError("reader state", f"rows_read is {rows}, expected at most {self.num_rows}")
        self.close()
        self._progress.position = Position(epoch=epoch, rows=rows, skipped=skipped)
        # The seed is the state's, as the rest of the epoch has to come in its order.
        self._options = replace(self._options, seed=seed)
        self._restored = True

    def _start_over(self, feed: Feed) -> None:
        self.close()
        self._feed, self._num_rows, self._restored = feed, sum(feed.group_rows), False

    def _cut(self) -> dict[str, int | bool]:
        options = self._options
        return {
            "shuffle": options.shuffle,
            "batch_size": options.batch_size,
            "drop_last": options.drop_last,
            "repeat": options.repeat,
            "rows": self.num_rows,
            **({} if self._feed.parts is None else {"parts": len(self._feed.parts)}),
        }


def _iterate(batches: Iterator[Step], progress: _Progress) -> Iterator[Batch]:
    """Yield the batches; like `batches_after` it holds no reader."""
    # The position moves before the batch is handed over: a state saved while it is used is that after it.
    for batch, progress.position, rows in batches:
        if batch is not None:
            progress.batch_rows = rows
            yield batch


def _checked(feed: Feed, options: StreamOptions) -> Feed:
    if options.repeat and not sum(feed.group_rows):
        raise FormatError("reader", "the source holds no records, expected some to repeat")
    if options.repeat and options.drop_last and feed.ends_batches and sum(feed.group_rows) < options.batch_size:
        # Without this, it would search for a batch for ever.
        raise FormatError(
            "reader",
            f"the source holds {sum(feed.group_rows):,} records and drop_last leaves short batches out, expected at "
            f"least {options.batch_size:,} to repeat",
        )
    if options.repeat and feed.parts is not None:
        raise ConfigError(
            "reader", "got repeat with parts, expected one of them: batches would cross the parts' borders"
        )
    return feed


def _no_rows(_: object) -> NoReturn:
    raise AssertionError("a feed without groups has no rows to read")


_NO_ROWS = Feed(group_rows=(), read=_no_rows, to_batch=_no_rows)
_COUNT = checks.integer(0)
