# SPDX-License-Identifier: Apache-2.0
"""The level protocol: rows of several tables as bytes in one memory, and what stands in front of it or behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
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
    if num_tables == 1:
        return [batch.tables.numel()]
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
    held = [keys for keys, _ in level.items(table, SCAN_ROWS)]
    for keys in held:
        level.erase(batch_of(keys, table))
    level.commit({}, table)


def batch_of(keys: Tensor, table: int) -> RowBatch:
    """Return ``keys int64[n]`` of a table whose arena rows are its keys."""
    return RowBatch(keys, keys, torch.full_like(keys, table))


def joined(batches: Sequence[RowBatch]) -> RowBatch:
    """Return the rows of all batches in one."""
    if len(batches) == 1:
        return batches[0]
    return RowBatch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
