# SPDX-License-Identifier: Apache-2.0
"""Sinks: what is written about requests leaves their path by a bounded queue, and goes on in a thread."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from typing_extensions import override

from terarec.repeating import Repeating

_LOGGER = logging.getLogger(__name__)

Item = TypeVar("Item")


class SinkCounts(NamedTuple):
    """Items of a sink.

    Attributes:
        written: Items that were written.
        lost: Reason -> items that were not: "queue_full" for those that came faster than they were written, and
            "write_error".
    """

    written: int
    lost: Mapping[str, int]


class Sink(Protocol):
    """Where something about requests goes."""

    label: str

    def counts(self) -> SinkCounts:
        """Return how many items it has written and lost."""


class QueuedSink(Repeating, Generic[Item]):
    """Writes items in a thread of its own. What does not fit into its queue is lost and counted.

    No lock is taken for an item, and no thread is woken: the thread looks for items several times a second.
    `_lock` guards the counts.
    """

    def __init__(self, label: str, most_waiting: int, every_seconds: float) -> None:
        self.label = label
        self._most_waiting = most_waiting
        self._waiting: deque[Item] = deque()
        self._written = 0
        self._lost = {"queue_full": 0, "write_error": 0}
        self._lock = threading.Lock()
        self._polling = threading.Lock()  # the thread and `close` may write at once
        self._is_failing = False
        super().__init__(f"terarec-{label}", every_seconds)

    def counts(self) -> SinkCounts:
        """Return how many items were written and lost."""
        with self._lock:
            return SinkCounts(self._written, dict(self._lost))

    @override
    def poll(self) -> int:
        with self._polling:
            # Those that are there now: a thread that adds faster than this one writes must not keep it here.
            items = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                self._write(items)
            except Exception as error:  # of a library: `close` goes on, and so does what waits next
                self._fail(error, len(items))
            return len(items)

    @override
    def close(self) -> None:
        super().close()
        self.poll()

    @abstractmethod
    def _write(self, items: Sequence[Item]) -> None:
        """Write items, and count them by `_count` and `_fail`; also called without any, several times a second."""

    def _put(self, item: Item) -> None:
        """Take an item. Callable from any thread; it does not wait."""
        if len(self._waiting) < self._most_waiting:
            self._waiting.append(item)
        else:
            self._lose("queue_full", 1)

    def _count(self, written: int) -> None:
        with self._lock:
            self._written += written
        self._is_failing = False

    def _lose(self, reason: str, count: int) -> None:
        with self._lock:
            self._lost[reason] += count

    def _fail(self, error: Exception, count: int) -> None:
        """Count items that could not be written; the error is logged, once until something is written again."""
        self._lose("write_error", count)
        if not self._is_failing:
            _LOGGER.warning("%s: %s; requests go on, and what is lost is counted", self.label, error)
        self._is_failing = True
