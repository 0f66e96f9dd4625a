# SPDX-License-Identifier: Apache-2.0
"""Closed and open loops: who sends when, and from when latency counts."""

import asyncio
from collections import Counter

import pytest

from terarec.apps.bench_serve.load import Measured, Pace, RequestError, run_load
from terarec.apps.bench_serve.processes import LoadError, Target, _Child, shares
from tests.errors import at

STALL_SECONDS = 0.2


class Answers:
    """A sender whose answers take a while; it notes what is in flight."""

    def __init__(self, seconds: float = 0.001) -> None:
        self.seconds = seconds
        self.bodies: list[bytes] = []
        self.in_flight = self.most_in_flight = 0

    async def open(self, connections: int) -> None:
        pass

    async def send(self, body: bytes) -> None:
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1

    async def close(self) -> None:
        pass


class Stalling(Answers):
    """A server that answers one request at a time, and stops for a while at its third one."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = asyncio.Lock()

    async def send(self, body: bytes) -> None:
        async with self._turn:
            self.seconds = STALL_SECONDS if len(self.bodies) == 2 else 0.0
            await super().send(body)


class Failing(Answers):
    async def send(self, body: bytes) -> None:
        await super().send(body)
        if len(self.bodies) % 2:
            raise RequestError("503", "busy")


def pace(clients: int = 4, rate: float | None = None, seconds: float = 0.3) -> Pace:
    return Pace(clients=clients, rate=rate, seconds=seconds, seed=3)


def test_a_closed_loop_has_as_many_requests_in_flight_as_clients() -> None:
    sender = Answers()
    measured = asyncio.run(run_load(sender, [b"a", b"b", b"c"], pace(clients=5)))
    assert sender.most_in_flight == 5
    assert sender.in_flight == 0
    assert len(measured.latencies) == len(measured.ends) == len(sender.bodies)
    assert set(sender.bodies) == {b"a", b"b", b"c"}
    assert len(measured.lateness) == 0
    assert min(measured.latencies) >= 1_000_000
    assert measured.seconds >= 0.3


def test_an_open_loop_sends_at_its_rate_whatever_the_answers_do() -> None:
    sender = Answers(seconds=STALL_SECONDS)
    measured = asyncio.run(run_load(sender, [b"a"], pace(rate=200, seconds=0.5)))
    # A closed loop of four clients would send at most 12.
    assert 50 < len(sender.bodies) < 160
    assert len(measured.latencies) == len(measured.lateness) == len(sender.bodies)
    assert sender.in_flight == 0


def test_a_load_that_is_more_than_the_client_can_send_takes_answers_all_the_same() -> None:
    """Requests are sent, and answers are taken, while further ones are due already."""
    sender = Answers(0.0)
    measured = asyncio.run(run_load(sender, [b"a"], pace(rate=1e6, seconds=0.02)))
    assert sender.most_in_flight < 1_000 < len(measured.latencies) == len(measured.lateness)


def test_the_same_seed_is_the_same_load() -> None:
    counts = [len(asyncio.run(run_load(Answers(0), [b"a"], pace(rate=500))).latencies) for _ in range(2)]
    assert counts[0] == counts[1] > 0


def test_a_stall_delays_all_that_was_due_meanwhile() -> None:
    """No coordinated omission: requests that a stalled server could not take count with the time that they waited."""

    def slow_ones(rate: float | None) -> int:
        measured = asyncio.run(run_load(Stalling(), [b"a"], pace(clients=1, rate=rate, seconds=0.5)))
        return sum(latency > STALL_SECONDS / 2 * 1e9 for latency in measured.latencies)

    # One request meets the stall in a closed loop, which then waits; some 30 are due in half of it in an open one.
    assert slow_ones(rate=300) > 5 * slow_ones(rate=None) > 0


def test_errors_are_counted_by_reason_and_are_no_latencies() -> None:
    sender = Failing()
    measured = asyncio.run(run_load(sender, [b"a"], pace(clients=2)))
    assert measured.errors == Counter({"503: busy": len(sender.bodies) - len(measured.latencies)})
    assert measured.errors.total() > 0
    assert len(measured.latencies) > 0


@pytest.mark.parametrize(("clients", "processes"), [(1, 1), (7, 3), (64, 2)])
def test_processes_share_a_load(clients: int, processes: int) -> None:
    parts = shares(pace(clients=clients, rate=90), processes)
    assert sum(part.clients for part in parts) == clients
    assert sum(part.rate or 0 for part in parts) == pytest.approx(90)
    assert len({part.seed for part in parts}) == len(parts) == processes


def test_a_process_that_is_killed_before_it_begins_is_named() -> None:
    child = _Child(Target(address="http://127.0.0.1:1", is_grpc=False), [b"{}"], pace(), 0.0, None)
    child._process.kill()
    child._process.wait()
    with pytest.raises(LoadError, match="a process ended early"), child:
        child.begin()


def test_a_core_that_is_not_there_is_named() -> None:
    child = _Child(Target(address="http://127.0.0.1:1", is_grpc=False), [b"{}"], pace(), 0.0, 1_000_000)
    with pytest.raises(LoadError, check=at("cores", "got 1000000")), child:
        child.wait_until_ready()


def test_what_processes_measure_adds_up() -> None:
    measured = Measured(seconds=1, cpu_seconds=0.5)
    other = Measured(errors=Counter({"lost": 2}), seconds=2, cpu_seconds=1)
    other.latencies.append(7)
    other.ends.append(8)
    measured.add(other)
    assert (list(measured.latencies), list(measured.ends)) == ([7], [8])
    assert (measured.errors, measured.seconds, measured.cpu_seconds) == (Counter({"lost": 2}), 2, 1.5)
