# SPDX-License-Identifier: Apache-2.0
"""`RequestQueue`: the requests that wait for a batch, by priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from terarec.serve.columns import RecordColumns


@dataclass(eq=False, slots=True)
class Waiting:
    """A request that waits.

    Attributes:
        records: Its raw columns.
        future: Future of its answer.
        answer: Makes the answer of its scores.
        level: Its level, from 0.
        arrived_ns: Its arrival, by `time.monotonic_ns`.
        due_ns: Time at which it no longer waits for others.
        deadline_ns: Time at which it expires; None for never.
        is_hurried: Whether it is due earlier than by the delay of all requests.
    """

    records: RecordColumns
    future: Future[Any]
    answer: Callable[[Any], Any]
    level: int
    arrived_ns: int
    due_ns: int
    deadline_ns: int | None
    is_hurried: bool = False

    def has_ended(self, now_ns: int) -> bool:
        """Return whether it has been cancelled or has expired."""
        return (self.deadline_ns is not None and now_ns >= self.deadline_ns) or self.future.cancelled()


class Taken(NamedTuple):
    """Requests that were taken from a queue.

    Attributes:
        batch: Those to score.
        ended: Those that have been cancelled or have expired.
    """

    batch: list[Waiting]
    ended: list[Waiting]


class RequestQueue:
    """Requests in the order in which they are scored: level by level, and by arrival in each.

    Not thread-safe: the lock of its `Batcher` guards it.

    Attributes:
        num_requests: Requests that wait, with those that have ended and not been removed yet.
        num_records: Records of them.
        due_ns: Earliest time at which one no longer waits for others; None if none waits.

    Args:
        num_levels: Number of levels, of which the first is scored first.
    """

    def __init__(self, num_levels: int) -> None:
        self._levels: tuple[deque[Waiting], ...] = tuple(deque() for _ in range(num_levels))
        self.num_requests = 0
        self.num_records = 0
        self.due_ns: int | None = None
        self._num_hurried = 0

    def add(self, waiting: Waiting) -> None:
        """Add a request at the end of its level."""
        self._levels[waiting.level].append(waiting)
        self.num_requests += 1
        self.num_records += waiting.records.num_records
        self._num_hurried += waiting.is_hurried
        if self.due_ns is None or waiting.due_ns < self.due_ns:
            self.due_ns = waiting.due_ns

    def take(self, max_records: int, preferred: Collection[int], now_ns: int, *, is_closed: bool = False) -> Taken:
        """Remove the requests of the next batch, if there is one by now.

        Args:
            max_records: Records of the batch at most; a request of more is a batch of its own.
            preferred: Numbers of records at which a batch need not wait for more.
            now_ns: The time.
            is_closed: Whether no request will come that could be waited for.
        """
        is_due = is_closed or (self.due_ns is not None and now_ns >= self.due_ns)
        batch, ended = Taken([], [])
        total, num_preferred, is_full = 0, 0, False
        for level in self._levels:
            while level and not is_full:
                waiting = level[0]
                if waiting.has_ended(now_ns):
                    ended.append(level.popleft())
                    continue
                size = waiting.records.num_records
                if batch and total + size > max_records:
                    is_full = True
                    break
                total += size
                batch.append(level.popleft())
                if total in preferred:
                    num_preferred = len(batch)
                is_full = total >= max_records
        num_taken = len(batch) if is_due or is_full else num_preferred
        for waiting in reversed(batch[num_taken:]):
            self._levels[waiting.level].appendleft(waiting)
        del batch[num_taken:]
        self._count_removed([*batch, *ended])
        return Taken(batch, ended)

    def remove_ended(self, now_ns: int) -> list[Waiting]:
        """Remove all requests that have been cancelled or have expired, and return them."""
        ended: list[Waiting] = []
        for level in self._levels:
            kept: list[Waiting] = []
            for waiting in level:
                (ended if waiting.has_ended(now_ns) else kept).append(waiting)
            level.clear()
            level.extend(kept)
        self._count_removed(ended)
        return ended

    def remove(self, future: Future[Any]) -> list[Waiting]:
        """Remove the request of a future and return it; none where it waits no longer."""
        for level in self._levels:
            for waiting in level:
                if waiting.future is future:
                    level.remove(waiting)
                    self._count_removed([waiting])
                    return [waiting]
        return []

    def _count_removed(self, removed: list[Waiting]) -> None:
        if not removed:
            return
        self.num_requests -= len(removed)
        self.num_records -= sum(waiting.records.num_records for waiting in removed)
        self._num_hurried -= sum(waiting.is_hurried for waiting in removed)
        # Of each level the first has waited for longest, and is due first unless another one is hurried.
        left = chain(*self._levels) if self._num_hurried else (level[0] for level in self._levels if level)
        self.due_ns = min((waiting.due_ns for waiting in left), default=None)
