# SPDX-License-Identifier: Apache-2.0
"""A server at 80 % of its peak while versions change and deltas come: no request fails, and no answer is mixed."""

import faulthandler
import http.client
import itertools
import math
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from terarec.apps.promotion import promote
from terarec.checkpoint.directory import complete_checkpoints, step_of
from terarec.serve import InferenceSession, RunningServer, serve
from terarec.serve.json_codec import decode_infer_response, encode
from terarec.serve.repository import ModelRepository, RepositoryModel
from terarec.spec import DLRMSpec, DynamicTablesSpec, RunSpec, ServingSpec, TrainingSpec
from terarec.spec.serving_options import BatchingSpec
from terarec.spec.serving_repository import PromotionSpec, RepositorySpec
from terarec.train.run import build
from tests.serve.conftest import TrainedRun
from tests.serve.test_watching import request_of
from tests.waiting import PATIENCE

CLIENTS = 4
RECORDS = 64  # in the split, of which each request has a few
SIZES = (1, 2, 8)


def followed_run(trained: TrainedRun, path: Path, deltas: int) -> Path:
    """A run with a base at step 1 and as many deltas."""
    spec = RunSpec(
        data=str(trained.data),
        model=DLRMSpec(width=4, bottom=(8, 4), top=(8,), tables=DynamicTablesSpec()),
        training=TrainingSpec(
            batch_size=128,
            max_steps=deltas + 1,
            reader_threads=1,
            checkpoint_every=10_000,
            delta_every=1,
            keep_checkpoints=10_000,
            eval_every=10_000,
        ),
    )
    build(spec, path).fit()
    return path


def expected_scores(trained: TrainedRun, runs: dict[str, Path]) -> dict[tuple[str, int], npt.NDArray[np.float32]]:
    """The scores of the records by version and step."""
    records = trained.records(0, RECORDS + max(SIZES))
    steps = {
        version: [step_of(path) for path in complete_checkpoints(run / "checkpoints")] for version, run in runs.items()
    }
    return {
        (version, step): InferenceSession.open(run, step).predict(records)
        for version, run in runs.items()
        for step in steps[version]
    }


@dataclass
class Answers:
    """Number of right answers by version and step, and what went wrong. Threads add to it."""

    right: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[object] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Clients:
    """Threads that send requests, each at its own rate or as fast as answers come."""

    def __init__(
        self, server: RunningServer, trained: TrainedRun, expected: dict[tuple[str, int], npt.NDArray[np.float32]]
    ) -> None:
        self._server = server
        self._expected = expected
        self._bodies = {
            (start, size): encode(request_of(trained, start, start + size, user=f"u{start}"))
            for start in range(RECORDS)
            for size in SIZES
        }

    def run(self, seconds: float, rate: float, answers: Answers, meanwhile: Callable[[], object]) -> float:
        """Send requests for some seconds; return the answers a second.

        Args:
            seconds: Seconds until the last request is sent.
            rate: Requests a second of all clients; infinite for as many as are answered.
            answers: Takes the answers.
            meanwhile: Called in this thread while requests are sent.
        """
        begun, before = time.monotonic(), answers.right.total()
        threads = [
            threading.Thread(target=self._send, args=(begun, begun + seconds, CLIENTS / rate, number, answers))
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        try:
            meanwhile()
        finally:
            for thread in threads:
                thread.join()
        return (answers.right.total() - before) / (time.monotonic() - begun)

    def _send(self, begun: float, end: float, pause: float, number: int, answers: Answers) -> None:
        chosen = random.Random(number)
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=PATIENCE)
        try:
            for count in itertools.count():
                # By the clock: a late answer does not put off the requests after it.
                at = begun + count * pause
                if max(at, time.monotonic()) >= end:
                    return
                time.sleep(max(0.0, at - time.monotonic()))
                start, size = chosen.randrange(RECORDS), chosen.choice(SIZES)
                head = {"Content-Type": "application/json"}
                connection.request("POST", "/v2/models/shop/infer", self._bodies[start, size], head)
                response = connection.getresponse()
                body = response.read()
                if response.status != 200:
                    answers.wrong.append((response.status, body))
                    continue
                answer = decode_infer_response(body)
                state = answer.model_version, int(answer.parameters["step"])
                scores = np.asarray(answer.outputs[0].data, dtype=np.float32).reshape(-1, 1)
                if not np.allclose(scores, self._expected[state][start : start + size], atol=1e-5):
                    answers.wrong.append((state, scores))
                with answers.lock:
                    answers.right[state] += 1
        except Exception as error:
            answers.wrong.append(error)
        finally:
            connection.close()


def changes_of(shop: RepositoryModel) -> list[Callable[[], object]]:
    """Changes from version 1 with version 3 as its shadow back to version 1."""
    everything = PromotionSpec()
    return [
        lambda: shop.promote(3, everything),
        lambda: shop.promote(2, PromotionSpec(share=0.5, by="user")),
        lambda: shop.promote(2, everything),
        lambda: shop.promote(1, PromotionSpec(shadow=0.5)),
        shop.roll_back,  # ends the shadow
        shop.roll_back,  # to version 3
        lambda: shop.promote(1, everything),
    ]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(("seconds", "delay"), [(30.0, 0.06), pytest.param(1800.0, 0.0, marks=pytest.mark.slow)])
def test_a_server_at_80_percent_of_its_peak_fails_nothing_while_it_changes(
    repository: Path, trained: TrainedRun, other_run: Path, tmp_path: Path, seconds: float, delay: float
) -> None:
    """In the short form requests wait for others, which bounds the peak: the cores are left to other tests."""
    # A test of half an hour is not one that hangs.
    faulthandler.dump_traceback_later(600 + 3 * seconds, exit=True, file=sys.__stderr__)
    every = max(1.0, min(60.0, seconds / 8))  # between two changes of versions
    delta_every = max(0.5, min(10.0, seconds / 12))
    deltas = math.ceil(seconds / delta_every)
    source = followed_run(trained, tmp_path / "source", deltas)
    steps = [step_of(path) for path in complete_checkpoints(source / "checkpoints")]
    live = tmp_path / "live"
    shutil.copytree(source, live, ignore=shutil.ignore_patterns("step-*"))

    def add(step: int) -> None:
        name = f"step-{step:08d}"
        shutil.copytree(source / "checkpoints" / name, live / "checkpoints" / f"{name}.partial-1")
        (live / "checkpoints" / f"{name}.partial-1").rename(live / "checkpoints" / name)

    add(steps[0])
    promote(live, repository, "shop", PromotionSpec(shadow=0.1, follow=True))
    shop = ModelRepository(repository).known("shop")
    expected = expected_scores(trained, {"1": trained.path, "2": other_run, "3": source})
    found: list[RunningServer] = []
    is_ready = threading.Event()

    def ready(running: RunningServer) -> None:
        found.append(running)
        is_ready.set()

    spec = RepositorySpec(path=str(repository), poll_seconds=0.2, follow_runs=True)
    serving = ServingSpec(port=0, batching=BatchingSpec(max_queue_delay_microseconds=round(delay * 1e6)))
    thread = threading.Thread(target=serve, args=(spec, serving, ready))
    thread.start()
    answers, memory = Answers(), list[int]()
    try:
        assert is_ready.wait(PATIENCE)
        clients = Clients(found[0], trained, expected)
        peak = clients.run(min(5.0, seconds / 5), math.inf, answers, lambda: None)

        def meanwhile() -> None:
            begun = time.monotonic()
            changes, later = itertools.cycle(changes_of(shop)), iter(steps[1:])
            next_change, next_delta = begun + every, begun + delta_every
            while (now := time.monotonic()) < begun + seconds:
                if now >= next_change:
                    next(changes)()
                    next_change += every
                if now >= next_delta:
                    step = next(later, None)
                    if step is not None:
                        add(step)
                    next_delta += delta_every
                    memory.append(resident_bytes())
                time.sleep(0.05)

        clients.run(seconds, 0.8 * peak, answers, meanwhile)
    finally:
        for running in found:
            running.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert answers.wrong == []
    assert {version for version, _ in answers.right} == {"1", "2", "3"}
    assert len([step for version, step in answers.right if version == "3"]) > 1
    if seconds >= 600:  # what is loaded first, and again, has then been loaded several times
        later = memory[len(memory) // 4 :]
        assert max(later[-len(later) // 4 :]) <= 1.02 * max(later[: len(later) // 4])
