"""Rows of the parts of the data in fast tiers: a part's are loaded before it, the next part's while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from terarec.embedding import EmbeddingCollection

PartKeys = Sequence[Mapping[str, Tensor]]
"""Feature -> distinct keys int64[n] of a part, for each collection."""


class PartRows:
    """Loads the rows of one part after the other; a thread reads those of the next one ahead.

    Args:
        collections: The collections with tables in tiers.
    """

    def __init__(self, collections: Sequence[EmbeddingCollection]) -> None:
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
