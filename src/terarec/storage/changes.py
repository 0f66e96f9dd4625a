"""`Changes`: what one batch changes in the tables of an arena, so that all of it or nothing comes to be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

Change = Callable[[], object]


class Changes:
    """A context manager: what is noted within the block is taken back if the block raises.

    A block within a block is a part of the outer one. Outside of blocks a change stands at once.

    Args:
        lock: held within the block.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._depth = 0
        self._ways_back: list[Change] = []
        self._put_off: list[Change] = []

    def __enter__(self) -> Changes:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        try:
            if not self._depth:
                self._end(has_failed=kind is not None)
        finally:
            self._lock.release()

    def made(self, way_back: Change) -> None:
        """A change was made; `way_back` undoes it, once all that came after it is undone."""
        if self._depth:
            self._ways_back.append(way_back)

    def put_off(self, change: Change) -> None:
        """Make `change`, which cannot fail and cannot be undone, after all others, in the order of these calls."""
        if self._depth:
            self._put_off.append(change)
        else:
            change()

    def _end(self, *, has_failed: bool) -> None:
        ways_back, put_off = self._ways_back, self._put_off
        self._ways_back, self._put_off = [], []
        for step in reversed(ways_back) if has_failed else put_off:
            step()
