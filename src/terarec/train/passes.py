# SPDX-License-Identifier: Apache-2.0
"""Training part by part: a part's rows are loaded before its first step, and the next part's rows during its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from terarec.data import Reader
from terarec.data.keysets import PartKeysets
from terarec.dist.shard import ShardedCollection
from terarec.embedding import EmbeddingCollection
from terarec.embedding.collection import columns_of
from terarec.errors import ConfigError, DataNotFoundError
from terarec.train.devices import collections_in_tiers
from terarec.train.trainer import Callback, Trainer

PartKeys = Sequence[Mapping[str, Tensor]]
"""Feature -> distinct keys int64[n] of a part, for each collection."""


class PartRows:
    """Loads the rows of one part of the data after the other; a thread reads those of the next one ahead."""

    def __init__(self, collections: Sequence[EmbeddingCollection | ShardedCollection]) -> None:
        self._collections = tuple(collections)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="terarec-parts")
        self._present: PartKeys = [{} for _ in self._collections]
        self._reading: Future[None] | None = None
        self._ends = threading.Event()

    def begin(self, keys: PartKeys) -> None:
        """Write changed rows back, and load those of a part that are not there yet, as many as fit."""
        self._end_reading()
        for collection, mine in zip(self._collections, keys, strict=True):
            collection.preload(mine)
        self._present = keys

    def read_ahead(self, read_keys: Callable[[], PartKeys]) -> None:
        """Begin to load rows of the next part next to those of the present one.

        Its errors are raised by `begin`, or when the keys are read again.

        Args:
            read_keys: Reads the keys of the next part; called by the thread.
        """
        self._end_reading()
        # A new event for each call: the thread of an earlier one may still look at its own.
        self._ends = threading.Event()
        self._reading = self._thread.submit(self._read, read_keys, self._present, self._ends)

    def close(self) -> None:
        """End the thread."""
        self._end_reading()
        self._thread.shutdown()

    def _read(self, read_keys: Callable[[], PartKeys], present: PartKeys, ends: threading.Event) -> None:
        keys = read_keys()
        for collection, before, mine in zip(self._collections, present, keys, strict=True):
            # Called between pieces, so that the next part need not wait until all rows are read.
            collection.preload_next(before, mine, lambda: not ends.is_set())

    def _end_reading(self) -> None:
        self._ends.set()
        if self._reading is not None:
            # Its error is dropped: rows that were not read ahead are read when their part begins, which raises it
            # again.
            self._reading.exception()  # waits
            self._reading = None


class PartPasses(Callback):
    """Loads the rows of a part's keyset into the fast tiers before its first step, and writes changed ones back.

    During a part, a thread reads the keyset of the next part, and its rows as far as they fit next to the present
    part's rows. Tables in memory have nothing to load. The reader checks that keysets hold the keys of their samples.
    """

    def __init__(self) -> None:
        self._part: int | None = None
        self._first_step = self._first_part = 0
        self._rows: PartRows | None = None

    @override
    def on_start(self, trainer: Trainer) -> None:
        """Find the part of the first step.

        Raises:
            ConfigError: The reader does not read by parts.
            DataNotFoundError: A part has no keyset.
        """
        reader, _ = _parts_of(trainer)
        self._first_step, self._first_part = trainer.step, reader.part_after(reader.state_dict())
        self._part = None
        self._rows = PartRows(collections_in_tiers(trainer.model))

    @override
    def on_step_start(self, trainer: Trainer) -> None:
        reader, keysets = _parts_of(trainer)
        # A reader that has given batches in advance is past the position of its first step.
        is_first = trainer.step == self._first_step
        part = self._first_part if is_first else reader.part_after(trainer.reader_state())
        if part == self._part:
            return
        self._part = part
        assert self._rows is not None, "on_start comes first"
        collections = collections_in_tiers(trainer.model)
        self._rows.begin(_keys(keysets, part, collections))
        following = (part + 1) % len(reader.parts)
        # After the last part of the last epoch there is nothing to read ahead.
        if following or trainer.epoch + 1 < trainer.spec.epochs:
            self._rows.read_ahead(partial(_keys, keysets, following, collections))

    @override
    def on_end(self, trainer: Trainer) -> None:
        if self._rows is not None:
            self._rows.close()


def _keys(keysets: PartKeysets, part: int, collections: Sequence[EmbeddingCollection | ShardedCollection]) -> PartKeys:
    """Return the keys of a part for each collection, by the features that read a column."""
    keys = {name: torch.from_numpy(values) for name, values in keysets.keys(part).items()}
    columns = [columns_of(collection.features, collection.columns) for collection in collections]
    return [{name: keys[column] for name, column in each.items() if column in keys} for each in columns]


def _parts_of(trainer: Trainer) -> tuple[Reader, PartKeysets]:
    """Return the train reader with its keysets."""
    reader = trainer.reader
    if not isinstance(reader, Reader) or not reader.parts:
        raise ConfigError("training.passes", "got a reader without parts, expected one that reads by parts")
    if reader.keysets is None:
        raise DataNotFoundError(
            "training.passes",
            "the parts of the data set have no keysets, expected one that was prepared with parts=N and keysets=True",
        )
    return reader, reader.keysets
