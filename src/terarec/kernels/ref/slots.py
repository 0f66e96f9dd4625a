# SPDX-License-Identifier: Apache-2.0
"""Slots of rows and copies of rows, in plain PyTorch: the oracle, and the implementation on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.kernels.hash_index import new_hash_index
from terarec.kernels.slots import (
    MOST_USES,
    NO_ROW,
    USES_OF_SLOT,
    Admitted,
    RowBatch,
    RowPart,
    Touched,
    TouchedMaps,
    row_bytes_of,
)

_FREE = -1  # pins of a slot that may be assigned


class SlotMap:
    """The slots of rows; any int64 is a row.

    Rows without a slot get one by `assign`; `victims` names those that may be released for them. Those of the fewest
    uses go first. A use is a batch that needed the row; counts are halved from time to time, so that rows that were
    needed long ago go, too. Rows that are pinned stay, and rows that a coming batch needs stay while there are others.
    Of equal counts, slots go in turns.

    Attributes:
        capacity: Number of slots C.
        device: Device of the numbers.
        owners: The row of each slot, its key and its table, [C] each; a row of `NO_ROW` for none.
        is_held: bool[C], whether the slot has a row.
        is_dirty: bool[C], whether the slot's row was changed since it was read.
    """

    def __init__(self, capacity: int, device: torch.device, *, is_sparse: bool = False) -> None:
        self.capacity = capacity
        self.device = device
        self._index = new_hash_index(device)

        def numbers(dtype: torch.dtype) -> Tensor:
            return torch.zeros(capacity, dtype=dtype, device=device)

        self.owners = RowBatch(numbers(torch.int64).fill_(NO_ROW), numbers(torch.int64), numbers(torch.int32))
        self.is_held, self.is_dirty = numbers(torch.bool), numbers(torch.bool)
        self._needed_until, self._counts, self._pins = numbers(torch.int32), numbers(torch.uint8), numbers(torch.int16)
        self._scratch = numbers(torch.int32)
        # Lists of slots, joined by the next `assign`: appending a tensor at each release costs no copy.
        self._free: list[Tensor] = []
        self._num_free = self._next = self._hand = self._uses = 0

    def __len__(self) -> int:
        """Return the number of rows with a slot."""
        return len(self._index)

    @property
    def room(self) -> int:
        """Slots without a row."""
        return self._num_free + self.capacity - self._next

    @property
    def used_slots(self) -> int:
        """Slots from the first on that ever had a row."""
        return self._next

    @property
    def num_pinned(self) -> int:
        """Slots that are pinned."""
        return int((self._pins[: self._next] > 0).sum())

    def find(self, rows: Tensor) -> Tensor:
        """Return the slots int64[n] of ``rows int64[n]``, -1 where a row has none."""
        return self._index.find(rows)

    def touch(self, rows: Tensor, *, pins: bool) -> Touched:
        """Find rows and count a use of their slots.

        Args:
            rows: int64[n], which may repeat.
            pins: Whether each slot is pinned once.
        """
        slots = self.find(rows)
        present = slots[slots >= 0]
        places = torch.arange(present.numel(), dtype=torch.int32, device=self.device)
        # Repeated slots without a sort: of all that write to a slot one wins, and only that one reads its place back.
        self._scratch[present] = places
        used = present[self._scratch[present] == places]
        self._counts[used] += self._counts[used] < MOST_USES
        if pins:
            self.pin(used)
        self._age(used.numel())
        return Touched(slots, used, (slots < 0).nonzero()[:, 0])

    def mark_needed(self, rows: Tensor, until: int) -> Tensor:
        """Note that a coming batch needs rows.

        Args:
            rows: int64[n], which may repeat.
            until: Number of the batch.

        Returns:
            Positions int64[a] of those without a slot.
        """
        slots = self.find(rows)
        self._needed_until[slots[slots >= 0]] = until
        return (slots < 0).nonzero()[:, 0]

    def pin(self, slots: Tensor) -> None:
        """Pin ``slots int64[n]``, distinct, until as many calls of `unpin`."""
        self._pins[slots] += 1

    def unpin(self, slots: Tensor) -> None:
        """Undo a pin of ``slots int64[n]``."""
        self._pins[slots] -= 1

    def assign(self, batch: RowBatch) -> Tensor:
        """Give slots to distinct rows without one; there is `room` for them.

        Returns:
            int64[n], pinned once.
        """
        free = torch.cat([torch.empty(0, dtype=torch.int64, device=self.device), *self._free])
        reused = min(batch.rows.numel(), self._num_free)
        self._num_free -= reused
        # The index hands slots out itself: the last released ones first, then those that never had a row.
        slots, _ = self._index.insert(batch.rows, free[self._num_free :], self._next)
        self._free = [free[: self._num_free]]
        self._next += batch.rows.numel() - reused
        for owners, values in zip(self.owners, batch, strict=True):
            owners[slots] = values.to(owners.dtype)
        self.is_held[slots] = True
        self.is_dirty[slots] = False
        self._needed_until[slots] = 0
        self._counts[slots] = 1
        self._pins[slots] = 1
        self._age(batch.rows.numel())
        return slots

    def admit(self, rows: Tensor, at_once: int) -> Admitted:
        """Give slots to rows without a pin; those of the fewest uses give theirs where there is no room.

        Args:
            rows: int64[n], distinct; they are their own keys, of table 0.
            at_once: Fewest slots to release where there is no room, for finding them passes over all.
        """
        # Pinned meanwhile, so that the search for victims leaves the rows of this call in place.
        slots, used, absent = self.touch(rows, pins=True)
        released = 0
        if absent.numel() > self.room:
            victims = self.victims(max(absent.numel() - self.room, at_once), 0)
            self.release(victims)
            released = victims.numel()
        absent = absent[: self.room]
        new_slots = self.assign(RowBatch(rows[absent], rows[absent], torch.zeros_like(absent)))
        slots[absent] = new_slots
        self.unpin(new_slots)
        self.unpin(used)
        return Admitted(slots, absent.numel(), released)

    def release(self, slots: Tensor) -> None:
        """Take the rows of ``slots int64[n]``, distinct, away; a pinned slot can be assigned once it is not."""
        # Before owners are reset, since they name the rows to erase.
        self._index.erase(self.owners.rows[slots[self.is_held[slots]]])
        self.is_held[slots] = False
        self.is_dirty[slots] = False
        self._needed_until[slots] = 0
        self._counts[slots] = 0
        self.owners.rows[slots] = NO_ROW
        self._free.append(slots[self._pins[slots] <= 0])  # the others once they are not pinned
        # Not 0, by which `victims` finds slots: a free one is listed here already.
        self._pins[self._free[-1]] = _FREE
        self._num_free += self._free[-1].numel()

    def victims(self, count: int, batch: int, *, keeps_dirty: bool = False) -> Tensor:
        """Return up to `count` slots that may be released.

        Args:
            count: Number of slots.
            batch: Number of the present batch: rows that a later one needs stay while there are others.
            keeps_dirty: Whether changed rows stay.

        Returns:
            int64[m], distinct; fewer where all other rows stay.
        """
        # Slots behind it never had a row: searches cost what is used, not the capacity.
        used = slice(0, self._next)
        may_release = self._pins[used] == 0
        if keeps_dirty:
            may_release &= ~self.is_dirty[used]
        is_needed = self._needed_until[used] > batch
        slots = self._least_used(count, may_release & ~is_needed)
        missing = count - slots.numel()
        return torch.cat([slots, self._least_used(missing, may_release & is_needed)]) if missing > 0 else slots

    def mark_changed(self, slots: Tensor) -> None:
        """Note that the rows of ``slots int64[n]``, which may repeat, changed."""
        self.is_dirty[slots] = True

    def by_table(self, slots: Tensor) -> Tensor:
        """Return ``slots int64[n]`` table by table, in the order in which they come."""
        return slots[self.owners.tables[slots].argsort(stable=True)]

    def _least_used(self, count: int, may_release: Tensor) -> Tensor:
        """Return `count` of the slots that may be released: those of the fewest uses, equal ones in turns."""
        slots = may_release.nonzero()[:, 0]
        # A clock: the search continues behind the last victim, so that rows of equal use are evicted in turns.
        slots = torch.cat([slots[slots >= self._hand], slots[slots < self._hand]])
        counts = self._counts[slots]
        # Stable, so that equal counts keep the order of the clock.
        order = counts.argsort(stable=True)[:count]
        if order.numel() == count and count:
            last = slots[order[-1]]
            self._hand = int(last) + 1
        return slots[order]

    def _age(self, uses: int) -> None:
        self._uses += uses
        if self._uses >= USES_OF_SLOT * self.capacity:
            self._uses = 0
            # Halving forgets: a row that was hot once does not keep its slot for ever.
            self._counts >>= 1


class RowSet:
    """The distinct rows of a list, numbered in the order in which they first occur.

    Attributes:
        firsts: int64[m], position at which each row first occurs, rising.
        places: int64[n], the number of each row of the list.
        num_left: Rows that were not taken.

    Args:
        rows: int64[n].
    """

    def __init__(self, rows: Tensor) -> None:
        # `torch.unique` sorts; numbers are to follow first occurrences, as the caller reads missing rows in that order.
        self._rows, sorted_places = torch.unique(rows, return_inverse=True)
        positions = torch.arange(rows.numel(), device=rows.device)
        firsts = torch.full_like(self._rows, rows.numel()).scatter_reduce_(0, sorted_places, positions, "amin")
        self.firsts, order = firsts.sort()
        self._numbers = torch.empty_like(order)
        self._numbers[order] = torch.arange(order.numel(), device=rows.device)
        self.places = self._numbers[sorted_places]
        self.num_left = order.numel()
        self._is_left = torch.ones_like(order, dtype=torch.bool)

    def find(self, rows: Tensor) -> Tensor:
        """Return the number int64[n] of each of ``rows int64[n]``, -1 where it is not in the list, or taken."""
        if not self._rows.numel():
            return torch.full_like(rows, -1)
        # A row behind the last one has a place outside, which `clamp_` moves to a row that differs.
        places = torch.searchsorted(self._rows, rows).clamp_(max=self._rows.numel() - 1)
        numbers = self._numbers[places]
        return torch.where((self._rows[places] == rows) & self._is_left[numbers], numbers, -1)

    def take(self, rows: Tensor) -> Tensor:
        """Return the numbers int64[n] of ``rows int64[n]``, distinct, as `find` does, and take those away."""
        places = self.find(rows)
        self._is_left[places[places >= 0]] = False
        self.num_left = int(self._is_left.sum())
        return places


def touch_maps(maps: Sequence[SlotMap], rows: Tensor, ends: Sequence[int], pins: bool) -> TouchedMaps:
    """Find rows in several maps; see `terarec.kernels.slots.touch_maps`."""
    slots, used, absent, missing, places = [], [], [], [], []
    num_missing = 0
    for slot_map, begin, end in zip(maps, (0, *ends), ends, strict=False):
        touched = slot_map.touch(rows[begin:end], pins=pins)
        without = rows[begin:end][touched.absent]
        distinct = RowSet(without)
        slots.append(touched.slots)
        used.append(touched.used)
        absent.append(touched.absent + begin)
        missing.append(without[distinct.firsts])
        places.append(distinct.places + num_missing)
        num_missing += distinct.firsts.numel()
    num_used, num_absent, num_distinct = ([part.numel() for part in parts] for parts in (used, absent, missing))
    return TouchedMaps(
        torch.cat(slots),
        torch.cat(used),
        torch.cat(absent),
        torch.cat(missing),
        torch.cat(places),
        num_used,
        num_absent,
        num_distinct,
    )


def admit_maps(
    maps: Sequence[SlotMap], rows: Tensor, ends: Sequence[int], at_once: Sequence[int]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Admit rows to several maps; see `terarec.kernels.slots.admit_maps`."""
    admitted = [
        slot_map.admit(rows[begin:end], fewest)
        for slot_map, begin, end, fewest in zip(maps, (0, *ends), ends, at_once, strict=False)
    ]
    return torch.cat([one.slots for one in admitted]), [(one.num_new, one.num_released) for one in admitted]


def gather_from(memories: Sequence[Tensor], slots: Tensor, ends: Sequence[int], out: Tensor) -> None:
    """Copy rows of several memories; see `terarec.kernels.slots.gather_from`."""
    for values, begin, end in zip(memories, (0, *ends), ends, strict=False):
        gather_rows([RowPart(values, 0)], slots[begin:end], out[begin:end], None)


def gather_rows(parts: Sequence[RowPart], slots: Tensor, out: Tensor, threads: int | None) -> None:
    """Copy rows to bytes; see `terarec.kernels.slots.gather_rows`."""
    here = (slots >= 0).nonzero()[:, 0]
    for values, offset in parts:
        num_bytes = row_bytes_of(values)
        rows = values[slots[here]].reshape(here.numel(), num_bytes // values.element_size())
        out[here.to(out.device), offset : offset + num_bytes] = rows.view(torch.uint8).to(out.device)


def scatter_rows(
    parts: Sequence[RowPart], slots: Tensor, values: Tensor, places: Tensor | None, threads: int | None
) -> None:
    """Copy bytes to rows; see `terarec.kernels.slots.scatter_rows`."""
    if places is not None:
        slots, places = slots[places >= 0], places[places >= 0]
        values = values[places.to(values.device)]
    for part, offset in parts:
        rows = values[:, offset : offset + row_bytes_of(part)].contiguous().view(part.dtype)
        part.index_copy_(0, slots, rows.view(slots.numel(), *part.shape[1:]).to(part.device))
