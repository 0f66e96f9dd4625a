# SPDX-License-Identifier: Apache-2.0
"""`TableStores`: a level of row stores, one for each table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from terarec.kernels.slots import RowBatch
from terarec.memory.level import by_table, clear_rows
from terarec.memory.row_file import PageReader, RowFile, read_files
from terarec.memory.row_store import RowStore


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
        """Copy rows; see `Level.read`."""
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
        """Set rows; see `Level.write`."""
        for table, places in by_table(batch):
            self.stores[table].write(batch.keys[places].numpy(), values[places].numpy())

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `Level.erase`."""
        for table, places in by_table(batch):
            self.stores[table].erase(batch.keys[places].numpy())

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows of a table; see `Level.items`."""
        for keys, rows in self.stores[table].items(chunk_rows):
            yield torch.from_numpy(keys), torch.from_numpy(rows)

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `Level.count`."""
        return len(self.stores[table])

    def clear(self, table: int) -> None:
        """Remove all rows of a table; see `Level.clear`."""
        clear_rows(self, table)

    def metadata(self, table: int) -> Mapping[str, str]:
        """Return what the last commit noted; see `Level.metadata`."""
        return self.stores[table].metadata

    def commit(self, metadata: Mapping[str, str] | None = None, table: int | None = None) -> None:
        """Make written rows durable; see `Level.commit`."""
        for store in self.stores if table is None else [self.stores[table]]:
            # A commit without metadata would drop those of the last one.
            store.commit(store.metadata if metadata is None else metadata)

    def refresh(self) -> bool:
        """Return False: these stores have one writer, which is this process."""
        return False

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table as a row file; see `FileLevel.snapshot`."""
        store = self.stores[table]
        if not isinstance(store, RowFile):
            return False
        # A sealed segment is linked, one that still takes rows would have to be copied.
        store.seal()
        store.commit()
        store.snapshot(directory)
        return True

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `FileLevel.take_over`."""
        self.stores[table] = store

    def close(self) -> None:
        """Release files and memory; see `Level.close`."""
        for store in self.stores:
            store.close()
