"""`RecordReader`: HugeCTR's data files as batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from terarec.batch import Batch
from terarec.data.batch_stream import BatchStream, Feed, StreamOptions
from terarec.data.decode import to_batch
from terarec.data.records.sources import RecordSource
from terarec.data.sampling import RankShare
from terarec.formats import ColumnBlock


class RecordReader:
    """Batches of HugeCTR's files, one epoch per ``iter()``, or an endless stream: a `BatchReader`.

    The order depends on `seed`, the epoch and the shuffling alone, never on `threads` or `prefetch`. Records with a
    wrong checksum are left out. An epoch that was left early starts over at the next ``iter()``; to continue instead,
    load the state that was saved. One iteration at a time: a new one ends the previous one.

    Each batch has one feature a slot, with the names and in the order of `source`, and int64 keys.

    Args:
        source: Source of the records.
        batch_size: Samples B in a batch.
        shuffle: Whether the order is random, a new one in every epoch.
        shuffles_rows: Whether shuffling mixes the records of several groups. Otherwise it moves complete groups (16,384
            records, or row groups of Parquet files), which costs nothing.
        seed: Shuffle seed.
        drop_last: Whether a last batch of fewer samples is left out.
        repeat: Whether each epoch follows the previous one without an end. Then every batch is full.
        threads: Threads that read and decode ahead.
        prefetch: Batches that one more thread puts together ahead; 0 puts them together in the caller's thread. Most
            are views of decoded rows, so it is worth a thread only where a GPU trains on large batches.

    Raises:
        ConfigError: An argument out of range.
        FormatError: No records to repeat. While iterating: a damaged file.
        StorageError: While iterating: a disk or a server fails.

    Example:
        >>> reader = RecordReader(NormSource("train.txt", layout, checksum=True), batch_size=8192)
        >>> for batch in reader:
        ...     loss = train_step(batch)
    """

    def __init__(
        self,
        source: RecordSource,
        *,
        batch_size: int,
        shuffle: bool = False,
        shuffles_rows: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        repeat: bool = False,
        threads: int = 1,
        # 64 batches of 8192 Criteo samples take the caller 17 ms. Handing them over between threads takes 10 to 20 ms
        # more (Parquet, 2 Zen 4 cores).
        prefetch: int = 0,
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
        self.batch_size = batch_size
        self.repeat = repeat
        self._shuffles_rows = shuffles_rows
        self._stream = BatchStream(self._feed(source), options)
        self.source = source

    @property
    def num_rows(self) -> int:
        """Number of records in an epoch, before any are left out."""
        return self._stream.num_rows

    @property
    def num_skipped(self) -> int:
        """Number of records left out so far for a wrong checksum, up to the last batch that was yielded."""
        return self._stream.num_skipped

    def __len__(self) -> int:
        """Return the number of batches in an epoch, before records are left out."""
        return self._stream.num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the current epoch, or from it on without an end; after `load_state_dict` over the rest."""
        return self._stream.start()

    @property
    def share(self) -> RankShare | None:
        """The rank whose samples are read alone; None for whole batches."""
        return self._stream.share

    @property
    def batch_rows(self) -> int:
        """Samples of the last batch that was yielded, those of all ranks."""
        return self._stream.batch_rows

    def take_share(self, share: RankShare | None) -> None:
        """Read the samples of one rank alone, of several that share every batch; see `terarec.data.BatchReader`.

        Of files with checksums all records are checked, and those of the rank decoded.
        """
        self._stream.take_share(share)

    def set_source(self, source: RecordSource) -> None:
        """Read `source` from its start on; the running iteration ends. Epochs and `num_skipped` continue to count.

        Raises:
            FormatError: No records to repeat; the source before stays.
        """
        # The share stays: a rank continues with its part of the new files.
        self._stream.replace_feed(dataclasses.replace(self._feed(source), share=self.share))
        self.source = source

    def close(self) -> None:
        """Stop the running iteration and its threads. Leaving a ``for`` loop does so by itself."""
        self._stream.close()

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position of the reader as small JSON data.

        ``epoch`` counts finished epochs. ``rows_read`` counts the records read of the current one, with those that
        were left out, so that a resumed run reads exactly the rest. The other fields say what they refer to.
        """
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at the next ``iter()`` with the batch after the one at which `state` was saved.

        Raises:
            ConfigError: The state is of other data, another batch size or another type of order, or is not a state.
        """
        self._stream.load_state_dict(state)

    def _feed(self, source: RecordSource) -> Feed:
        return Feed(
            group_rows=source.group_rows,
            read=source.read,
            to_batch=partial(to_batch, source.names, key_offsets=source.key_offsets, shares_memory=True),
            runs=source.runs,
            mixes_rows=self._shuffles_rows,
            kept=source.kept if source.leaves_out else None,
            read_part=source.read_part,
            empty=ColumnBlock(
                label=np.empty((0, source.layout.label_dim), dtype=np.float32),
                dense=np.empty((0, source.layout.dense_dim), dtype=np.float32),
                keys=(np.empty(0, dtype=np.int64),) * len(source.names),
            ),
        )
