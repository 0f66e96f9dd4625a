# SPDX-License-Identifier: Apache-2.0
"""`CachedPart`: the rows of one slot map in host memory, bounded by slots, by a number of rows, or by memory alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels import memory
from terarec.kernels.pages import untouched_zeros
from terarec.kernels.slots import (
    RowBatch,
    RowPart,
    SlotLimit,
    gather_rows,
    new_slot_map,
    row_set,
    scatter_rows,
)
from terarec.memory.growing_rows import GrowingTensor
from terarec.spec import OverflowSpec

_CPU = torch.device("cpu")
_FEWEST_BYTES = 1 << 20  # at a time, so that a small table does not grow with every piece
_GROWTH = 8  # an eighth more at a time: only address space until rows are written
_PARALLEL_BYTES = 1 << 20  # rows that are copied by more than one thread
_VICTIMS_SHARE = 64  # of the slots, at least: choosing victims looks at every slot


class BudgetError(StorageError):
    """A tier is too small for the rows that one batch needs at once.

    Attributes:
        needed: Rows that the batch needs and that pending gradients hold.
        capacity: Rows that the tier has room for.
        needed_bytes: Sufficient budget.
    """

    def __init__(self, *parts: object, needed: int, capacity: int, needed_bytes: int) -> None:
        super().__init__(*parts)
        self.needed = needed
        self.capacity = capacity
        self.needed_bytes = needed_bytes

    def during(self, what: str) -> BudgetError:
        """Return this error with the operation that needed the rows, such as "step 7", in front."""
        return BudgetError(
            what, self.where, self.problem, needed=self.needed, capacity=self.capacity, needed_bytes=self.needed_bytes
        )


class CachedPart:
    """Rows of one slot map. The caller holds a lock.

    Attributes:
        slots: Map of the rows that are here.
        writing: Held by whoever changes rows or writes them below, before that lock: so changed rows, and those that
            are pinned, stay as they are while the lock is released.
        evicted: Rows that gave their slots to others for good.

    Args:
        name: Name of the memory, for errors.
        row_bytes: Bytes of a row.
        capacity: Number of slots; None for as many as memory has.
        slot_bytes: Bytes that a slot takes besides its row.
        overflow: Bound of the rows, beyond which some are evicted; None for none.
        at_once: Maximum number of rows of a write.
    """

    def __init__(
        self,
        name: str,
        row_bytes: int,
        capacity: int | None,
        *,
        slot_bytes: int,
        overflow: OverflowSpec | None,
        at_once: int,
    ) -> None:
        self._name, self._row_bytes, self._slot_bytes = name, row_bytes, slot_bytes
        self._overflow = None if overflow is None or overflow.max_rows is None else overflow
        if self._overflow is not None and self._overflow.max_rows is not None:
            # The rows of a write come in before others are evicted.
            capacity = self._overflow.max_rows + at_once
        self._grows = capacity is None
        if capacity is None:
            capacity = max(1, memory.total_bytes() // (row_bytes + slot_bytes))
        self.slots = new_slot_map(max(1, capacity), _CPU, is_sparse=self._grows)
        self.writing = threading.Lock()
        self._limit = SlotLimit(self.slots)
        self._rows = GrowingTensor((row_bytes,), torch.uint8, _CPU)
        if not self._grows:
            # Reserved rather than allocated: a slot takes memory when it is first written, and `lower` can give memory
            # back.
            self._rows.grow(self.slots.capacity)
        self._last_uses: Tensor | None = None
        if self._overflow is not None and self._overflow.evict == "lru":
            self._last_uses = untouched_zeros(self.slots.capacity, torch.int64, f"times of use in {name}")
        self._clock = 0
        self._has_unchanged = True  # or it is not known
        self.evicted = 0

    @property
    def values(self) -> Tensor:
        """Rows uint8[C, row_bytes] of the slots."""
        return self._rows.tensor

    @property
    def memory_bytes(self) -> int:
        """Bytes of slots that were used."""
        return self.slots.used_slots * (self._row_bytes + self._slot_bytes)

    @property
    def capacity(self) -> int:
        """Number of slots that may be used."""
        return self._limit.limit

    def note_use(self, slots: Tensor) -> None:
        """Note a use of ``slots int64[n]``, -1 for none, where rows are evicted by their last one."""
        if self._last_uses is not None:
            self._clock += 1
            self._last_uses[slots[slots >= 0]] = self._clock

    def owners(self, slots: Tensor) -> RowBatch:
        """Return the rows of ``slots int64[n]``."""
        owners = self.slots.owners
        return RowBatch(owners.rows[slots], owners.keys[slots], owners.tables[slots].long())

    def of_table(self, table: int) -> Tensor:
        """Return the slots int64[n] of a table's rows."""
        used = self.slots.used_slots
        return (self.slots.is_held[:used] & (self.slots.owners.tables[:used] == table)).nonzero()[:, 0]

    def lower(self, capacity: int, write_back: Callable[[Tensor], None]) -> None:
        """Give up slots until `capacity` are left, and their memory; `write_back` takes slots of changed rows."""
        if capacity < self._limit.limit:
            first = self._limit.lower(capacity, write_back)
            self._rows.discard(first, self.slots.capacity)

    def write(self, batch: RowBatch, values: Tensor, *, is_backed: bool, is_again: bool = False) -> Tensor:
        """Set distinct rows to ``values uint8[n, row_bytes]``, or name those that have to be written below first.

        Returns:
            Slots int64[m] of changed rows, table by table, for `leave` or `stay` to unpin; none where the rows are set.

        Raises:
            BudgetError: Nothing takes them, and there is no room.
            StorageError: Not enough memory.
        """
        # Pinned, since making room for the absent rows of the batch must not evict those that are here. Where nothing
        # takes rows that lose their slots, none does here.
        if is_again:  # a use is counted once
            slots = self.slots.find(batch.rows)
            used, absent = slots[slots >= 0], (slots < 0).nonzero()[:, 0]
            self.slots.pin(used)
        elif is_backed or self._overflow is not None:
            slots, used, absent = self.slots.touch(batch.rows, pins=is_backed)
        else:
            slots = used = self.slots.find(batch.rows)
            absent = (slots < 0).nonzero()[:, 0]
        try:
            if absent.numel() > self._limit.room:
                leaving = self._make_room(absent.numel(), is_backed=is_backed)
                if leaving.numel():
                    return self.kept(leaving)
            if absent.numel():
                new = self._assign(batch.part(absent))
                self.slots.unpin(new)
                slots[absent] = new
        finally:
            if is_backed:
                self.slots.unpin(used)
        # On one thread where others look rows up: a team of threads would wait for its slowest where cores are busy.
        # 1 M rows then took 24 s, and 3 to 7 s on one thread (14 runnable threads, two Zen 4 cores).
        scatter_rows([RowPart(self.values, 0)], slots, values, threads=None if is_backed else 1)
        # Where nothing takes rows, none waits to be written.
        if is_backed:
            self.slots.mark_changed(slots)
        self.note_use(slots)
        if self._overflow is not None:
            self._evict_overflow(self._overflow, slots)
        return slots[:0]

    def kept(self, slots: Tensor) -> Tensor:
        """Pin ``slots int64[n]``, distinct, until `leave` or `stay`, and return them table by table."""
        self.slots.pin(slots)
        # The level below has a store for each table, which takes a slice of a batch where rows of a table lie together.
        return self.slots.by_table(slots)

    def leave(self, slots: Tensor) -> None:
        """Take the rows of pinned ``slots int64[n]`` away, which the level below has by now."""
        self.slots.unpin(slots)
        self.slots.release(slots)

    def stay(self, slots: Tensor, *, is_written: bool) -> None:
        """Unpin ``slots int64[n]`` of changed rows; `is_written` says whether the level below has them by now."""
        self.slots.unpin(slots)
        if is_written:
            self.slots.is_dirty[slots] = False
            self._has_unchanged = True

    def keep(self, batch: RowBatch, values: Tensor) -> None:
        """Hold rows of the level below, which may repeat, in place of others that it has: nothing is written there."""
        # At most half of the slots, so that one large read leaves a part of what was here.
        firsts = row_set(batch.rows).firsts[: self._limit.limit // 2]
        firsts = firsts[self.slots.find(batch.rows[firsts]) < 0]  # another thread may have read the others
        # A search looks at every slot: not in each read while all rows wait to be written.
        if firsts.numel() > self._limit.room and self._has_unchanged:
            victims = self._least_used(firsts.numel(), keeps_dirty=True)
            self.slots.release(victims)
            self._has_unchanged = victims.numel() > 0
        firsts = firsts[: self._limit.room]
        self._has_unchanged |= firsts.numel() > 0
        slots = self._assign(batch.part(firsts))
        # `assign` pins what it places, for rows that gradients wait for; here nothing waits.
        self.slots.unpin(slots)
        scatter_rows([RowPart(self.values, 0)], slots, values, firsts)

    def read(self, slots: Tensor, out: Tensor) -> None:
        """Copy the rows of ``slots int64[n]`` to ``out uint8[n, row_bytes]``; none for -1."""
        # Copying less takes some 0.1 ms, and on busy cores a team of threads waits for its slowest for milliseconds.
        threads = 1 if slots.numel() * self._row_bytes < _PARALLEL_BYTES else None
        gather_rows([RowPart(self.values, 0)], slots, out, threads=threads)

    def erase(self, rows: Tensor) -> None:
        """Remove distinct ``rows int64[n]``; absent ones are ignored."""
        slots = self.slots.find(rows)
        self.slots.release(slots[slots >= 0])

    def clear(self) -> None:
        """Remove all rows and give their memory back."""
        used = self.slots.used_slots
        self.slots.release(self.slots.is_held[:used].nonzero()[:, 0])
        self._rows.discard(0, used)

    def _assign(self, batch: RowBatch) -> Tensor:
        if self._grows:
            slots, new = self.slots, batch.rows.numel()
            num_free = slots.room - (slots.capacity - slots.used_slots)
            self._grow(slots.used_slots + max(0, new - num_free))
        return self.slots.assign(batch)

    def _grow(self, rows: int) -> None:
        """Have memory for at least `rows` rows."""
        capacity = self.values.shape[0]
        if rows <= capacity:
            return
        target = max(rows, capacity + max(capacity // _GROWTH, _FEWEST_BYTES // self._row_bytes))
        target = min(self.slots.capacity, target)
        memory.require((target - capacity) * (self._row_bytes + self._slot_bytes), self._name)
        self._rows.grow(target)

    def _make_room(self, wanted: int, *, is_backed: bool) -> Tensor:
        """Take unchanged rows away for `wanted` others; return the slots of changed ones that have to go, too."""
        if not is_backed:
            num_rows = len(self.slots)
            needed = (num_rows + wanted) * (self._row_bytes + self._slot_bytes)
            raise BudgetError(
                self._name,
                f"{num_rows:,} rows fill it and {wanted:,} more come, expected a budget of {needed:,} bytes or a file",
                needed=num_rows + wanted,
                capacity=num_rows,
                needed_bytes=needed,
            )
        victims = self._least_used(wanted)
        is_changed = self.slots.is_dirty[victims]
        self.slots.release(victims[~is_changed])
        return victims[is_changed]

    def _least_used(self, wanted: int, *, keeps_dirty: bool = False) -> Tensor:
        """Return slots to release so that `wanted` more rows have room."""
        missing = wanted - self._limit.room
        return self.slots.victims(max(missing, self._limit.limit // _VICTIMS_SHARE), 0, keeps_dirty=keeps_dirty)

    def _evict_overflow(self, overflow: OverflowSpec, new: Tensor) -> None:
        """Evict rows while there are more than the bound; those of the slots `new`, just written, go last."""
        num_rows, bound = len(self.slots), overflow.max_rows
        if bound is None or num_rows <= bound:
            return
        # More than there are too many, so that the next writes evict nothing.
        most = num_rows - int(bound * overflow.keep)
        gone = self._victims(overflow, new, most)
        if gone.numel() < num_rows - bound:  # the batch itself is larger than the bound
            gone = torch.cat([gone, new[: num_rows - bound - gone.numel()]])
        self.slots.release(gone)
        self.evicted += gone.numel()

    def _victims(self, overflow: OverflowSpec, spared: Tensor, most: int) -> Tensor:
        if overflow.evict == "lfu":
            # Pinned, since rows that were just written have the fewest uses.
            self.slots.pin(spared)
            victims = self.slots.victims(most, 0)
            self.slots.unpin(spared)
            return victims
        may_go = self.slots.is_held[: self.slots.used_slots].clone()
        # Rows that were just written have the fewest uses, and would be the first to go.
        may_go[spared] = False
        loose = may_go.nonzero()[:, 0]
        most = min(most, loose.numel())
        if self._last_uses is None:
            return loose[torch.randperm(loose.numel())[:most]]
        return loose[self._last_uses[loose].topk(most, largest=False).indices]
