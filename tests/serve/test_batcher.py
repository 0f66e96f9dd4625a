# SPDX-License-Identifier: Apache-2.0
"""`Batcher`: what is joined, in which order, and what becomes of requests that are refused, late or cancelled."""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace

import numpy as np
import pytest

from terarec.errors import ConfigError
from terarec.serve import batcher as batcher_module
from terarec.serve.batcher import Batcher, ScoredBatch, ScoredPart
from terarec.serve.columns import RecordColumns
from terarec.serve.protocol import DeadlineError, ServerBusyError
from terarec.serve.session import Scored
from terarec.serve.statistics import StageTimes, StatisticsCounter
from terarec.spec import BatchingSpec
from tests.errors import at
from tests.waiting import PATIENCE, wait_for

FOREVER = 60_000_000  # microseconds


class Scorer:
    """Scores each value as itself; a value below zero is an error. Waits while it is held up."""

    def __init__(self) -> None:
        self.batches: list[list[list[float]]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_scoring = threading.Event()

    def __call__(self, requests: Sequence[RecordColumns]) -> ScoredBatch:
        self.is_scoring.set()
        assert self.may_go_on.wait(timeout=PATIENCE)
        self.batches.append([list(request.columns["x"]) for request in requests])
        outcomes: list[Scored | Exception] = []
        for request in requests:
            values = np.array(request.columns["x"], dtype=np.float32)
            is_bad = bool((values < 0).any())
            outcomes.append(ConfigError("column 'x'", "negative") if is_bad else Scored(values[:, None], 7))
        return ScoredBatch(outcomes, StageTimes(compute_input=1, compute_infer=2))


def records(*values: float) -> RecordColumns:
    return RecordColumns({"x": list(values)}, len(values))


def part_of(part: ScoredPart) -> ScoredPart:
    return part


def values_of(future: Future[ScoredPart]) -> list[float]:
    found: list[float] = future.result(timeout=PATIENCE).scores[:, 0].tolist()
    return found


Start = Callable[..., Batcher]


@pytest.fixture
def scorer() -> Scorer:
    return Scorer()


@pytest.fixture
def start(scorer: Scorer) -> Iterator[Start]:
    """Starts batchers, which end with the test."""
    started: list[Batcher] = []

    def make(*, statistics: StatisticsCounter | None = None, has_one_core: bool = False, **fields: object) -> Batcher:
        spec = BatchingSpec(**fields)  # type: ignore[arg-type]
        started.append(Batcher(scorer, spec, name="m", statistics=statistics, has_one_core=has_one_core))
        return started[-1]

    yield make
    scorer.may_go_on.set()
    for batcher in started:
        batcher.close()


def held_up(scorer: Scorer, batcher: Batcher, value: float = 0.0) -> Future[ScoredPart]:
    """Let the batcher score a request of one record, and hold it up in that."""
    scorer.may_go_on.clear()
    scorer.is_scoring.clear()
    future = batcher.submit(records(value), part_of)
    assert scorer.is_scoring.wait(timeout=PATIENCE)
    return future


def test_requests_that_arrive_during_a_batch_are_joined(scorer: Scorer, start: Start) -> None:
    batcher = start(max_batch_size=4)
    first = held_up(scorer, batcher)
    others = [batcher.submit(records(*range(size)), part_of) for size in (1, 2, 2, 9, 1)]
    scorer.may_go_on.set()
    assert values_of(first) == [0]
    assert [values_of(future) for future in others] == [[0], [0, 1], [0, 1], [*range(9)], [0]]
    # Whole requests up to the largest batch; one that is larger is a batch of its own.
    assert [[len(request) for request in batch] for batch in scorer.batches] == [[1], [1, 2], [2], [9], [1]]


def test_an_idle_model_scores_at_once(scorer: Scorer, start: Start) -> None:
    batcher = start()
    assert values_of(batcher.submit(records(1), part_of)) == [1]
    assert values_of(batcher.submit(records(), part_of)) == []


def test_a_request_waits_for_a_full_batch(scorer: Scorer, start: Start) -> None:
    batcher = start(max_batch_size=3, max_queue_delay_microseconds=FOREVER)
    futures = [batcher.submit(records(value), part_of) for value in range(3)]
    assert [values_of(future) for future in futures] == [[0], [1], [2]]
    assert scorer.batches == [[[0], [1], [2]]]


def test_a_request_waits_no_longer_than_the_delay(scorer: Scorer, start: Start) -> None:
    batcher = start(max_batch_size=3, max_queue_delay_microseconds=1000)
    part = batcher.submit(records(1), part_of).result(timeout=PATIENCE)
    assert part.times.queue >= 1_000_000
    assert part.times[1:] == (1, 2, 0)
    assert part.step == 7


def test_a_preferred_size_ends_the_waiting(scorer: Scorer, start: Start) -> None:
    batcher = start(max_batch_size=8, preferred_batch_sizes=(2, 4), max_queue_delay_microseconds=FOREVER)
    first = [batcher.submit(records(0), part_of) for _ in range(2)]
    assert [values_of(future) for future in first] == [[0], [0]]
    assert [len(batch) for batch in scorer.batches] == [2]


def test_the_largest_preferred_size_is_taken(scorer: Scorer, start: Start) -> None:
    batcher = start(max_batch_size=8, preferred_batch_sizes=(1, 2, 4), max_queue_delay_microseconds=FOREVER)
    first = held_up(scorer, batcher)
    others = [batcher.submit(records(0), part_of) for _ in range(7)]
    scorer.may_go_on.set()
    assert len([values_of(future) for future in (first, *others)]) == 8
    assert [len(batch) for batch in scorer.batches] == [1, 4, 2, 1]


def test_a_short_timeout_does_not_expire_by_waiting_for_others(scorer: Scorer, start: Start) -> None:
    batcher = start(max_queue_delay_microseconds=FOREVER)
    patient = batcher.submit(records(1), part_of)
    hurried = batcher.submit(records(2), part_of, timeout_seconds=1.0)
    assert values_of(hurried) == [2]
    assert values_of(patient) == [1]  # with it


def test_levels_come_in_their_order(scorer: Scorer, start: Start) -> None:
    batcher = start(max_batch_size=2, priority_levels=3, default_priority_level=2)
    futures = [held_up(scorer, batcher)]
    for value, priority in enumerate((3, 0, 1, 2, 99, 1, -1)):
        futures.append(batcher.submit(records(value), part_of, priority=priority))
    scorer.may_go_on.set()
    for future in futures:
        future.result(timeout=PATIENCE)
    # As Triton does, a level that there is not means the default one.
    assert scorer.batches[1:] == [[[2], [5]], [[1], [3]], [[4], [6]], [[0]]]


def test_a_late_request_is_dropped(scorer: Scorer, start: Start) -> None:
    counter = StatisticsCounter()
    batcher = start(default_timeout_seconds=1e-6, statistics=counter)
    late = batcher.submit(records(1), part_of)
    with pytest.raises(DeadlineError, check=at("model 'm'")):
        late.result(timeout=PATIENCE)
    assert scorer.batches == []
    assert counter.read().failed == {"expired": 1}


def test_a_cancelled_request_is_dropped(scorer: Scorer, start: Start) -> None:
    counter = StatisticsCounter()
    batcher = start(statistics=counter)
    first = held_up(scorer, batcher)
    gone, kept = batcher.submit(records(1), part_of), batcher.submit(records(2), part_of)
    assert not first.cancel()  # it is being scored
    assert gone.cancel()
    scorer.may_go_on.set()
    assert values_of(kept) == [2]
    assert scorer.batches == [[[0]], [[2]]]
    with pytest.raises(CancelledError):
        gone.result(timeout=PATIENCE)
    assert counter.read().failed == {"cancelled": 1}


def test_a_cancelled_request_holds_no_memory(scorer: Scorer, start: Start) -> None:
    counter = StatisticsCounter()
    batcher = start(statistics=counter, priority_levels=2, default_priority_level=1)
    held_up(scorer, batcher)
    values = np.arange(3.0)
    kept = batcher.submit(records(1), part_of)
    gone = batcher.submit(RecordColumns({"x": values}, 3), part_of, priority=2)
    memory = weakref.ref(values)
    del values
    assert gone.cancel()
    assert gone.cancel()
    assert (memory(), batcher.num_waiting, counter.read().failed) == (None, 1, {"cancelled": 1})
    scorer.may_go_on.set()
    assert values_of(kept) == [1]


def test_a_full_queue_refuses(scorer: Scorer, start: Start) -> None:
    counter = StatisticsCounter()
    batcher = start(max_queue_size=2, statistics=counter)
    held_up(scorer, batcher)
    waiting = [batcher.submit(records(value), part_of) for value in (1, 2)]
    with pytest.raises(ServerBusyError, check=at("model 'm'", "2 requests wait")):
        batcher.submit(records(3), part_of)
    assert counter.read().failed == {"rejected": 1}
    scorer.may_go_on.set()
    assert [values_of(future) for future in waiting] == [[1], [2]]


def test_a_request_to_a_batcher_that_was_closed_is_its_successor_s(scorer: Scorer, start: Start) -> None:
    """It was counted as rejected here, and as answered there."""
    counter = StatisticsCounter()
    batcher = start(statistics=counter)
    batcher.close()
    with pytest.raises(ServerBusyError, check=at("model 'm'", "is being unloaded")):
        batcher.submit(records(1), part_of)
    assert counter.read().failed == {}


def test_a_cancelled_request_gives_up_its_place(scorer: Scorer, start: Start) -> None:
    batcher = start(max_queue_size=2)
    held_up(scorer, batcher)
    gone, kept = (batcher.submit(records(value), part_of) for value in (1, 2))
    gone.cancel()
    other = batcher.submit(records(3), part_of)
    assert batcher.num_waiting == 2
    scorer.may_go_on.set()
    assert [values_of(future) for future in (kept, other)] == [[2], [3]]


def test_an_error_ends_its_own_request(scorer: Scorer, start: Start) -> None:
    counter = StatisticsCounter()
    batcher = start(statistics=counter)
    first = held_up(scorer, batcher)
    bad, good = batcher.submit(records(-1), part_of), batcher.submit(records(2), part_of)
    scorer.may_go_on.set()
    with pytest.raises(ConfigError, check=at("column 'x'")):
        bad.result(timeout=PATIENCE)
    assert values_of(good) == [2]
    assert values_of(first) == [0]
    batcher.close()
    found = counter.read()
    assert (found.succeeded, found.records, found.failed) == (2, 2, {"error": 1})
    assert {size: count.count for size, count in found.batches.items()} == {1: 2}


def test_who_has_an_answer_finds_it_counted(scorer: Scorer, start: Start) -> None:
    counter = StatisticsCounter()
    batcher = start(statistics=counter)
    first = held_up(scorer, batcher)
    found: list[tuple[int, int]] = []
    for value in (-1, 2, 3):
        future = batcher.submit(records(value), part_of)
        future.add_done_callback(lambda _: found.append((counter.read().succeeded, counter.read().failed["error"])))
    scorer.may_go_on.set()
    assert values_of(first) == [0]
    batcher.close()
    assert found == [(3, 1)] * 3


def test_an_exception_of_the_model_ends_its_batch_alone(start: Start, scorer: Scorer) -> None:
    def score(requests: Sequence[RecordColumns]) -> ScoredBatch:
        if requests[0].num_records == 1:
            raise RuntimeError("broken")
        return scorer(requests)

    batcher = Batcher(score, BatchingSpec(), name="m")
    with pytest.raises(RuntimeError, match="broken"):
        batcher.submit(records(1), part_of).result(timeout=PATIENCE)
    assert values_of(batcher.submit(records(1, 2), part_of)) == [1, 2]
    batcher.close()


def test_a_batch_that_cannot_be_answered_is_not_the_last_one(scorer: Scorer, caplog: pytest.LogCaptureFixture) -> None:
    def score(requests: Sequence[RecordColumns]) -> ScoredBatch:
        scored = scorer(requests)
        return scored._replace(outcomes=[]) if requests[0].num_records == 1 else scored

    batcher = Batcher(score, BatchingSpec(), name="m")
    with pytest.raises(ValueError, match="zip"):
        batcher.submit(records(1), part_of).result(timeout=PATIENCE)
    assert values_of(batcher.submit(records(1, 2), part_of)) == [1, 2]
    assert "model 'm': a batch could not be answered" in caplog.text
    batcher.close()


def test_an_answer_that_fails_is_its_requests_error(start: Start) -> None:
    def refuse(_: ScoredPart) -> float:
        raise ValueError("no number")

    batcher = start()
    with pytest.raises(ValueError, match="no number"):
        batcher.submit(records(1), refuse).result(timeout=PATIENCE)
    assert values_of(batcher.submit(records(1), part_of)) == [1]


def test_a_closed_batcher_answers_what_waits(scorer: Scorer, start: Start) -> None:
    batcher = start(max_queue_delay_microseconds=FOREVER)
    waiting = batcher.submit(records(1), part_of)
    batcher.close()
    assert waiting.done()
    assert values_of(waiting) == [1]
    with pytest.raises(ServerBusyError, check=at("model 'm'")):
        batcher.submit(records(1), part_of)


def test_an_answer_may_close_the_batcher(start: Start) -> None:
    batcher = start()
    future = batcher.submit(records(1), part_of)
    is_closed = threading.Event()
    other = batcher.submit(records(2), part_of)

    def close(_: Future[ScoredPart]) -> None:
        batcher.close()
        is_closed.set()

    other.add_done_callback(close)
    assert is_closed.wait(timeout=PATIENCE)
    assert values_of(future) == [1]


def clock(sleep: Callable[[float], None], others_ns: Callable[[], int]) -> SimpleNamespace:
    """Return a module `time`, each question to which takes 0.1 ms."""
    times = itertools.count(time.monotonic_ns(), 100_000)
    return SimpleNamespace(
        sleep=sleep, monotonic_ns=lambda: next(times), process_time_ns=others_ns, thread_time_ns=lambda: 0
    )


@pytest.mark.parametrize("has_one_core", [True, False])
def test_on_one_core_requests_that_have_arrived_are_read_before_the_next_batch(
    scorer: Scorer, start: Start, monkeypatch: pytest.MonkeyPatch, has_one_core: bool
) -> None:
    batcher = start(has_one_core=has_one_core)
    first = held_up(scorer, batcher)
    others = [batcher.submit(records(value), part_of) for value in (1, 2)]
    # In some looks the threads that read requests compute, and bring none.
    arriving = [None, 3.0, None, None, 4.0, 5.0]
    others_ns = 0

    def sleep(_: float) -> None:
        nonlocal others_ns
        if arriving:
            others_ns += 50_000
            value = arriving.pop(0)
            if value is not None:
                others.append(batcher.submit(records(value), part_of))

    monkeypatch.setattr(batcher_module, "time", clock(sleep, lambda: others_ns))
    waiting = (first, *others)
    scorer.may_go_on.set()
    assert [values_of(future) for future in waiting] == [[0], [1], [2]]
    if has_one_core:
        wait_for(lambda: not arriving)
        assert [values_of(future) for future in others[2:]] == [[3], [4], [5]]
    assert scorer.batches == [[[0]], [[1], [2]], *([[[3], [4], [5]]] if has_one_core else [])]


def test_threads_that_compute_for_themselves_hold_a_batch_up_for_a_while(
    scorer: Scorer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = start(has_one_core=True)
    first = held_up(scorer, batcher)
    others = [batcher.submit(records(value), part_of) for value in (1, 2)]
    num_looks = 0

    def sleep(_: float) -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            others.append(batcher.submit(records(3), part_of))

    monkeypatch.setattr(batcher_module, "time", clock(sleep, lambda: num_looks * 100_000))
    waiting = (first, *others)
    scorer.may_go_on.set()
    assert [values_of(future) for future in waiting] == [[0], [1], [2]]
    wait_for(lambda: len(others) == 3)
    assert values_of(others[2]) == [3]
    assert 1 < num_looks < 100


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": 4, "preferred_batch_sizes": (8,)}, "preferred_batch_sizes"),
        ({"preferred_batch_sizes": ("4",)}, "preferred_batch_sizes"),
        ({"max_queue_delay_microseconds": -1}, "max_queue_delay_microseconds"),
        ({"max_queue_delay_microseconds": 10**9}, "max_queue_delay_microseconds"),
        ({"priority_levels": 2}, "default_priority_level"),
        ({"priority_levels": 2, "default_priority_level": 3}, "default_priority_level"),
        ({"default_priority_level": 1}, "default_priority_level"),
        ({"default_timeout_seconds": -1.0}, "default_timeout_seconds"),
        ({"max_queue_size": 0}, "max_queue_size"),
    ],
)
def test_a_bad_option_is_named(fields: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError, check=at(f"BatchingSpec.{where}")):
        BatchingSpec(**fields)  # type: ignore[arg-type]
