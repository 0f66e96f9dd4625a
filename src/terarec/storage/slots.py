"""`SlotMap`: which rows have one of a bounded number of slots, and which rows give theirs to others."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.kernels.hash_index import new_hash_index

SLOT_BYTES = 60
"""Bytes that a slot takes besides its row: some 24 in the index, and 36 for its owner and its use."""

_MOST_COUNT = 7
_EMPTY, _ORPHAN = -1, -2
_FEWEST_SCANNED = 4096


class RowBatch(NamedTuple):
    """Rows of an arena.

    Attributes:
        rows: int64[n], arena rows.
        keys: int64[n], of their tables.
        tables: int64[n], numbers of their tables in the arena.
    """

    rows: Tensor
    keys: Tensor
    tables: Tensor

    def part(self, places: Tensor | slice) -> RowBatch:
        """Return those at `places`."""
        return RowBatch(self.rows[places], self.keys[places], self.tables[places])

    def to(self, device: torch.device) -> RowBatch:
        """Return them on `device`."""
        return RowBatch(*(held.to(device) for held in self))


class Pin:
    """Slots that keep their rows until `release`, at the latest until nobody holds the pin.

    Attributes:
        slots: int64[n], distinct.
    """

    def __init__(self, slots: Tensor, released: deque[Tensor]) -> None:
        self.slots = slots
        self._released: deque[Tensor] | None = released

    @property
    def is_released(self) -> bool:
        """Whether `release` was called."""
        return self._released is None

    def release(self) -> None:
        """Let the rows go; more calls have no effect. Any thread may call it."""
        released, self._released = self._released, None
        if released is not None:
            released.append(self.slots)

    def __del__(self) -> None:
        self.release()


class SlotMap:
    """The slots of rows. Rows without a slot get one by `assign`; `victims` names those that may be released for them.

    Replacement is CLOCK with a count of the batches that used a slot's row: the hand passes over the slots, halves
    counts, and takes rows whose count is zero. Rows that are pinned stay, and rows that a coming batch wants stay
    while there are others.

    The caller takes care that one thread works on it at a time.

    Attributes:
        capacity: Number of slots C.
        owners: The row of each slot, its key and its table, [C] each; a row of -1 for none.
        is_dirty: bool[C], whether the slot's row was changed since it was read.
        wanted_until: int64[C], number of the last coming batch that wants the row.

    Args:
        capacity: As above.
        device: Device of the numbers.
        implementation: Implementation of the index: "auto", or a name of `terarec.kernels.registry.IMPLEMENTATIONS`.
    """

    def __init__(self, capacity: int, device: torch.device, implementation: str = "auto") -> None:
        self.capacity = capacity
        self.device = device
        self._index = new_hash_index(device, implementation)

        def numbers(dtype: torch.dtype) -> Tensor:
            return torch.zeros(capacity, dtype=dtype, device=device)

        self.owners = RowBatch(numbers(torch.int64).fill_(_EMPTY), numbers(torch.int64), numbers(torch.int32))
        self.is_dirty = numbers(torch.bool)
        self.wanted_until = numbers(torch.int32)
        self._counts, self._pins = numbers(torch.uint8), numbers(torch.int16)
        self._scratch = numbers(torch.int32)
        self._free = torch.empty(0, dtype=torch.int64, device=device)
        self._next = self._hand = 0
        self._released: deque[Tensor] = deque()

    def __len__(self) -> int:
        """Return the number of rows with a slot."""
        return len(self._index)

    @property
    def room(self) -> int:
        """Slots without a row."""
        return self._free.numel() + self.capacity - self._next

    @property
    def used_slots(self) -> int:
        """Slots from the first on that ever had a row."""
        return self._next

    def find(self, rows: Tensor) -> Tensor:
        """Return the slots int64[n] of ``rows int64[n]``, -1 where a row has none."""
        return self._index.find(rows)

    def distinct(self, slots: Tensor) -> Tensor:
        """Return ``slots int64[n]``, each once."""
        places = torch.arange(slots.numel(), dtype=torch.int32, device=self.device)
        self._scratch[slots] = places
        return slots[self._scratch[slots] == places]

    def hold(self, slots: Tensor, *, counts: bool = True) -> None:
        """Pin ``slots int64[n]``, distinct, until as many calls of `let_go` or a pin's release.

        Args:
            slots: As above.
            counts: Whether a batch uses them.
        """
        self._pins[slots] += 1
        if counts:
            self._counts[slots] = (self._counts[slots] + 1).clamp_(max=_MOST_COUNT)

    def let_go(self, slots: Tensor) -> None:
        """Undo `hold`."""
        self._pins[slots] -= 1

    def pin(self, slots: Tensor) -> Pin:
        """Return what lets go of ``slots int64[n]`` that are held."""
        return Pin(slots, self._released)

    def assign(self, batch: RowBatch) -> Tensor:
        """Give slots to rows without one, which may repeat; there is `room` for them.

        Returns:
            int64[n].
        """
        slots, new_rows = self._index.insert(batch.rows, self._free, self._next)
        reused = min(new_rows.numel(), self._free.numel())
        self._free = self._free[reused:]
        self._next += new_rows.numel() - reused
        for held, values in zip(self.owners, batch, strict=True):
            held[slots] = values.to(held.dtype)
        self.is_dirty[slots] = False
        return slots

    def num_distinct(self, rows: Tensor) -> int:
        """Return how many of ``rows int64[n]``, none of which has a slot, are distinct."""
        _, new_rows = self._index.insert(rows, self._free, self._next)
        self._index.erase(new_rows)
        return new_rows.numel()

    def victims(self, count: int, batch: int, *, keeps_dirty: bool = False) -> Tensor:
        """Return up to `count` slots that may be released.

        Args:
            count: Number of slots.
            batch: Number of the present batch: rows that a later one wants stay while there are others.
            keeps_dirty: Whether changed rows stay.

        Returns:
            int64[m], distinct; fewer where all other rows stay.
        """
        self._let_released_go()
        found = self._pass_over(count, batch, keeps_dirty)
        missing = count - sum(slots.numel() for slots in found)
        if missing:
            found += self._pass_over(missing, None, keeps_dirty)
        slots = torch.cat(found) if found else self._free[:0]
        self._pins[slots] -= 1
        return slots

    def release(self, slots: Tensor) -> None:
        """Take the rows of ``slots int64[n]``, distinct, away; a pinned slot can be assigned once it is not."""
        rows = self.owners.rows[slots]
        self._index.erase(rows[rows >= 0])
        self.is_dirty[slots] = False
        self.wanted_until[slots] = 0
        self._counts[slots] = 0
        is_pinned = self._pins[slots] > 0
        self.owners.rows[slots] = torch.where(is_pinned, _ORPHAN, _EMPTY)
        self._free = torch.cat([self._free, slots[~is_pinned]])

    def clear(self) -> None:
        """Take the rows of all slots away."""
        held = self.owners.rows[: self._next]
        self.release((held >= 0).nonzero()[:, 0])

    @property
    def num_pinned(self) -> int:
        """Slots that are pinned."""
        self._let_released_go()
        return int((self._pins[: self._next] > 0).sum())

    def _let_released_go(self) -> None:
        while self._released:
            self._pins[self._released.popleft()] -= 1

    def _pass_over(self, count: int, batch: int | None, keeps_dirty: bool) -> list[Tensor]:
        """Return slots that may be released, pinned so that none is found twice."""
        found: list[Tensor] = []
        scanned, end = 0, self._next
        while count and scanned < (_MOST_COUNT.bit_length() + 1) * end:
            self._hand %= end
            width = min(max(4 * count, _FEWEST_SCANNED), end - self._hand)
            window = slice(self._hand, self._hand + width)
            owners, counts = self.owners.rows[window], self._counts[window]
            may_go = (owners != _EMPTY) & (self._pins[window] == 0)
            if keeps_dirty:
                may_go &= ~self.is_dirty[window]
            if batch is not None:
                may_go &= self.wanted_until[window] <= batch
            gone = (may_go & (counts == 0)).nonzero()[:count, 0]
            if gone.numel() == count:
                width = int(gone[-1]) + 1
            counts[:width] >>= may_go[:width].to(torch.uint8)
            self._hand += width
            scanned += width
            count -= gone.numel()
            found.append(gone + window.start)
            self._pins[found[-1]] += 1
        return found
