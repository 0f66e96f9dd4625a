# SPDX-License-Identifier: Apache-2.0
"""`Answers`: what threads have scored comes to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


class Answers:
    """Brings the results of other threads to an event loop, which is woken once for all those of a batch.

    Threads append to `_arrived` and read `_is_called` after that; the loop resets it before it takes what has arrived.
    So an answer that nobody is called for is one that the loop still sees.
    """

    def __init__(self) -> None:
        self._arrived: deque[asyncio.Future[None]] = deque()
        self._is_called = False

    async def of(self, pending: Future[Answer]) -> Answer:
        """Wait for a result, and cancel it if the wait is cancelled; one that is there takes no time."""
        if not pending.done():
            loop = asyncio.get_running_loop()
            arrival = loop.create_future()

            def arrive(_: Future[Answer]) -> None:
                self._arrived.append(arrival)
                if not self._is_called:
                    self._is_called = True
                    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waits
                        loop.call_soon_threadsafe(self._take)

            pending.add_done_callback(arrive)
            try:
                await arrival
            except asyncio.CancelledError:
                pending.cancel()
                raise
        return pending.result()

    def _take(self) -> None:
        self._is_called = False
        while self._arrived:
            arrival = self._arrived.popleft()
            if not arrival.done():
                arrival.set_result(None)
