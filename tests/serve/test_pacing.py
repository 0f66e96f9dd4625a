# SPDX-License-Identifier: Apache-2.0
"""`Pacing`: how the waiting and the size of batches follow what was seen, in a time that the tests make."""

import random

import pytest

from terarec.serve.batcher import Pacing
from terarec.spec import BatchingSpec

MS = 1_000_000
TARGET = 10 * MS


class Clock:
    """Batches of one kind, one after the other."""

    def __init__(self, **fields: float) -> None:
        self.now = 0
        self.pacing = Pacing(BatchingSpec(target_p99_seconds=0.01, max_batch_size=256, **fields), 0)  # type: ignore[arg-type]

    def batches(self, count: int, *, latency: float, compute: float, every: float, records: int = 8) -> None:
        """Let so many batches pass, with times in milliseconds."""
        for _ in range(count):
            self.now += int(every * MS)
            self.pacing.observe([int(latency * MS)] * records, records, int(compute * MS), self.now)


def test_a_fixed_pace_stays() -> None:
    pacing = Pacing(BatchingSpec(max_queue_delay_microseconds=700, max_batch_size=9), 0)
    pacing.observe([10**9] * 1000, 9, 10**9, 10**10)
    assert (pacing.delay_ns, pacing.max_records) == (700_000, 9)


def test_waiting_grows_while_the_model_is_busy_and_fast() -> None:
    clock = Clock()
    assert clock.pacing.delay_ns == 0
    clock.batches(2000, latency=3, compute=1, every=2)
    # No longer than leaves time for two batches.
    assert 5 * MS < clock.pacing.delay_ns <= 0.8 * TARGET - 2 * MS
    assert clock.pacing.max_records == 256


def test_a_maximum_bounds_the_waiting() -> None:
    clock = Clock(max_queue_delay_microseconds=900)
    clock.batches(2000, latency=3, compute=1, every=2)
    assert clock.pacing.delay_ns == 900_000


def test_an_idle_model_does_not_wait() -> None:
    clock = Clock()
    clock.batches(2000, latency=3, compute=1, every=2)
    clock.batches(2000, latency=3, compute=1, every=50)
    assert clock.pacing.delay_ns == 0


def test_waiting_ends_close_to_the_target() -> None:
    clock = Clock()
    clock.batches(2000, latency=3, compute=1, every=2)
    clock.batches(2000, latency=9, compute=1, every=2)
    assert clock.pacing.delay_ns == 0
    assert clock.pacing.max_records == 256  # the queue is long, and not the batches


def test_batches_that_take_too_long_become_smaller_and_grow_again() -> None:
    clock = Clock()
    clock.batches(2000, latency=9, compute=8, every=9, records=200)
    small = clock.pacing.max_records
    assert small < 200
    clock.batches(4000, latency=3, compute=1, every=2)
    assert clock.pacing.max_records == 256


def test_a_hundredth_of_late_requests_counts() -> None:
    clock = Clock()
    clock.batches(2000, latency=3, compute=1, every=2)
    grown = clock.pacing.delay_ns
    for _ in range(20):
        clock.now += 20 * MS
        clock.pacing.observe([3 * MS] * 97 + [30 * MS] * 3, 100, 10 * MS // 10, clock.now)
    assert clock.pacing.delay_ns < grown


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_simulated_server_holds_its_target(load: float) -> None:
    """Poisson arrivals of single records; a batch of n takes 0.5 ms + 0.05 ms * n: 20,000 records/s at most."""
    generator = random.Random(4)
    pacing = Pacing(BatchingSpec(target_p99_seconds=0.01, max_batch_size=256), 0)
    peak = 1 / 0.05e6  # records a nanosecond
    arrivals: list[int] = []
    time = 0.0
    for _ in range(60_000):
        time += generator.expovariate(load * peak)
        arrivals.append(int(time))
    latencies: list[int] = []
    first, free = 0, 0
    while first < len(arrivals):
        begin = max(free, arrivals[first] + pacing.delay_ns)
        end = first
        while end < len(arrivals) and end - first < pacing.max_records and arrivals[end] <= begin:
            end += 1
        if end - first == pacing.max_records:  # full before the time was over
            begin = max(free, arrivals[end - 1])
        compute = int(0.5e6 + 0.05e6 * (end - first))
        free = begin + compute
        found = [free - arrived for arrived in arrivals[first:end]]
        pacing.observe(found, end - first, compute, free)
        latencies += found
        first = end
    late = sorted(latencies[len(latencies) // 4 :])
    assert late[int(0.99 * len(late))] <= 1.1 * TARGET
