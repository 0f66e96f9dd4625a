"""The distinct keys of a source: what a keyset file holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terarec.data.prefetch import ordered_map
from terarec.data.records.sources import RecordSource
from terarec.errors import ConfigError


def distinct_keys(source: RecordSource, *, threads: int = 1) -> NDArray[np.int64]:
    """The distinct keys int64[n] of `source`, rising, as batches hold them: with the slots' offsets.

    Memory: the distinct keys about three times over, and a few groups of records.

    Args:
        source: where the records are.
        threads: threads that read and sort.

    Raises:
        ConfigError: `threads` below 1.
        FormatError: a file is damaged.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"distinct_keys: threads is {threads!r}, expected an integer >= 1")

    def keys_of(group: int) -> NDArray[np.int64]:
        block, _ = source.read(group)
        arrays = [column[0] if isinstance(column, tuple) else column for column in block.keys]
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *arrays]))

    merged = np.empty(0, dtype=np.int64)
    waiting: list[NDArray[np.int64]] = []
    for keys in ordered_map(keys_of, range(len(source.group_rows)), threads):
        waiting.append(keys)
        if sum(map(len, waiting)) > len(merged):  # so that every key is sorted a few times only
            merged, waiting = np.unique(np.concatenate([merged, *waiting])), []
    return np.unique(np.concatenate([merged, *waiting]))
