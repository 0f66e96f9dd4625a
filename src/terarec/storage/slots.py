"""Pins of the slots of a fast tier."""

from __future__ import annotations

from collections import deque

from torch import Tensor

SLOT_BYTES = 60
"""Bytes that a slot takes besides its row: some 24 in the index, and 36 for its owner and its use."""


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
