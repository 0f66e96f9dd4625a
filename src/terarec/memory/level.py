# SPDX-License-Identifier: Apache-2.0
"""The level protocol: rows of several tables as bytes in one memory; counts of changes for a memory in front of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import batch_of
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


def clear_rows(level: Level, table: int) -> None:
    """Remove all rows of a table from a level that has no shorter way, and make that durable."""
    # All keys first: a store must not be changed during a scan.
    chunks = [keys for keys, _ in level.items(table, SCAN_ROWS)]
    for keys in chunks:
        level.erase(batch_of(keys, table))
    level.commit({}, table)


class ChangeCounts:
    """Counts of the changes of some parts of rows. The caller holds a lock, which it also holds while it keeps rows.

    A change begins before the slowest memory has new rows, and ends after the fastest has them. So rows that were read
    below before a change has ended are never kept after it has begun, over newer ones.
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
