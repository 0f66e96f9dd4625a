# SPDX-License-Identifier: Apache-2.0
"""`TableStores`: a level of row stores, one for each table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels.cpu.host import empty_floats
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import by_table
from terarec.memory.level import clear_rows
from terarec.memory.row_file import PageReader, RowFile, read_files
from terarec.memory.row_store import RowStore


class StoredForm(Protocol):
    """How the rows of a level lie in those of a store, where they are not the same."""

    def unpack(self, stored: Tensor) -> Tensor:
        """Return the level's rows uint8[n, row_bytes] in the rows of a store."""

    def pack(self, rows: Tensor, row_bytes: int) -> Tensor:
        """Return ``uint8[n, row_bytes]``, the rows of a store."""


class TableStore:
    """The row store of a table.

    Attributes:
        store: The row store; None before the first row is written.
        is_writable: Whether rows are written and erased.
        form: How rows lie in those of the store; None where they are the same.
    """

    def __init__(
        self,
        store: RowStore | None,
        create: Callable[[], RowStore] | None = None,
        *,
        is_writable: bool = True,
        form: StoredForm | None = None,
    ) -> None:
        self.store = store
        self.is_writable = is_writable
        self._create = create
        self.form = form
        self._lock = threading.Lock()

    @property
    def file(self) -> RowFile | None:
        """The store, if it is a row file."""
        return self.store if isinstance(self.store, RowFile) else None

    @property
    def plain_file(self) -> RowFile | None:
        """The row file, if its rows are those of the level."""
        return self.file if self.form is None else None

    def writable(self) -> RowStore:
        """Return the store, which is created if there is none."""
        if not self.is_writable:
            raise StorageError("row store", "is open for reading only, expected no write")
        # Two writers at the same time must not create the store twice.
        with self._lock:
            if self.store is None:
                assert self._create is not None
                self.store = self._create()
            return self.store

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy rows of ``keys int64[n]``; see `Level.read`."""
        if self.store is None:
            return torch.zeros(keys.numel(), dtype=torch.bool)
        if self.form is None:
            return torch.from_numpy(self.store.read(keys.numpy(), out.numpy()))
        # Of floats, since large results come from memory that the core keeps, on pages that were touched before.
        row_bytes = self.store.row_bytes
        stored = empty_floats(keys.numel(), -(-row_bytes // 4)).view(torch.uint8)[:, :row_bytes]
        is_there = torch.from_numpy(self.store.read(keys.numpy(), stored.numpy()))
        out.copy_(self.form.unpack(stored))
        return is_there

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Set the rows of distinct ``keys int64[n]``; see `Level.write`."""
        store = self.writable()
        stored = values if self.form is None else self.form.pack(values, store.row_bytes)
        store.write(keys.numpy(), stored.numpy())

    def items(self, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and rows; see `Level.items`."""
        for keys, stored in () if self.store is None else self.store.items(chunk_rows):
            rows = torch.from_numpy(stored)
            yield torch.from_numpy(keys), rows if self.form is None else self.form.unpack(rows)


class TableStores:
    """A row store for each table. Implements `terarec.memory.level.FileLevel`.

    Args:
        tables: The stores by the number of the table.
        reader: The reader that all row files have in common; None for none.
    """

    def __init__(self, tables: Sequence[TableStore], reader: PageReader | None = None) -> None:
        self.tables = tuple(tables)
        self._reader = reader

    @property
    def memory_bytes(self) -> int:
        """Bytes of the stores' indexes and buffers."""
        if self._reader is None:
            return sum(table.store.memory_bytes for table in self.tables if table.store is not None)
        return self._reader.memory_bytes + sum(file.own_memory_bytes for file in self._files())

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes of row files."""
        return sum(file.index_bytes for file in self._files())

    def _files(self) -> list[RowFile]:
        return [table.file for table in self.tables if table.file is not None]

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `Level.read`. Pages of several row files are read together."""
        spans = list(by_table(batch))
        if self._reader is not None and len(spans) > 1:
            files = [file for table, _ in spans if (file := self.tables[table].plain_file) is not None]
            if len(files) == len(spans):
                return self._read_together(files, [places for _, places in spans], batch, out)
        is_there = torch.zeros(batch.keys.numel(), dtype=torch.bool)
        for table, places in spans:
            # For a slice this is a view, which the store fills; for indices it is a copy, which is put back below.
            part = out[places]
            is_there[places] = self.tables[table].read(batch.keys[places], part)
            if isinstance(places, Tensor):
                out[places] = part
        return is_there

    def _read_together(
        self, files: Sequence[RowFile], spans: Sequence[Tensor | slice], batch: RowBatch, out: Tensor
    ) -> Tensor:
        # One call for all files, so that their reads are under way together. It needs the rows file by file.
        unsorted = [places for places in spans if isinstance(places, Tensor)]
        if unsorted:
            order, rows = torch.cat(unsorted), torch.empty_like(out)
            is_there = torch.empty(order.numel(), dtype=torch.bool)
            ends = torch.tensor([places.numel() for places in unsorted]).cumsum(0).tolist()
            is_there[order] = torch.from_numpy(read_files(files, batch.keys[order].numpy(), ends, rows.numpy()))
            out[order] = rows
            return is_there
        ends = [places.stop for places in spans if isinstance(places, slice)]
        return torch.from_numpy(read_files(files, batch.keys.numpy(), ends, out.numpy()))

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set rows; see `Level.write`."""
        for table, places in by_table(batch):
            self.tables[table].write(batch.keys[places], values[places])

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `Level.erase`."""
        for table, places in by_table(batch):
            if self.tables[table].store is not None:
                self.tables[table].writable().erase(batch.keys[places].numpy())

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows of a table; see `Level.items`."""
        return self.tables[table].items(chunk_rows)

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `Level.count`."""
        store = self.tables[table].store
        return 0 if store is None else len(store)

    def clear(self, table: int) -> None:
        """Remove all rows of a table; see `Level.clear`."""
        if self.tables[table].store is not None:
            clear_rows(self, table)

    def metadata(self, table: int) -> Mapping[str, str]:
        """Return what the last commit noted; see `Level.metadata`."""
        store = self.tables[table].store
        return {} if store is None else store.metadata

    def commit(self, metadata: Mapping[str, str] | None = None, table: int | None = None) -> None:
        """Make written rows durable; see `Level.commit`."""
        for each in self.tables if table is None else [self.tables[table]]:
            if each.is_writable and (each.store is not None or table is not None):
                store = each.writable()
                # A commit without metadata would drop those of the last one.
                store.commit(store.metadata if metadata is None else metadata)

    def refresh(self) -> bool:
        """Read the last commits of another process, in read-only row files; other stores have a single writer."""
        files = [table.file for table in self.tables if table.file is not None and not table.is_writable]
        moved = [file.refresh() for file in files]
        return any(moved)

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table as a row file; see `FileLevel.snapshot`."""
        file = self.tables[table].plain_file
        if file is None:
            return False
        # A sealed segment is linked, one that still takes rows would have to be copied.
        file.seal()
        file.commit()
        file.snapshot(directory)
        return True

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `FileLevel.take_over`."""
        self.tables[table].store = store

    def close(self) -> None:
        """Release files and memory; changes that were not committed are lost."""
        for table in self.tables:
            if table.store is not None:
                table.store.close()
