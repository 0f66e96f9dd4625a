# SPDX-License-Identifier: Apache-2.0
"""`RecordReader`: HugeCTR's data files as batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from terarec.batch import Batch
from terarec.data.batch_stream import BatchStream
from terarec.data.decode import to_batch
from terarec.data.feed import Feed, StreamOptions
from terarec.data.records.sources import RecordSource
from terarec.formats.block import ColumnBlock
from terarec.ragged import flat_values

_LOGGER = logging.getLogger(__name__)


class RecordReader(BatchStream):
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
        repeat: Whether each epoch follows the previous one without an end. Then every batch is full, except the last of
            each epoch of Raw and RawAsync files.
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
        self.source = source
        self._shuffles_rows = shuffles_rows
        self._decoder = RecordDecoder()
        super().__init__(record_feed(source, self._decoder, shuffles_rows=shuffles_rows), options)

    def set_source(self, source: RecordSource) -> None:
        """Read `source` from its start on; the running iteration ends. Epochs and `num_skipped` continue to count.

        Raises:
            FormatError: No records to repeat; the source before stays.
        """
        self.replace_feed(record_feed(source, self._decoder, shuffles_rows=self._shuffles_rows))
        self.source = source


class RecordDecoder:
    """Converts the rows of sources to batches, and warns once of keys that are too large for their slot."""

    def __init__(self) -> None:
        self._has_large_keys = False

    def to_batch(self, source: RecordSource, pieces: Sequence[ColumnBlock]) -> Batch:
        """Return rows of `source` as a batch."""
        if not self._has_large_keys and any(source.key_offsets):
            self._find_large_keys(source, pieces)
        return to_batch(source.names, pieces, key_offsets=source.key_offsets, shares_memory=True)

    def _find_large_keys(self, source: RecordSource, pieces: Sequence[ColumnBlock]) -> None:
        for slot, (name, size) in enumerate(zip(source.names, source.layout.slot_sizes, strict=True)):
            largest = max(int(flat_values(piece.keys[slot]).max(initial=0)) for piece in pieces)
            if largest >= size:
                self._has_large_keys = True
                _LOGGER.warning(
                    "slot %r holds the key %d, and its size is %d: keys from the size on share the rows of "
                    "the next slots, as in HugeCTR; expected a larger size in slot_size_array",
                    name,
                    largest,
                    size,
                )
                return


def record_feed(source: RecordSource, decoder: RecordDecoder, *, shuffles_rows: bool) -> Feed:
    """Return `source` as the input of a stream; `RecordReader` describes `shuffles_rows`."""
    return Feed(
        group_rows=source.group_rows,
        read=source.read,
        to_batch=partial(decoder.to_batch, source),
        runs=source.runs,
        mixes_rows=shuffles_rows,
        ends_batches=source.ends_batches,
        kept=source.kept if source.leaves_out else None,
        read_part=source.read_part,
        empty=ColumnBlock(
            label=np.empty((0, source.layout.label_dim), dtype=np.float32),
            dense=np.empty((0, source.layout.dense_dim), dtype=np.float32),
            keys=(np.empty(0, dtype=np.int64),) * len(source.names),
        ),
    )
