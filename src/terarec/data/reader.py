"""`Reader`: source x sampler x decode x prefetch, and a position that can be saved after any batch."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from terarec.batch import Batch
from terarec.data.decode import cut, to_batch
from terarec.data.prefetch import ordered_map, prefetched
from terarec.data.sampler import Sampler
from terarec.data.source import DatasetSource, Source
from terarec.errors import ConfigError
from terarec.formats import ColumnBlock, merge
from terarec.spec import DatasetSpec


class Reader(IterableDataset[Batch]):
    """Batches of a split: one epoch per ``iter()``, or with `repeat` an endless stream of epochs. A `BatchReader`.

    It is a `torch.utils.data.IterableDataset` of whole batches, for ``DataLoader(reader, batch_size=None)``. It reads
    ahead with threads of its own, so a `DataLoader` around it has no workers.

    The order depends on `seed`, the epoch and `shuffle` alone, never on `threads` or `prefetch`. An epoch that was left
    early (``break``, an error) starts over at the next ``iter()``; to go on instead, load the state that was saved. One
    iteration at a time: a new one ends the one before. A batch never holds samples of two epochs.

    Memory: about ``threads + 3`` windows of decoded rows (a row group each, four when shuffling; 10 MB a group
    for Criteo) and `prefetch` batches.

    Args:
        dataset: directory of a prepared data set, or a `Source` such as `InMemorySource`.
        split: which split of the directory.
        batch_size: samples B in a batch; may exceed a row group.
        shuffle: whether to shuffle, anew in every epoch; otherwise samples come in input order.
        seed: of the shuffling.
        drop_last: whether a last batch of fewer samples is left out.
        repeat: whether ``iter()`` goes on with the next epoch, shuffled anew, after the last batch of one.
        threads: threads that read and decompress ahead; one more puts batches together.
        prefetch: batches ready ahead; 0 puts them together in the caller's thread.

    Raises:
        DataNotFoundError: no such directory, no ``dataset.json`` in it, or a shard is missing.
        FormatError: a file does not hold what ``dataset.json`` promises; also while iterating.
        ConfigError: no such split, an argument out of range, or `repeat` for a split without a batch.

    Example:
        >>> reader = Reader(Path("criteo"), batch_size=8192, shuffle=True)
        >>> for batch in reader:
        ...     loss = train_step(batch)
    """

    def __init__(
        self,
        dataset: str | Path | Source,
        split: str = "train",
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        repeat: bool = False,
        threads: int = 1,
        prefetch: int = 2,
    ) -> None:
        _check_int("batch_size", batch_size, 1)
        _check_int("seed", seed, 0)
        _check_int("threads", threads, 1)
        _check_int("prefetch", prefetch, 0)
        self._source: Source = DatasetSource(Path(dataset), split) if isinstance(dataset, str | Path) else dataset
        self.spec: DatasetSpec = self._source.spec
        self.num_rows = sum(self._source.group_rows)
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        if repeat and not len(self):
            got = f"{self.num_rows} samples in batches of {batch_size}"
            raise ConfigError(f"reader: repeat=True for {got}, expected at least one batch")
        self.repeat = repeat
        self._threads = threads
        self._prefetch = prefetch
        self._epoch = 0
        self._batches_done = 0
        self._restored = False
        # Weak, so that leaving a for loop drops the last reference to its iterator, which closes it.
        self._running: weakref.ref[Generator[Batch, None, None]] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.num_rows // self.batch_size if self._drop_last else -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch: all, or after `load_state_dict` those that are left.

        With `repeat` those of the next epochs follow, without end.

        Raises:
            ConfigError: a worker process of a `DataLoader` iterates: each worker would give every batch.
        """
        worker = get_worker_info()
        if worker is not None:
            raise ConfigError(
                f"reader: got a DataLoader with num_workers={worker.num_workers}, expected num_workers=0: "
                "Reader(threads=..., prefetch=...) reads ahead itself"
            )
        self.close()
        if not self._restored:
            self._batches_done = 0
        self._restored = False
        iterator = self._iterate()
        self._running = weakref.ref(iterator)
        return iterator

    def close(self) -> None:
        """End the running iteration and its threads. Leaving a ``for`` loop does so by itself."""
        iterator = self._running() if self._running is not None else None
        if iterator is not None:
            iterator.close()
        self._running = None

    def state_dict(self) -> dict[str, Any]:
        """Where the reader stands: small JSON data.

        ``epoch`` counts finished epochs and ``batches`` what the consumer has received of the current one.
        The other fields tell which order and cut they refer to.
        """
        return {"epoch": self._epoch, "batches": self._batches_done, "seed": self._seed, **self._cut()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the next ``iter()`` right after the batch after which `state` was taken.

        If that was the last one of its epoch, the next ``iter()`` gives nothing and ends the epoch; with `repeat` it
        gives the next epoch.

        Raises:
            ConfigError: the state is of other data, another batch size or another kind of order, or is no state.
        """
        for field, here in self._cut().items():
            if state.get(field) != here:
                raise ConfigError(f"reader state: {field} is {state.get(field)!r}, expected {here!r} as in this reader")
        for field in ("epoch", "batches", "seed"):
            _check_int(f"state[{field!r}]", state.get(field), 0)
        if state["batches"] > len(self):
            raise ConfigError(f"reader state: batches is {state['batches']}, expected at most {len(self)}")
        self.close()
        self._epoch, self._batches_done, self._seed = state["epoch"], state["batches"], state["seed"]
        self._restored = True

    def _cut(self) -> dict[str, Any]:
        return {
            "shuffle": self._shuffle,
            "batch_size": self.batch_size,
            "drop_last": self._drop_last,
            "rows": self.num_rows,
        }

    def _iterate(self) -> Generator[Batch, None, None]:
        batches = prefetched(self._epochs(self._epoch, self._batches_done * self.batch_size), self._prefetch)
        try:
            for batch in batches:
                if self._batches_done == len(self):  # the stream of `repeat` has come to the next epoch
                    self._epoch, self._batches_done = self._epoch + 1, 0
                self._batches_done += 1
                yield batch
            self._epoch, self._batches_done = self._epoch + 1, 0
        finally:
            batches.close()

    def _epochs(self, epoch: int, skip: int) -> Generator[Batch, None, None]:
        """The batches of `epoch` after its first `skip` samples, and with `repeat` those of all epochs after it."""
        yield from self._batches(epoch, skip)
        if self.repeat:
            for later in count(epoch + 1):
                yield from self._batches(later, 0)

    def _batches(self, epoch: int, skip: int) -> Generator[Batch, None, None]:
        """The batches of `epoch` after its first `skip` samples; whole windows before them are not read."""
        sampler = Sampler(self._source.group_rows, shuffle=self._shuffle, seed=self._seed)
        windows = list(enumerate(sampler.windows(epoch)))
        while windows and skip >= sampler.window_rows(windows[0][1]):
            skip -= sampler.window_rows(windows.pop(0)[1])

        def load(item: tuple[int, tuple[int, ...]]) -> ColumnBlock:
            index, window = item
            return merge([self._source.read(group) for group in window], sampler.order(epoch, index, window))

        names = [column.name for column in self.spec.categorical]
        metadata = [column.name for column in self.spec.metadata]
        blocks = ordered_map(load, windows, self._threads)
        try:
            for pieces in cut(blocks, self.batch_size, skip=skip, drop_last=self._drop_last):
                yield to_batch(names, pieces, metadata)
        finally:
            blocks.close()


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**64:
        raise ConfigError(f"reader: {name} is {value!r}, expected an integer >= {minimum}")
