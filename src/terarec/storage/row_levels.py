"""The tiers below the fast one: the protocol of rows as bytes, a row store for each table, and a thread that writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from terarec.kernels.slots import (
    RowBatch,
)
from terarec.storage.row_file import PageReader, RowFile, read_files
from terarec.storage.row_store import RowStore


class RowLevel(Protocol):
    """Rows as bytes, in host memory or on a disk; the tables of an arena have rows of one size."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory taken."""

    @property
    def index_bytes(self) -> int:
        """Bytes of host memory that the index of rows on a disk takes."""

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows to ``out uint8[n, row_bytes]``; return which there are, bool[n]. Rows may repeat."""

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set distinct rows to ``values uint8[n, row_bytes]``."""

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; absent rows are ignored."""

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys int64[n] and rows uint8[n, row_bytes] of all rows of a table, each once."""

    def count(self, table: int) -> int:
        """Return the number of rows of a table."""

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Make written rows durable, where there is a disk."""

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table to a new directory as a row file; return whether they are on a disk.

        Nothing is written if they are not.
        """

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of `store` in place of all rows of a table, in a level that is on a disk."""

    def close(self) -> None:
        """Release files and memory."""


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


class TableStores:
    """A row store for each table.

    Attributes:
        stores: By the number of the table.

    Args:
        stores: As above.
        reader: The reader of all stores, which are row files; None if they have none in common.
    """

    def __init__(self, stores: Sequence[RowStore], reader: PageReader | None = None) -> None:
        self.stores = list(stores)
        self._reader = reader

    @property
    def memory_bytes(self) -> int:
        """Bytes of the stores' indexes and buffers."""
        if self._reader is None:
            return sum(store.memory_bytes for store in self.stores)
        return self._reader.memory_bytes + sum(file.own_memory_bytes for file in self._files())

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes of row files."""
        return sum(file.index_bytes for file in self._files())

    def _files(self) -> list[RowFile]:
        return [store for store in self.stores if isinstance(store, RowFile)]

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `RowLevel.read`."""
        if self._reader is not None:
            return self._read_together(batch, out)
        found = torch.zeros(batch.keys.numel(), dtype=torch.bool)
        for table, places in by_table(batch):
            # For a slice this is a view, which the store fills; for indices it is a copy, which is put back below.
            part = out[places]
            there = self.stores[table].read(batch.keys[places].numpy(), part.numpy())
            found[places] = torch.from_numpy(there)
            if isinstance(places, Tensor):
                out[places] = part
        return found

    def _read_together(self, batch: RowBatch, out: Tensor) -> Tensor:
        parts = list(by_table(batch))
        # One call for all files, so that their reads are under way together. It needs the rows file by file.
        unsorted = [places for _, places in parts if isinstance(places, Tensor)]
        if unsorted:
            order, rows = torch.cat(unsorted), torch.empty_like(out)
            found = torch.empty(order.numel(), dtype=torch.bool)
            found[order] = self._read_together(batch.part(order), rows)
            out[order] = rows
            return found
        if not parts:
            return torch.zeros(0, dtype=torch.bool)
        files, counts = self._files(), torch.unique_consecutive(batch.tables, return_counts=True)[1]
        ends = counts.cumsum(0).tolist()
        return torch.from_numpy(read_files([files[table] for table, _ in parts], batch.keys.numpy(), ends, out.numpy()))

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set rows; see `RowLevel.write`."""
        for table, places in by_table(batch):
            self.stores[table].write(batch.keys[places].numpy(), values[places].numpy())

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `RowLevel.erase`."""
        for table, places in by_table(batch):
            self.stores[table].erase(batch.keys[places].numpy())

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows of a table; see `RowLevel.items`."""
        for keys, rows in self.stores[table].items(chunk_rows):
            yield torch.from_numpy(keys), torch.from_numpy(rows)

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `RowLevel.count`."""
        return len(self.stores[table])

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Make written rows durable; see `RowLevel.commit`."""
        for store in self.stores:
            store.commit(metadata)

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table as a row file; see `RowLevel.snapshot`."""
        store = self.stores[table]
        if not isinstance(store, RowFile):
            return False
        # A sealed segment is linked, one that still takes rows would have to be copied.
        store.seal()
        store.commit()
        store.snapshot(directory)
        return True

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `RowLevel.take_over`."""
        self.stores[table] = store

    def close(self) -> None:
        """Release files and memory; see `RowLevel.close`."""
        for store in self.stores:
            store.close()


class WrittenBehind:
    """A level whose rows are written by a thread, one batch at a time.

    Written rows are visible to all calls except `read_others`. An error of the thread is raised by the next call.

    Attributes:
        level: The level.

    Args:
        level: As above.
    """

    def __init__(self, level: RowLevel) -> None:
        self.level = level
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="terarec-rows")
        self._writing: Future[None] | None = None
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory taken."""
        return self.level.memory_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of the level."""
        return self.level.index_bytes

    def wait(self) -> None:
        """Wait for the thread."""
        with self._lock:
            writing = self._writing
        if writing is not None:
            writing.result()

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `RowLevel.read`."""
        # The rows may be the ones that are being written.
        self.wait()
        return self.level.read(batch, out)

    def read_others(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Read rows none of which is in the last batch that was written; see `RowLevel.read`."""
        return self.level.read(batch, out)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Begin to write rows, which the caller must not change; see `RowLevel.write`."""
        # One batch at a time bounds the memory of rows on their way, and is where an error of the last write is raised.
        self.wait()
        with self._lock:
            self._writing = self._thread.submit(self.level.write, batch, values)

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `RowLevel.erase`."""
        self.wait()
        self.level.erase(batch)

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows of a table; see `RowLevel.items`."""
        self.wait()
        return self.level.items(table, chunk_rows)

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `RowLevel.count`."""
        self.wait()
        return self.level.count(table)

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Make written rows durable; see `RowLevel.commit`."""
        self.wait()
        self.level.commit(metadata)

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table as a row file; see `RowLevel.snapshot`."""
        self.wait()
        return self.level.snapshot(table, directory)

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `RowLevel.take_over`."""
        self.wait()
        self.level.take_over(table, store)

    def stop(self) -> None:
        """Wait for the thread, ignoring its errors, and end it."""
        self._thread.shutdown()

    def close(self) -> None:
        """Release files and memory; see `RowLevel.close`."""
        # Not `wait`, which would raise the error of a write that failed before and leave files open.
        self.stop()
        self.level.close()
