# SPDX-License-Identifier: Apache-2.0
"""The level protocol: rows of several tables as bytes in one memory, and what stands in front of it or behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.kernels.slots import RowBatch
from terarec.memory.row_store import SCAN_ROWS, RowStore


class Level(Protocol):
    """Rows as bytes, in memory, on a server or on a disk; the tables of a level have rows of one size.

    Any thread may call any method. The rows of a batch come table by table, rising, except for levels of training,
    which take them in any order.
    """

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory taken."""

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows to ``out uint8[n, row_bytes]``; return which there are, bool[n]. Rows may repeat.

        Raises:
            StorageError: The level cannot be reached, or is damaged.
        """

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set distinct rows to ``values uint8[n, row_bytes]``.

        Raises:
            StorageError: The level is full, cannot be reached or cannot be written.
        """

    def erase(self, batch: RowBatch) -> None:
        """Remove distinct rows; absent rows are ignored. Errors are those of `write`."""

    def clear(self, table: int) -> None:
        """Remove all rows of a table. Errors are those of `write`."""

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys int64[n] and rows uint8[n, row_bytes] of all rows of a table, each once."""

    def count(self, table: int) -> int:
        """Return the number of rows of a table."""

    def metadata(self, table: int) -> Mapping[str, str]:
        """Return what the last commit noted of a table; nothing where no rows are durable."""

    def commit(self, metadata: Mapping[str, str] | None = None, table: int | None = None) -> None:
        """Make written rows durable, where there is a disk.

        Args:
            metadata: What to note of the rows; None for what the last commit noted.
            table: Number of the table; None for all.
        """

    def refresh(self) -> bool:
        """Read the last commit of another process, where one may write; return whether there was a new one."""

    def close(self) -> None:
        """Release files, connections and memory. Closing twice is allowed."""


class FileLevel(Level, Protocol):
    """A level of working memory of training, on a disk or in front of one."""

    @property
    def index_bytes(self) -> int:
        """Bytes of host memory that the index of rows on a disk takes."""

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table to a new directory as a row file; return whether they are on a disk.

        Nothing is written if they are not.
        """

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of `store` in place of all rows of a table, in a level that is on a disk."""


def by_table(batch: RowBatch) -> Iterator[tuple[int, Tensor | slice]]:
    """Yield each table of `batch` with the places of its rows: a slice where they lie together."""
    if not batch.tables.numel():
        return
    # Most batches come table by table; only others are sorted.
    numbers, counts = torch.unique_consecutive(batch.tables, return_counts=True)
    if numbers.numel() > 1 and not bool((numbers.diff() > 0).all()):
        order = batch.tables.argsort(stable=True)
        numbers, counts = torch.unique_consecutive(batch.tables[order], return_counts=True)
        yield from zip(numbers.tolist(), torch.split(order, counts.tolist()), strict=True)
        return
    begin = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        yield number, slice(begin, begin + count)
        begin += count


class TableSpan(NamedTuple):
    """The rows of a table in a batch: those from `begin` on that end before `end`."""

    table: int
    begin: int
    end: int

    @property
    def places(self) -> slice:
        """The places of the rows."""
        return slice(self.begin, self.end)


def table_ends(batch: RowBatch, num_tables: int) -> list[int]:
    """Return where the rows of each table end in a batch whose tables come one after the other, rising."""
    # Nothing to search for, which small lookups notice.
    if num_tables == 1:
        return [batch.tables.numel()]
    # The tables rise, so that one search finds all ends.
    ends: list[int] = torch.searchsorted(batch.tables, torch.arange(1, num_tables + 1)).tolist()
    return ends


def table_spans(batch: RowBatch, num_tables: int) -> list[TableSpan]:
    """Return the tables that have rows in such a batch, with their places."""
    ends = table_ends(batch, num_tables)
    return [
        TableSpan(table, begin, end)
        for table, (begin, end) in enumerate(zip((0, *ends), ends, strict=False))
        if begin < end
    ]


def clear_rows(level: Level, table: int) -> None:
    """Remove all rows of a table from a level that has no shorter way, and make that durable."""
    # All keys first: a store must not be changed during a scan.
    chunks = [keys for keys, _ in level.items(table, SCAN_ROWS)]
    for keys in chunks:
        level.erase(batch_of(keys, table))
    level.commit({}, table)


def batch_of(keys: Tensor, table: int) -> RowBatch:
    """Return ``keys int64[n]`` of a table whose arena rows are its keys."""
    return RowBatch(keys, keys, torch.full_like(keys, table))


def joined(batches: Sequence[RowBatch]) -> RowBatch:
    """Return the rows of all batches in one."""
    # Most often: then nothing is copied.
    if len(batches) == 1:
        return batches[0]
    return RowBatch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


# Factors and rotations of the mixer: other ones would look for HugeCTR's rows in the wrong hashes.
_FIRST, _SECOND = np.uint64(0xA24BAED4963EE407), np.uint64(0x9FB21C651E98DF25)


def mixed(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hashes uint64[n] of ``keys int64[n]``: Pelle Evensen's mixer rrxmrrxmsx_0."""
    hashes = keys.view(np.uint64).copy()
    hashes ^= _rotated(hashes, 25) ^ _rotated(hashes, 50)
    hashes *= _FIRST
    hashes ^= _rotated(hashes, 24) ^ _rotated(hashes, 49)
    hashes *= _SECOND
    hashes ^= hashes >> np.uint64(28)
    return hashes


def _rotated(values: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return (values >> np.uint64(bits)) | (values << np.uint64(64 - bits))


def by_partition(keys: Tensor, num_partitions: int) -> Iterator[tuple[int, Tensor | slice]]:
    """Yield the partitions that ``keys int64[n]`` are in, each with the places of its keys."""
    # Hashes are not needed where all keys are in one.
    if num_partitions == 1:
        if keys.numel():
            yield 0, slice(0, keys.numel())
        return
    numbers = (mixed(keys.contiguous().numpy()) % np.uint64(num_partitions)).astype(
        np.uint16 if num_partitions < 2**16 else np.int64
    )
    order = torch.from_numpy(numbers.argsort(kind="stable"))  # a radix sort for 16 bits
    counts = np.bincount(numbers, minlength=num_partitions).tolist()
    for number, places in enumerate(torch.split(order, counts)):
        if places.numel():
            yield number, places


class Changes:
    """Counts of the changes of some parts of rows. The caller holds a lock, which it also holds while it keeps rows.

    A change begins before the slowest memory has new rows, and ends after the fastest has them. So rows that were read
    below before a change has ended are never kept after it has begun, over newer ones.

    Args:
        num_parts: Number of parts.
    """

    def __init__(self, num_parts: int) -> None:
        self._counts = [0] * num_parts
        self._open = [0] * num_parts  # changes that have begun and not ended

    def begin(self, part: int) -> None:
        """Note that rows of a part are about to change."""
        # In the other order than `seen` reads them, which holds no lock: a change that has begun is never overlooked.
        self._open[part] += 1
        self._counts[part] += 1

    def end(self, part: int) -> None:
        """Note the end of a change."""
        self._open[part] -= 1

    def note(self, part: int) -> None:
        """Note a change that begins and ends under one hold of the lock."""
        self._counts[part] += 1

    def seen(self) -> Sequence[int]:
        """Return the counts before rows are read below, to compare with later; -1 while a change is under way.

        The lock need not be held.
        """
        counts = list(self._counts)
        if any(self._open):
            return [-1 if is_open else count for count, is_open in zip(counts, self._open, strict=True)]
        return counts

    def may_keep(self, part: int, seen: Sequence[int]) -> bool:
        """Return whether no row of a part has changed since `seen` was returned."""
        return seen[part] == self._counts[part]
