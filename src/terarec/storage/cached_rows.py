"""`CachedRows`: rows in a bounded part of host memory, in front of files or alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels.rows import reserve_rows
from terarec.kernels.slots import (
    RowBatch,
    RowPart,
    SlotLimit,
    SlotMap,
    gather_from,
    gather_rows,
    new_slot_map,
    row_set,
    scatter_rows,
    touch_maps,
)
from terarec.parallel import FairLock
from terarec.storage.row_levels import RowLevel
from terarec.storage.row_store import RowStore

_CPU = torch.device("cpu")
_WRITTEN_ROWS = 8_192  # under one hold of a lock, for which reads wait: 1.5 ms at 512 bytes


class BudgetError(StorageError):
    """A tier is too small for the rows that one batch needs at once.

    Attributes:
        needed: Rows that the batch needs and that pending gradients hold.
        held: Rows that the tier has room for.
        needed_bytes: Sufficient budget.
    """

    def __init__(self, *parts: object, needed: int, held: int, needed_bytes: int) -> None:
        super().__init__(*parts)
        self.needed = needed
        self.held = held
        self.needed_bytes = needed_bytes

    def during(self, what: str) -> BudgetError:
        """Return this error with the operation that needed the rows, such as "step 7", in front."""
        return BudgetError(
            what, self.where, self.problem, needed=self.needed, held=self.held, needed_bytes=self.needed_bytes
        )


class CachedRows:
    """Rows in host memory in front of another level, or of none: then rows beyond the budget are an error.

    Attributes:
        slots: Map of the rows that are here.

    Args:
        num_bytes: Budget.
        row_bytes: Bytes of a row.
        below: Level of the rows that do not fit.
        slot_bytes: Bytes that a slot takes besides its row.
        name: Name of the tier, for errors.
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
        # Fair, since `write` and `_flush` take it piece after piece: a read gets its turn between two pieces.
        self._lock = FairLock()
        self._changes = 0  # since which rows that were read below may be old
        self._keeps_read = keeps_read
        self._limit = SlotLimit(self.slots)
        # Reserved rather than allocated: a slot takes memory when it is first written, and `lower` can give memory
        # back.
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
            # The level below has a store for each table, which takes a slice of the batch where rows of a table lie
            # together.
            slots = self.slots.by_table(slots)
            self.below.write(_owners(self.slots, slots), self._values[slots])

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `RowLevel.read`."""
        with self._lock:
            # No pins: the rows are copied before the lock is released.
            slots, _, absent = self.slots.touch(batch.rows, pins=False)
            gather_rows([RowPart(self._values, 0)], slots, out)
            changes = self._changes
        found = slots >= 0
        self._read_below(batch, absent, changes, out, found)
        return found

    def _read_below(self, batch: RowBatch, absent: Tensor, changes: int, out: Tensor, found: Tensor) -> None:
        """Read rows of `batch` that are not here, for which the lock need not be held."""
        if not absent.numel() or self.below is None:
            return
        # Not under the lock: rows that are here need not wait for a disk.
        values = torch.empty(absent.numel(), out.shape[1], dtype=torch.uint8)
        there = self.below.read(batch.part(absent), values)
        got = absent[there]
        out[got] = values[there]
        found[got] = True
        if self._keeps_read:
            with self._lock:
                # After a write or an erasure meanwhile, what was read may be old. The next read of these rows finds the
                # new ones.
                if changes == self._changes:
                    self._keep(batch.part(got), values[there])

    def _keep(self, batch: RowBatch, values: Tensor) -> None:
        """Hold rows of the level below, which may repeat, as far as there is room for them."""
        # At most half of the slots, so that one large read leaves a part of what was here.
        firsts = row_set(batch.rows).firsts[: self._limit.limit // 2]
        firsts = firsts[self.slots.find(batch.rows[firsts]) < 0]  # another thread may have read the others
        if firsts.numel() > self._limit.room:
            self._make_room(firsts.numel())
        firsts = firsts[: self._limit.room]
        slots = self.slots.assign(batch.part(firsts))
        # `assign` pins what it places, for rows that gradients wait for; here nothing waits.
        self.slots.unpin(slots)
        scatter_rows([RowPart(self._values, 0)], slots, values, firsts)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set rows; see `RowLevel.write`."""
        at_once = max(1, min(self._limit.limit // 2, _WRITTEN_ROWS))
        for begin in range(0, batch.rows.numel(), at_once):
            part = slice(begin, begin + at_once)
            with self._lock:
                self._changes += 1
                self._write(batch.part(part), values[part])

    def _write(self, batch: RowBatch, values: Tensor) -> None:
        # Pinned, since making room for the absent rows of the batch must not evict those that are here.
        slots, held, absent = self.slots.touch(batch.rows, pins=True)
        try:
            if absent.numel() > self._limit.room:
                self._make_room(absent.numel())
            new = self.slots.assign(batch.part(absent))
        finally:
            self.slots.unpin(held)
        self.slots.unpin(new)
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
        # More than are missing: choosing victims looks at every slot.
        victims = self.slots.victims(max(missing, self._limit.limit // 64), 0)
        # Written before they are released: if the level below fails, the rows are still here.
        self._write_back(victims[self.slots.is_dirty[victims]])
        self.slots.release(victims)

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `RowLevel.erase`."""
        with self._lock:
            self._changes += 1
            # The level below erases within the same hold: a read between the two would find the row there and keep it.
            slots = self.slots.find(batch.rows)
            self.slots.release(slots[slots >= 0])
            if self.below is not None:
                self.below.erase(batch)

    def forget(self) -> None:
        """Drop all rows that were not changed: the level below has others now."""
        with self._lock:
            self._changes += 1
            used = self.slots.used_slots
            # Changed rows stay: the level below does not have them yet.
            self.slots.release((self.slots.is_held[:used] & ~self.slots.is_dirty[:used]).nonzero()[:, 0])

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows of a table; see `RowLevel.items`."""
        if self.below is not None:
            self._flush()
            yield from self.below.items(table, chunk_rows)
            return
        mine = self._slots_of(table)
        for slots in torch.split(mine, chunk_rows) if mine.numel() else ():
            yield self.slots.owners.keys[slots], self._values[slots]

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `RowLevel.count`."""
        if self.below is not None:
            self._flush()
            return self.below.count(table)
        return self._slots_of(table).numel()

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Make written rows durable; see `RowLevel.commit`."""
        self._flush()
        if self.below is not None:
            self.below.commit(metadata)

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table as a row file; see `RowLevel.snapshot`."""
        self._flush()
        return self.below is not None and self.below.snapshot(table, directory)

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `RowLevel.take_over`."""
        assert self.below is not None, "rows in memory alone have no store"
        with self._lock:
            # Nothing is written back, since the store replaces all rows of the table.
            self.slots.release(self._slots_of(table))
            self.below.take_over(table, store)

    def close(self) -> None:
        """Release files and memory; see `RowLevel.close`."""
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
            # A row may have been written or evicted since the list was made.
            with self._lock:
                dirty = part[self.slots.is_dirty[part]]
                self._write_back(dirty)
                self.slots.is_dirty[dirty] = False


def read_together(levels: Sequence[CachedRows], keys: Tensor, ends: Sequence[int], out: Tensor) -> Tensor:
    """Copy rows of several levels with one table each, rows of one size and keys as arena rows.

    Args:
        levels: Distinct levels.
        keys: int64[n], which may repeat; those of level i end before ``ends[i]``, where those of the next begin.
        ends: As above, rising; the last is n.
        out: uint8[n, row_bytes].

    Returns:
        Which rows there are, bool[n].

    Raises:
        StorageError: A level below is damaged.
    """
    with ExitStack() as held:
        # Always in the same order, to avoid a deadlock of two readers.
        for level in sorted(levels, key=id):
            held.enter_context(level._lock)
        touched = touch_maps([level.slots for level in levels], keys, ends, pins=False)
        gather_from([level._values for level in levels], touched.slots, ends, out)
        changes = [level._changes for level in levels]
    found = touched.slots >= 0
    done = 0
    for level, before, num_absent, begin, end in zip(
        levels, changes, touched.num_absent, (0, *ends), ends, strict=False
    ):
        if num_absent:
            absent = touched.absent[done : done + num_absent] - begin
            done += num_absent
            # A level of one table, number 0, whose keys are its arena rows.
            own = keys[begin:end]
            batch = RowBatch(own, own, torch.zeros_like(own))
            level._read_below(batch, absent, before, out[begin:end], found[begin:end])
    return found


def _owners(slots: SlotMap, places: Tensor) -> RowBatch:
    return RowBatch(slots.owners.rows[places], slots.owners.keys[places], slots.owners.tables[places].long())
