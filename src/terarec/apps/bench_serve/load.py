# SPDX-License-Identifier: Apache-2.0
"""Sends requests in a closed or an open loop, and measures how long each answer takes."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from terarec.errors import TerarecError

_SPIN_NS = 2_000_000
"""Nearer to a moment than this the loop does not sleep: timers of event loops are up to a millisecond late."""

_MOST_UNANSWERED = 65_536
"""Requests of an open loop that wait for answers; further ones count as failed."""

_AT_ONCE = 64
"""Requests that may be due before the loop goes on to send and to take answers: one that is late must do so, too."""

_PAUSE_SECONDS = 0.01  # of a client of a closed loop after an error, which is answered at once


class RequestError(TerarecError, RuntimeError):
    """A request got an error for an answer, or none."""


class Sender(Protocol):
    """Connections to a server. For one event loop."""

    async def open(self, connections: int) -> None:
        """Connect; further connections are made when they are needed, up to this number."""

    async def send(self, body: bytes) -> None:
        """Send a request and wait for its answer."""

    async def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How requests follow each other.

    Attributes:
        clients: Clients of a closed loop, or the limit of the connections of an open one.
        rate: Requests a second of an open loop; None for a closed one.
        seconds: Duration.
        seed: Seed of the moments of an open loop.
    """

    clients: int
    rate: float | None
    seconds: float
    seed: int


@dataclass(kw_only=True, slots=True)
class Measured:
    """What a load has measured.

    Attributes:
        latencies: int64 nanoseconds from the moment at which each answered request was due to its answer.
        ends: int64 nanoseconds from the begin of the load to that answer.
        lateness: int64 nanoseconds from the moment at which each request of an open loop was due until it was sent.
        errors: Reason -> number of requests that failed.
        seconds: Time from the begin to the last answer.
        cpu_seconds: Processor time of the sending process.
    """

    latencies: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    lateness: array[int] = field(default_factory=lambda: array("q"))
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, other: Measured) -> None:
        """Add what another process has measured at the same time."""
        self.latencies.extend(other.latencies)
        self.ends.extend(other.ends)
        self.lateness.extend(other.lateness)
        self.errors.update(other.errors)
        self.seconds = max(self.seconds, other.seconds)
        self.cpu_seconds += other.cpu_seconds


async def run_load(sender: Sender, bodies: Sequence[bytes], pace: Pace) -> Measured:
    """Send requests for a while, and wait for all answers."""
    measured = Measured()
    cpu, begin = time.process_time(), time.perf_counter_ns()
    if pace.rate is None:
        await _closed_loop(sender, bodies, pace, begin, measured)
    else:
        await _open_loop(sender, bodies, pace, begin, measured)
    measured.seconds = (time.perf_counter_ns() - begin) / 1e9
    measured.cpu_seconds = time.process_time() - cpu
    return measured


async def _closed_loop(sender: Sender, bodies: Sequence[bytes], pace: Pace, begin: int, measured: Measured) -> None:
    end = begin + int(pace.seconds * 1e9)

    async def client(number: int) -> None:
        # Clients begin at different requests, so that they do not send the same one at a time.
        place = number * max(1, len(bodies) // pace.clients)
        while (due := time.perf_counter_ns()) < end:
            if not await _send(sender, bodies[place % len(bodies)], due, begin, measured):
                await asyncio.sleep(_PAUSE_SECONDS)
            place += 1

    await asyncio.gather(*(client(number) for number in range(pace.clients)))


async def _open_loop(sender: Sender, bodies: Sequence[bytes], pace: Pace, begin: int, measured: Measured) -> None:
    assert pace.rate is not None
    moments = random.Random(pace.seed)
    unanswered: set[asyncio.Task[bool]] = set()
    due, end, place = begin, begin + int(pace.seconds * 1e9), 0
    while True:
        # A Poisson process: intervals are exponential, and do not depend on answers. A server that stalls delays what
        # is due meanwhile, and this delay is part of the latency, since it counts from the moment that was due.
        due += int(moments.expovariate(pace.rate) * 1e9)
        if due >= end:
            break
        while (left := due - time.perf_counter_ns()) > 0:
            await asyncio.sleep((left - _SPIN_NS) / 1e9 if left > _SPIN_NS else 0)
        if place % _AT_ONCE == 0:
            await asyncio.sleep(0)
        if len(unanswered) >= _MOST_UNANSWERED:
            measured.errors["not sent: too many requests wait for answers"] += 1
            continue
        measured.lateness.append(time.perf_counter_ns() - due)
        task = asyncio.create_task(_send(sender, bodies[place % len(bodies)], due, begin, measured))
        unanswered.add(task)
        task.add_done_callback(unanswered.discard)
        place += 1
    await asyncio.gather(*unanswered)


async def _send(sender: Sender, body: bytes, due: int, begin: int, measured: Measured) -> bool:
    try:
        await sender.send(body)
    except RequestError as error:
        measured.errors[str(error)] += 1
        return False
    now = time.perf_counter_ns()
    measured.latencies.append(now - due)
    measured.ends.append(now - begin)
    return True
