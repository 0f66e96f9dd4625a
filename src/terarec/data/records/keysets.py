"""The distinct keys of samples: what a keyset file holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terarec.data.records.sources import RecordSource
from terarec.errors import ConfigError
from terarec.formats import Keys
from terarec.parallel import ordered_map


class DistinctKeys:
    """Collects keys. Memory: the distinct ones about three times over."""

    def __init__(self) -> None:
        self._merged = np.empty(0, dtype=np.int64)
        self._waiting: list[NDArray[np.int64]] = []

    def add(self, keys: NDArray[np.int64]) -> None:
        """Take in distinct ``keys[n]``."""
        self._waiting.append(keys)
        if sum(map(len, self._waiting)) > len(self._merged):  # so that every key is sorted a few times only
            self._merged, self._waiting = self.sorted(), []

    def sorted(self) -> NDArray[np.int64]:
        """All keys so far, once each, rising."""
        return np.unique(np.concatenate([self._merged, *self._waiting]))


def distinct(columns: Sequence[Keys]) -> NDArray[np.int64]:
    """The distinct keys of some slots, rising."""
    arrays = [column[0] if isinstance(column, tuple) else column for column in columns]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *arrays]))


def distinct_keys(source: RecordSource, *, threads: int = 1) -> NDArray[np.int64]:
    """The distinct keys int64[n] of `source`, rising, as batches hold them: with the slots' offsets.

    Args:
        source: where the records are.
        threads: threads that read and sort.

    Raises:
        ConfigError: `threads` below 1.
        FormatError: a file is damaged.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"distinct_keys: threads is {threads!r}, expected an integer >= 1")
    collected = DistinctKeys()
    groups = range(len(source.group_rows))
    for keys in ordered_map(lambda group: distinct(source.read(group)[0].keys), groups, threads):
        collected.add(keys)
    return collected.sorted()
