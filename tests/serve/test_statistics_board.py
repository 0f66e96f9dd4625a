# SPDX-License-Identifier: Apache-2.0
"""Counters of one model in several processes: sums, a writer and readers at once, workers that end."""

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from terarec.serve import statistics_board
from terarec.serve.metric_samples import Combination, MetricSamples
from terarec.serve.statistics import BatchCount, ModelCounters, ModelStatistics, StageTimes, StatisticsCounter
from terarec.serve.statistics_board import StatisticsBoard, WorkerStatistics
from terarec.serve.workers import WorkerContext, Workers
from tests.waiting import PATIENCE


def counted(records: int, *, failed: str | None = None) -> StatisticsCounter:
    counter = StatisticsCounter()
    counter.add_batch(records, StageTimes(0, 1, 2, 3), [10, 20])
    if failed is not None:
        counter.add_failure(failed, 5)
    return counter


def test_counters_are_summed() -> None:
    board = StatisticsBoard(3)
    assert board.others(0, "m") == ModelStatistics()
    first, second = counted(4, failed="error").read(), counted(4, failed="expired").read()
    board.write(0, {"m": first})
    board.write(1, {"m": second, "other": first})
    assert board.others(0, "m") == second
    total = board.others(2, "m")
    assert total == first.plus(second)
    assert (total.succeeded, total.records, total.failed) == (4, 8, {"error": 1, "expired": 1})
    assert total.success_ns == 2 * (30 + 2 * 6)
    assert total.times == StageTimes(60, 4, 8, 12)
    assert total.batches == {4: BatchCount(count=2, times=StageTimes(0, 2, 4, 6))}
    board.bury(1)
    third = counted(7).read()
    board.write(1, {"m": third})
    assert board.others(2, "m") == total.plus(third)


def samples(*values: tuple[str, Combination, float]) -> MetricSamples:
    found = MetricSamples()
    for name, how, value in values:
        found.add(name, ("m",), (value,), how)
    return found


def test_other_metrics_become_one_value() -> None:
    board = StatisticsBoard(3)
    first = samples(("errors", "counter", 3), ("waiting", "sum", 2), ("drift", "highest", 0.5), ("up", "lowest", 1))
    second = samples(("errors", "counter", 4), ("waiting", "sum", 1), ("drift", "highest", 0.2), ("up", "lowest", 0))
    second.add("times", (), (1, 0, 2.5), "counter")
    board.write_samples(0, first)
    board.write_samples(1, second)
    assert dict(board.other_samples(0)) == dict(second)
    places = {name: (name, ("m",)) for name in ("errors", "waiting", "drift", "up")}
    both = {places["errors"]: (7,), places["waiting"]: (3,), places["drift"]: (0.5,), places["up"]: (0,)}
    assert dict(board.other_samples(2)) == both | {("times", ()): (1, 0, 2.5)}
    for _ in range(2):  # counters go on, and what only a living worker has does not
        board.bury(1)
        assert dict(board.other_samples(0)) == {places["errors"]: (4,), ("times", ()): (1, 0, 2.5)}
    board.write_samples(1, second)
    second.merge(first)
    assert dict(board.other_samples(2))[places["errors"]] == (11,)
    board.write_samples(0, samples(("x" * 2**22, "sum", 1)))
    assert places["waiting"] in dict(board.other_samples(2))  # those of the other one


@pytest.mark.parametrize("step", range(2))
def test_a_worker_that_is_killed_while_it_writes_leaves_what_it_wrote_before(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counters were lost, and with them the sums of all."""
    board = StatisticsBoard(2)
    first, second = counted(4).read(), counted(9).read()
    board.write(0, {"m": first})
    packing, packed = statistics_board._CHANGES, list[object]()

    def pack_into(*arguments: Any) -> None:
        if len(packed) == step:
            raise InterruptedError
        packed.append(arguments)
        packing.pack_into(*arguments)

    dying = SimpleNamespace(unpack_from=packing.unpack_from, pack_into=pack_into, size=packing.size)
    with monkeypatch.context() as patch:
        patch.setattr(statistics_board, "_CHANGES", dying)
        with pytest.raises(InterruptedError):
            board.write(0, {"m": second})
    assert board.others(1, "m") == first
    board.bury(0)
    assert board.others(1, "m") == first
    board.write(0, {"m": second})
    assert board.others(1, "m") == first.plus(second)


def test_more_sizes_of_batches_than_there_is_room_for() -> None:
    board = StatisticsBoard(1)
    batches = {size: BatchCount(count=10**9, times=StageTimes(0, 10**15, 10**15, 10**15)) for size in range(30_000)}
    board.write(0, {"m": ModelStatistics(records=5, batches=batches)})
    assert board.read(0) == {"m": ModelStatistics(records=5)}


@pytest.mark.slow
def test_more_versions_than_there_is_room_for() -> None:
    """The last ones remain, also of workers that have ended."""
    board = StatisticsBoard(1)
    models = {f"m/{version}": counted(1 + version % 7).read() for version in range(3000)}
    board.write(0, models)
    found = board.read(0)
    assert 100 < len(found) < 3000
    assert list(found)[-1] == "m/2999"
    board.bury(0)
    assert board.others(0, "m/2999") == models["m/2999"].without_batches()


def test_a_reader_sees_whole_counters() -> None:
    board = StatisticsBoard(1)
    is_over = threading.Event()

    def write() -> None:
        count = 0
        while not is_over.is_set():
            count += 1
            counts = ModelStatistics(records=count, succeeded=count, failed={"error" * (count % 50): count})
            board.write(0, {"m": counts})

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(500):
        found = board.read(0).get("m", ModelStatistics())
        assert found.records == found.succeeded == sum(found.failed.values())
    is_over.set()
    thread.join(PATIENCE)


def test_counters_go_on_and_those_of_old_versions_are_forgotten() -> None:
    counters = ModelCounters()
    served = counters.counter("m/1")
    for version in range(2, 80):
        counters.counter(f"m/{version}").add_failure("expired")
        counters.release(f"m/{version}")
    assert set(counters.read()) == {"m/1", *(f"m/{version}" for version in range(16, 80))}
    assert counters.counter("m/79").read().failed == {"expired": 1}
    assert counters.counter("m/2").read().failed == {}
    assert counters.counter("m/1") is served


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_counters_of_a_worker_outlive_it() -> None:
    board = StatisticsBoard(2)

    def work(context: WorkerContext) -> None:
        is_over = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: is_over.set())
        with WorkerStatistics(board, context.index) as writer:
            counter = writer.counter("m")
            counter.add_batch(context.index + 1, StageTimes(0, 1, 2, 3), [10, 20])
            context.started(is_over.set)
            writer.poll()  # so that whoever sees the counters sees a worker that is ready
            while not is_over.wait(0.05):
                pass
            counter.add_failure("cancelled")

    workers = Workers(2, work, board.bury)
    seen: list[int] = []

    def watch() -> None:
        for wanted in (3, 4):
            until = time.monotonic() + PATIENCE
            while board.others(-1, "m").records < wanted and time.monotonic() < until:
                time.sleep(0.02)
            seen.append(board.others(-1, "m").records)
            if wanted == 3:
                os.kill(workers.pids[0], signal.SIGKILL)
        workers.stop()

    watching = threading.Thread(target=watch)
    workers.run(watching.start)
    watching.join(PATIENCE)
    # 1 and 2; then the 1 of the worker that took its place, too.
    assert seen == [3, 4]
    assert board.others(-1, "m").failed == {"cancelled": 2}  # written at the end
