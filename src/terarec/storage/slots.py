"""Pins of the slots of a fast tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from terarec.kernels.slots import SlotMap

_LAST_BATCH = 2**31 - 1
SLOT_BYTES = 60
"""Bytes that a slot takes besides its row: some 23 in the index, and 37 for its owner and its use."""


class Pin:
    """Slots that keep their rows until `release`, at the latest until the pin is deleted.

    Attributes:
        slots: int64[n], distinct.

    Args:
        slots: As above.
        released: Where the slots go that are let go.
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


class SlotLimit:
    """A bound of the slots of a map that can be lowered, as their memory is needed for something else.

    Attributes:
        limit: Slots from this one on are not assigned any more, but for the few that were free when it was lowered.

    Args:
        slots: The map.
    """

    def __init__(self, slots: SlotMap) -> None:
        self.limit = slots.capacity
        self._slots = slots

    @property
    def room(self) -> int:
        """Slots without a row."""
        return self._slots.room - (self._slots.capacity - max(self.limit, self._slots.used_slots))

    def lower(self, limit: int, write_back: Callable[[Tensor], None]) -> int:
        """Take slots from `limit` on out of use; those that are pinned stay.

        Args:
            limit: As above.
            write_back: Called with the slots int64[n] whose rows go although they were changed.

        Returns:
            The slot from which on none has a row.
        """
        slots = self._slots
        loose = slots.victims(slots.used_slots, _LAST_BATCH)
        tail = loose[loose >= limit]
        write_back(tail[slots.is_dirty[tail]])
        slots.hold(tail)  # a pinned slot without a row is never assigned
        slots.release(tail)
        self.limit = limit
        held = slots.is_held[limit : slots.used_slots].nonzero()
        return limit + (int(held[-1]) + 1 if held.numel() else 0)
