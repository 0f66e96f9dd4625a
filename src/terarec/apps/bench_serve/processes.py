# SPDX-License-Identifier: Apache-2.0
"""A load by this process or by several, which begin at the same time.

``python -m terarec.apps.bench_serve.processes`` is one of several: it reads its share from stdin, answers "ready" when
it is connected and warm, begins at the next line, and writes what it has measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

from terarec.apps.bench_serve.http_sender import HttpAddress, HttpSender
from terarec.apps.bench_serve.load import Measured, Pace, RequestError, Sender, run_load
from terarec.errors import TerarecError

_STOP_SECONDS = 10.0  # for a process that has answered to end


class LoadError(TerarecError, RuntimeError):
    """A process of a load failed, or the server cannot be reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        address: ``HOST:PORT`` of gRPC, or the URL of HTTP.
        is_grpc: Which of them.
        headers: Metadata of each request of gRPC; requests of HTTP have their headers already.
        timeout_seconds: Time for an answer.
    """

    address: str
    is_grpc: bool
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 30.0

    def sender(self) -> Sender:
        """Return unopened connections."""
        if not self.is_grpc:
            return HttpSender(HttpAddress(self.address), self.timeout_seconds)
        # Here, since its library is an extra.
        from terarec.apps.bench_serve.grpc_sender import GrpcSender

        return GrpcSender(self.address, self.headers, self.timeout_seconds)


def measure(
    target: Target,
    bodies: Sequence[bytes],
    pace: Pace,
    *,
    warmup_seconds: float = 0.0,
    processes: int = 1,
    cores: Sequence[int] = (),
    ready: Callable[[], None] = lambda: None,
) -> Measured:
    """Send a load, and wait for all answers.

    Args:
        target: Where it goes.
        bodies: Requests, sent in turn.
        pace: How they follow each other.
        warmup_seconds: Duration of the same load before.
        processes: Processes that share the load; there are never more than clients.
        cores: Cores for them; empty for any.
        ready: Callback between the two loads, while no request is in flight.
    """
    processes = min(processes, pace.clients)
    if processes == 1 and not cores:
        return asyncio.run(_measure_here(target, bodies, pace, warmup_seconds, ready))
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                _Child(target, bodies, share, warmup_seconds, cores[number % len(cores)] if cores else None)
            )
            for number, share in enumerate(shares(pace, processes))
        ]
        for child in children:
            child.wait_until_ready()
        ready()
        for child in children:
            child.begin()
        measured = Measured()
        for child in children:
            measured.add(child.measured())
    return measured


def shares(pace: Pace, processes: int) -> list[Pace]:
    """Divide a load among processes."""
    counts = [pace.clients // processes + (number < pace.clients % processes) for number in range(processes)]
    rate = None if pace.rate is None else pace.rate / processes
    return [
        # Poisson processes of different seeds are one of the sum of their rates.
        dataclasses.replace(pace, clients=count, rate=rate, seed=pace.seed + number)
        for number, count in enumerate(counts)
    ]


async def _measure_here(
    target: Target, bodies: Sequence[bytes], pace: Pace, warmup_seconds: float, ready: Callable[[], None]
) -> Measured:
    sender = target.sender()
    try:
        await sender.open(pace.clients)
        if warmup_seconds:
            await run_load(sender, bodies, dataclasses.replace(pace, seconds=warmup_seconds))
        ready()
        return await run_load(sender, bodies, pace)
    except RequestError as error:
        raise LoadError(target.address, str(error)) from None
    finally:
        await sender.close()


class _Child:
    """A process with a share of the load, which ends with the context."""

    def __init__(
        self, target: Target, bodies: Sequence[bytes], pace: Pace, warmup_seconds: float, core: int | None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        job = {
            "target": dataclasses.asdict(target),
            "pace": dataclasses.asdict(pace),
            "warmup_seconds": warmup_seconds,
            "core": core,
            "lengths": [len(body) for body in bodies],
        }
        self._job = json.dumps(job).encode() + b"\n" + b"".join(bodies)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of what a process that has ended did not read
                    pipe.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        """Hand over the share, and wait until the process is warm."""
        self._write(self._job)
        self._answer()

    def begin(self) -> None:
        """Let the process begin."""
        self._write(b"\n")

    def measured(self) -> Measured:
        """Wait for what the process has measured."""
        answer = self._answer()
        assert self._process.stdout is not None
        measured = Measured(
            errors=Counter(answer["errors"]), seconds=answer["seconds"], cpu_seconds=answer["cpu_seconds"]
        )
        for name in ("latencies", "ends", "lateness"):
            getattr(measured, name).frombytes(self._process.stdout.read(8 * answer[name]))
        return measured

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LoadError("load", "a process ended early, expected it to take its share") from None

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoadError("load", "a process ended without an answer")
        answer = json.loads(line)
        if "failed" in answer:
            raise LoadError(*answer["failed"])
        return answer


def _stay_on(core: int | None) -> None:
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
    except (OSError, OverflowError):
        raise LoadError("cores", f"got {core}, expected cores on which this process may run") from None


def _work(job_file: IO[bytes], answers: IO[bytes]) -> None:
    job = json.loads(job_file.readline())
    bodies = [job_file.read(length) for length in job["lengths"]]

    def answer(data: Mapping[str, Any]) -> None:
        answers.write(json.dumps(data).encode() + b"\n")
        answers.flush()

    def ready() -> None:
        answer({"ready": True})
        job_file.readline()

    target, pace = Target(**job["target"]), Pace(**job["pace"])
    try:
        _stay_on(job["core"])
        measured = asyncio.run(_measure_here(target, bodies, pace, job["warmup_seconds"], ready))
    except LoadError as error:
        answer({"failed": [error.where, error.problem]})
        return
    arrays = {"latencies": measured.latencies, "ends": measured.ends, "lateness": measured.lateness}
    answer(
        {
            "errors": measured.errors,
            "seconds": measured.seconds,
            "cpu_seconds": measured.cpu_seconds,
            **{name: len(values) for name, values in arrays.items()},
        }
    )
    for values in arrays.values():
        answers.write(values.tobytes())
    answers.flush()


if __name__ == "__main__":
    _work(sys.stdin.buffer, sys.stdout.buffer)
