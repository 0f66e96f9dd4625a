# SPDX-License-Identifier: Apache-2.0
"""Any mix of requests: each gets exactly its own scores or its own error, none is lost, and the queue stays bounded."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.serve.batcher import Batcher, ScoredBatch
from terarec.serve.columns import RecordColumns
from terarec.serve.protocol import DeadlineError, ServerBusyError
from terarec.serve.session import Scored
from terarec.serve.statistics import StageTimes, StatisticsCounter
from terarec.spec import BatchingSpec
from tests.waiting import PATIENCE


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        size: Number of records.
        priority: Its level.
        timeout_seconds: Time that it may wait.
        is_bad: Whether it cannot be scored.
        is_cancelled: Whether its client leaves.
        pause: Whether others have the time to come before the next one.
    """

    size: int
    priority: int
    timeout_seconds: float | None
    is_bad: bool
    is_cancelled: bool
    pause: bool


asked = st.builds(
    Asked,
    size=st.integers(0, 5),
    priority=st.integers(0, 4),
    timeout_seconds=st.sampled_from([None, None, 1e-6, 1e-3, 60.0]),
    is_bad=st.sampled_from([False, False, False, True]),
    is_cancelled=st.sampled_from([False, False, False, True]),
    pause=st.sampled_from([False, False, False, True]),
)
specs = st.builds(
    BatchingSpec,
    max_batch_size=st.integers(4, 9),
    preferred_batch_sizes=st.sets(st.integers(1, 4)).map(tuple),
    max_queue_delay_microseconds=st.sampled_from([0, 500, 2000]),
    target_p99_seconds=st.sampled_from([0.0, 0.0, 0.001]),
    priority_levels=st.just(3),
    default_priority_level=st.integers(1, 3),
    max_queue_size=st.integers(1, 12),
)


@given(spec=specs, clients=st.lists(st.lists(asked, max_size=12), min_size=1, max_size=3), has_one_core=st.booleans())
@settings(max_examples=40, deadline=None)
def test_each_request_gets_its_own_scores_or_its_own_error(
    spec: BatchingSpec, clients: list[list[Asked]], has_one_core: bool
) -> None:
    counter = StatisticsCounter()
    batches: list[int] = []

    def score(requests: Sequence[RecordColumns]) -> ScoredBatch:
        # The queue is read while clients add to it.
        assert batcher.num_waiting <= spec.max_queue_size
        batches.append(sum(request.num_records for request in requests))
        if len(requests) > 1:
            assert batches[-1] <= spec.max_batch_size
        outcomes: list[Scored | Exception] = []
        for request in requests:
            values = np.array(request.columns["x"], dtype=np.float32)
            is_bad = bool(request.columns["bad"])
            outcomes.append(ConfigError("x", str(request.columns["id"])) if is_bad else Scored(values[:, None], 1))
        return ScoredBatch(outcomes, StageTimes())

    batcher = Batcher(score, spec, name="m", statistics=counter, has_one_core=has_one_core)
    futures: dict[tuple[int, int], Future[list[float]] | None] = {}

    def ask(client: int) -> None:
        for number, one in enumerate(clients[client]):
            values = [client * 1000.0 + number * 10 + place for place in range(one.size)]
            columns = {"x": values, "bad": [1] if one.is_bad else [], "id": [client, number]}
            try:
                future = batcher.submit(
                    RecordColumns(columns, one.size),
                    lambda part: [float(value) for value in part.scores[:, 0]],
                    priority=one.priority,
                    timeout_seconds=one.timeout_seconds,
                )
            except ServerBusyError:
                futures[client, number] = None
                continue
            futures[client, number] = future
            if one.is_cancelled:
                future.cancel()
            if one.pause:
                time.sleep(0.001)

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    batcher.close()

    ended = dict.fromkeys(("scored", "rejected", "expired", "cancelled", "error"), 0)
    errors: list[tuple[str, str]] = []
    for client, requests in enumerate(clients):
        for number, one in enumerate(requests):
            future = futures[client, number]
            if future is None:
                ended["rejected"] += 1
                continue
            assert future.done()
            try:
                values = future.result(timeout=0)
            except ConfigError as error:
                errors.append((error.problem, str([client, number])))
                assert one.is_bad
                ended["error"] += 1
            except DeadlineError:
                assert one.timeout_seconds is not None
                ended["expired"] += 1
            except CancelledError:
                assert one.is_cancelled
                ended["cancelled"] += 1
            else:
                assert not one.is_bad
                assert values == [client * 1000.0 + number * 10 + place for place in range(one.size)]
                ended["scored"] += 1
    assert all(found == own for found, own in errors)
    counted = counter.read()
    assert {reason: count for reason, count in ended.items() if count and reason != "scored"} == counted.failed
    assert counted.succeeded == ended["scored"]
    assert batcher.num_waiting == 0
