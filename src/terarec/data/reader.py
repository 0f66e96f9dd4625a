"""`Reader`: batches of a data set, and a position that can be saved after any batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from torch.utils.data import IterableDataset, get_worker_info

from terarec.batch import Batch
from terarec.data.batch_stream import BatchStream, Feed, StreamOptions
from terarec.data.decode import to_batch
from terarec.data.source import DatasetSource, Source
from terarec.errors import ConfigError
from terarec.formats import ColumnBlock
from terarec.spec import DatasetSpec


class Reader(IterableDataset[Batch]):
    """Batches of a split, one epoch per ``iter()``, or an endless stream: a `BatchReader`.

    It is a `torch.utils.data.IterableDataset` of whole batches, for ``DataLoader(reader, batch_size=None)``. It reads
    ahead with threads of its own, so a `DataLoader` around it has no workers.

    The order depends on `seed`, the epoch and `shuffle` alone, never on `threads` or `prefetch`. An epoch that was left
    early (``break``, an error) starts over at the next ``iter()``; to go on instead, load the state that was saved. One
    iteration at a time: a new one ends the one before.

    Memory: about ``threads + 3`` windows of decoded rows (a row group each, four when shuffling; 10 MB a group
    for Criteo) and `prefetch` batches.

    Args:
        dataset: directory of a prepared data set, or a `Source` such as `InMemorySource`.
        split: which split of the directory.
        batch_size: samples B in a batch; may exceed a row group.
        shuffle: whether to shuffle, anew in every epoch; otherwise samples come in input order.
        seed: of the shuffling.
        drop_last: whether a last batch of fewer samples is left out.
        repeat: Whether each epoch follows the one before without an end. Then every batch is full.
        threads: threads that read and decompress ahead; one more puts batches together.
        prefetch: batches ready ahead; 0 puts them together in the caller's thread.

    Raises:
        DataNotFoundError: no such directory, no ``dataset.json`` in it, or a shard is missing.
        FormatError: a file does not hold what ``dataset.json`` promises; also while iterating. Or there are no samples
            to repeat.
        ConfigError: no such split, or an argument out of range.

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
        options = StreamOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            repeat=repeat,
            threads=threads,
            prefetch=prefetch,
        )
        source: Source = DatasetSource(Path(dataset), split) if isinstance(dataset, str | Path) else dataset
        self.spec: DatasetSpec = source.spec
        self.batch_size = batch_size
        self.repeat = repeat
        names = [column.name for column in self.spec.categorical]
        metadata = [column.name for column in self.spec.metadata]
        feed = Feed(
            group_rows=source.group_rows,
            read=partial(_read, source),
            to_batch=partial(to_batch, names, metadata=metadata),
        )
        self._stream = BatchStream(feed, options)

    @property
    def num_rows(self) -> int:
        """Samples in an epoch."""
        return self._stream.num_rows

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._stream.num_batches

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch: all, or after `load_state_dict` those that are left.

        Raises:
            ConfigError: a worker process of a `DataLoader` iterates: each worker would give every batch.
        """
        worker = get_worker_info()
        if worker is not None:
            raise ConfigError(
                f"reader: got a DataLoader with num_workers={worker.num_workers}, expected num_workers=0: "
                "Reader(threads=..., prefetch=...) reads ahead itself"
            )
        return self._stream.start()

    def close(self) -> None:
        """End the running iteration and its threads. Leaving a ``for`` loop does so by itself."""
        self._stream.close()

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position of the reader as small JSON data.

        ``epoch`` counts finished epochs, ``rows_read`` the samples of the current one that the consumer has received.
        The other fields tell which order and cut they refer to.
        """
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on at the next ``iter()`` right after the batch after which `state` was taken.

        If that was the last one of its epoch, the next ``iter()`` gives nothing and ends the epoch.

        Raises:
            ConfigError: the state is of other data, another batch size or another kind of order, or is no state.
        """
        self._stream.load_state_dict(state)


def _read(source: Source, group: int) -> tuple[ColumnBlock, int]:
    """The rows of a group; none are ever left out."""
    return source.read(group), 0
