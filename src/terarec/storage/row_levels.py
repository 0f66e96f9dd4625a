"""The tiers below the fast one: rows as bytes, in a row store for each table or in a bounded part of host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels.rows import reserve_rows
from terarec.kernels.slots import RowBatch, RowPart, SlotMap, gather_rows, new_slot_map, row_set, scatter_rows
from terarec.storage.fair_lock import FairLock
from terarec.storage.row_file import PageReader, RowFile, read_files
from terarec.storage.row_store import RowStore
from terarec.storage.slots import SlotLimit

_CPU = torch.device("cpu")
_WRITTEN_ROWS = 8_192  # under one hold of a lock, for which reads wait: 1.5 ms at 512 bytes


class BudgetError(StorageError):
    """A tier is too small for the rows that one batch needs at once.

    Attributes:
        needed: Rows that the batch needs and that pending gradients hold.
        held: Rows that the tier has room for.
        needed_bytes: Budget that would do.
    """

    def __init__(self, *parts: object, needed: int, held: int, needed_bytes: int) -> None:
        super().__init__(*parts)
        self.needed = needed
        self.held = held
        self.needed_bytes = needed_bytes

    def during(self, what: str) -> BudgetError:
        """Return this error with `what` needed the rows, such as "step 7", in front."""
        return BudgetError(
            what, self.where, self.problem, needed=self.needed, held=self.held, needed_bytes=self.needed_bytes
        )


class RowLevel(Protocol):
    """Rows as bytes, in host memory or on a disk; the tables of an arena have rows of one size."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory taken."""

    @property
    def index_bytes(self) -> int:
        """Those of them that the index of rows on a disk takes."""

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows to ``out uint8[n, row_bytes]``; return which there are, bool[n]. Rows may repeat."""

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set distinct rows to ``values uint8[n, row_bytes]``."""

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; those that are not there are passed over."""

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
        """See `RowLevel.read`."""
        if self._reader is not None:
            return self._read_together(batch, out)
        found = torch.zeros(batch.keys.numel(), dtype=torch.bool)
        for table, places in by_table(batch):
            part = out[places]
            there = self.stores[table].read(batch.keys[places].numpy(), part.numpy())
            found[places] = torch.from_numpy(there)
            if isinstance(places, Tensor):
                out[places] = part
        return found

    def _read_together(self, batch: RowBatch, out: Tensor) -> Tensor:
        parts = list(by_table(batch))
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
        """See `RowLevel.write`."""
        for table, places in by_table(batch):
            self.stores[table].write(batch.keys[places].numpy(), values[places].numpy())

    def erase(self, batch: RowBatch) -> None:
        """See `RowLevel.erase`."""
        for table, places in by_table(batch):
            self.stores[table].erase(batch.keys[places].numpy())

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowLevel.items`."""
        for keys, rows in self.stores[table].items(chunk_rows):
            yield torch.from_numpy(keys), torch.from_numpy(rows)

    def count(self, table: int) -> int:
        """See `RowLevel.count`."""
        return len(self.stores[table])

    def commit(self, metadata: Mapping[str, str]) -> None:
        """See `RowLevel.commit`."""
        for store in self.stores:
            store.commit(metadata)

    def snapshot(self, table: int, directory: Path) -> bool:
        """See `RowLevel.snapshot`."""
        store = self.stores[table]
        if not isinstance(store, RowFile):
            return False
        store.seal()
        store.commit()
        store.snapshot(directory)
        return True

    def take_over(self, table: int, store: RowStore) -> None:
        """See `RowLevel.take_over`."""
        self.stores[table] = store

    def close(self) -> None:
        """See `RowLevel.close`."""
        for store in self.stores:
            store.close()


class CachedRows:
    """Rows in host memory in front of another level, or of none: then rows beyond the budget are an error.

    Attributes:
        slots: Which rows are here.

    Args:
        num_bytes: Budget.
        row_bytes: Bytes of a row.
        below: Where rows go that do not fit.
        slot_bytes: Bytes that a slot takes besides its row.
        name: Of the tier, for errors.
        keeps_read: Whether rows that are read from the level below stay here, as those do that are written; not above
            which a faster tier keeps them.
    """

    def __init__(
        self,
        num_bytes: int,
        row_bytes: int,
        below: RowLevel | None,
        *,
        slot_bytes: int,
        name: str,
        keeps_read: bool = False,
    ) -> None:
        self.below = below
        self.slots = new_slot_map(max(1, num_bytes // (row_bytes + slot_bytes)), _CPU)
        self._name = name
        self._row_bytes = row_bytes
        self._slot_bytes = slot_bytes
        self._lock = FairLock()
        self._changes = 0  # since which rows that were read below may be old
        self._keeps_read = keeps_read
        self._limit = SlotLimit(self.slots)
        self._memory = reserve_rows((self.slots.capacity, row_bytes), np.uint8)
        self._memory.grow(self.slots.capacity)
        self._values = torch.from_numpy(self._memory.array(self.slots.capacity))

    @property
    def memory_bytes(self) -> int:
        """Bytes of slots that were used, and of the level below."""
        below = 0 if self.below is None else self.below.memory_bytes
        return self.slots.used_slots * (self._row_bytes + self._slot_bytes) + below

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of the level below."""
        return 0 if self.below is None else self.below.index_bytes

    @property
    def capacity(self) -> int:
        """Number of slots that may be used."""
        return self._limit.limit

    def lower(self, capacity: int) -> None:
        """Give up slots until `capacity` are left, writing changed rows to the level below, and their memory."""
        with self._lock:
            if capacity < self._limit.limit and self.below is not None:
                first = self._limit.lower(capacity, self._write_back)
                self._memory.discard(first, self.slots.capacity)

    def _write_back(self, slots: Tensor) -> None:
        if self.below is not None and slots.numel():
            slots = self.slots.by_table(slots)
            self.below.write(_owners(self.slots, slots), self._values[slots])

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """See `RowLevel.read`."""
        with self._lock:
            slots, _, absent = self.slots.touch(batch.rows, pins=False)
            gather_rows([RowPart(self._values, 0)], slots, out)
            changes = self._changes
        found = slots >= 0
        if absent.numel() and self.below is not None:
            # Not under the lock: rows that are here need not wait for a disk.
            values = torch.empty(absent.numel(), out.shape[1], dtype=torch.uint8)
            there = self.below.read(batch.part(absent), values)
            got = absent[there]
            out[got] = values[there]
            found[got] = True
            if self._keeps_read:
                with self._lock:
                    if changes == self._changes:
                        self._keep(batch.part(got), values[there])
        return found

    def _keep(self, batch: RowBatch, values: Tensor) -> None:
        """Hold rows of the level below, which may repeat, as far as there is room for them."""
        firsts = row_set(batch.rows).firsts[: self._limit.limit // 2]
        firsts = firsts[self.slots.find(batch.rows[firsts]) < 0]  # another thread may have read the others
        if firsts.numel() > self._limit.room:
            self._make_room(firsts.numel())
        firsts = firsts[: self._limit.room]
        slots = self.slots.assign(batch.part(firsts))
        self.slots.let_go(slots)
        scatter_rows([RowPart(self._values, 0)], slots, values, firsts)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """See `RowLevel.write`."""
        at_once = max(1, min(self._limit.limit // 2, _WRITTEN_ROWS))
        for begin in range(0, batch.rows.numel(), at_once):
            part = slice(begin, begin + at_once)
            with self._lock:
                self._changes += 1
                self._write(batch.part(part), values[part])

    def _write(self, batch: RowBatch, values: Tensor) -> None:
        slots, held, absent = self.slots.touch(batch.rows, pins=True)
        try:
            if absent.numel() > self._limit.room:
                self._make_room(absent.numel())
            new = self.slots.assign(batch.part(absent))
        finally:
            self.slots.let_go(held)
        self.slots.let_go(new)
        slots[absent] = new
        scatter_rows([RowPart(self._values, 0)], slots, values)
        self.slots.mark_changed(slots)

    def _make_room(self, wanted: int) -> None:
        missing = wanted - self._limit.room
        if self.below is None:
            held = len(self.slots)
            needed = (held + wanted) * (self._row_bytes + self._slot_bytes)
            raise BudgetError(
                self._name,
                f"{held:,} rows fill it and {wanted:,} more come, expected a budget of {needed:,} bytes or a file",
                needed=held + wanted,
                held=held,
                needed_bytes=needed,
            )
        victims = self.slots.victims(max(missing, self._limit.limit // 64), 0)
        self._write_back(victims[self.slots.is_dirty[victims]])
        self.slots.release(victims)

    def erase(self, batch: RowBatch) -> None:
        """See `RowLevel.erase`."""
        with self._lock:
            self._changes += 1
            slots = self.slots.find(batch.rows)
            self.slots.release(slots[slots >= 0])
            if self.below is not None:
                self.below.erase(batch)

    def forget(self) -> None:
        """Drop all rows that were not changed: the level below has others now."""
        with self._lock:
            self._changes += 1
            used = self.slots.used_slots
            self.slots.release((self.slots.is_held[:used] & ~self.slots.is_dirty[:used]).nonzero()[:, 0])

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowLevel.items`."""
        if self.below is not None:
            self._flush()
            yield from self.below.items(table, chunk_rows)
            return
        mine = self._slots_of(table)
        for slots in torch.split(mine, chunk_rows) if mine.numel() else ():
            yield self.slots.owners.keys[slots], self._values[slots]

    def count(self, table: int) -> int:
        """See `RowLevel.count`."""
        if self.below is not None:
            self._flush()
            return self.below.count(table)
        return self._slots_of(table).numel()

    def commit(self, metadata: Mapping[str, str]) -> None:
        """See `RowLevel.commit`."""
        self._flush()
        if self.below is not None:
            self.below.commit(metadata)

    def snapshot(self, table: int, directory: Path) -> bool:
        """See `RowLevel.snapshot`."""
        self._flush()
        return self.below is not None and self.below.snapshot(table, directory)

    def take_over(self, table: int, store: RowStore) -> None:
        """See `RowLevel.take_over`."""
        assert self.below is not None, "rows in memory alone have no store"
        with self._lock:
            self.slots.release(self._slots_of(table))
            self.below.take_over(table, store)

    def close(self) -> None:
        """See `RowLevel.close`."""
        if self.below is not None:
            self.below.close()

    def _slots_of(self, table: int) -> Tensor:
        used = self.slots.used_slots
        return (self.slots.is_held[:used] & (self.slots.owners.tables[:used] == table)).nonzero()[:, 0]

    def _flush(self) -> None:
        if self.below is None:
            return
        with self._lock:
            changed = self.slots.is_dirty[: self.slots.used_slots].nonzero()[:, 0]
        for part in torch.split(changed, _WRITTEN_ROWS):
            with self._lock:
                dirty = part[self.slots.is_dirty[part]]
                self._write_back(dirty)
                self.slots.is_dirty[dirty] = False


class WrittenBehind:
    """A level whose rows are written by a thread, one batch at a time.

    What is written is visible to all calls but `read_others`. An error of the thread is raised by the next call.

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

    def settle(self) -> None:
        """Wait for the thread."""
        with self._lock:
            writing = self._writing
        if writing is not None:
            writing.result()

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """See `RowLevel.read`."""
        self.settle()
        return self.level.read(batch, out)

    def read_others(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Read rows none of which is in the last batch that was written; see `RowLevel.read`."""
        return self.level.read(batch, out)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Begin to write rows, which the caller leaves as they are; see `RowLevel.write`."""
        self.settle()
        with self._lock:
            self._writing = self._thread.submit(self.level.write, batch, values)

    def erase(self, batch: RowBatch) -> None:
        """See `RowLevel.erase`."""
        self.settle()
        self.level.erase(batch)

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """See `RowLevel.items`."""
        self.settle()
        return self.level.items(table, chunk_rows)

    def count(self, table: int) -> int:
        """See `RowLevel.count`."""
        self.settle()
        return self.level.count(table)

    def commit(self, metadata: Mapping[str, str]) -> None:
        """See `RowLevel.commit`."""
        self.settle()
        self.level.commit(metadata)

    def snapshot(self, table: int, directory: Path) -> bool:
        """See `RowLevel.snapshot`."""
        self.settle()
        return self.level.snapshot(table, directory)

    def take_over(self, table: int, store: RowStore) -> None:
        """See `RowLevel.take_over`."""
        self.settle()
        self.level.take_over(table, store)

    def stop(self) -> None:
        """Wait for the thread, whatever it raised, and end it."""
        self._thread.shutdown()

    def close(self) -> None:
        """See `RowLevel.close`."""
        self.stop()
        self.level.close()


def _owners(slots: SlotMap, places: Tensor) -> RowBatch:
    return RowBatch(slots.owners.rows[places], slots.owners.keys[places], slots.owners.tables[places].long())
