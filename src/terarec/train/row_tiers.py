"""Tables in tiers in training: rows of batches and parts are loaded ahead, and moves are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from typing import TypeVar

from torch import Tensor, nn

from terarec.batch import Batch
from terarec.dist.shard import ShardedCollection
from terarec.embedding import EmbeddingCollection
from terarec.parallel import prefetched
from terarec.storage import TierUse

PartKeys = Sequence[Mapping[str, Tensor]]
"""Feature -> distinct keys int64[n] of a part, for each collection."""

_AHEAD = 1  # batches whose rows are read while one trains, besides the one that is being read


AnyCollection = EmbeddingCollection | ShardedCollection
T = TypeVar("T")


def collections_in_tiers(model: nn.Module) -> list[AnyCollection]:
    """Return the collections of `model` with tables in tiers; for those on several ranks, not their parts."""
    found = [module for module in model.modules() if isinstance(module, EmbeddingCollection | ShardedCollection)]
    parts = {id(collection.local) for collection in found if isinstance(collection, ShardedCollection)}
    return [held for held in found if id(held) not in parts and held.tier_use() is not None]


def use_of(model: nn.Module) -> TierUse | None:
    """Return the counters of the tiers of all tables of `model`; None without tiers."""
    uses = [collection.tier_use() or TierUse() for collection in collections_in_tiers(model)]
    return reduce(TierUse.plus, uses) if uses else None


def read_ahead(batches: Iterable[tuple[Batch, T]], model: nn.Module) -> Generator[tuple[Batch, T], None, None]:
    """Yield `batches`, each with what came with it, drawn by a thread that has their rows read for `model`'s tables."""
    collections = collections_in_tiers(model)

    def drawn() -> Generator[tuple[Batch, T], None, None]:
        for batch, payload in batches:
            for collection in collections:
                collection.prefetch(batch.sparse, _AHEAD + 1)
            yield batch, payload

    return prefetched(drawn(), _AHEAD)


class PartRows:
    """Loads the rows of one part of the data after the other; a thread reads those of the next one ahead.

    Args:
        collections: The collections with tables in tiers.
    """

    def __init__(self, collections: Sequence[AnyCollection]) -> None:
        self._collections = tuple(collections)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="terarec-parts")
        self._present: PartKeys = [{} for _ in self._collections]
        self._reading: Future[None] | None = None
        self._ends = threading.Event()

    def begin(self, keys: PartKeys) -> None:
        """Write changed rows back, and load those of a part that are not there yet, as many as fit.

        Args:
            keys: Keys of the part.
        """
        self._end_reading()
        for collection, mine in zip(self._collections, keys, strict=True):
            collection.preload(mine)
        self._present = keys

    def read_ahead(self, read_keys: Callable[[], PartKeys]) -> None:
        """Begin to load rows of the next part beside those of the present one.

        What goes wrong in it is left to `begin`, or to whoever reads the keys again.

        Args:
            read_keys: Reads the keys of the next part; called by the thread.
        """
        self._end_reading()
        self._ends = threading.Event()
        self._reading = self._thread.submit(self._read, read_keys, self._present, self._ends)

    def close(self) -> None:
        """End the thread."""
        self._end_reading()
        self._thread.shutdown()

    def _read(self, read_keys: Callable[[], PartKeys], present: PartKeys, ends: threading.Event) -> None:
        keys = read_keys()
        for collection, before, mine in zip(self._collections, present, keys, strict=True):
            collection.preload_beside(before, mine, lambda: not ends.is_set())

    def _end_reading(self) -> None:
        self._ends.set()
        if self._reading is not None:
            self._reading.exception()  # waits
            self._reading = None
