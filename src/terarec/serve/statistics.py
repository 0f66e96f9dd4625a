# SPDX-License-Identifier: Apache-2.0
"""Counters and durations of one version of a model, by stage: what Triton's statistics and the metrics derive from."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
"""Upper bounds of the classes in which differences of scores are counted; a last class has what is above."""

DURATION_BOUNDS_NS = (
    *(digits * 10**power for power in range(4, 9) for digits in (5, 10, 25)),
    5_000_000_000,
    10_000_000_000,
)
"""Upper bounds of the ranges in which durations are counted, 50 us to 10 s; longer ones are in a last range."""


class StageTimes(NamedTuple):
    """Nanoseconds that requests spent in each stage.

    Attributes:
        queue: Waiting for a batch.
        compute_input: Encoding raw columns by the workflow.
        compute_infer: Looking up rows and scoring.
        compute_output: Handing each request its scores.
    """

    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0

    def plus(self, other: StageTimes) -> StageTimes:
        """Return the sums of both."""
        return StageTimes(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCount:
    """Batches of one size.

    Attributes:
        count: Number of batches.
        times: Sums of their durations; `queue` is 0, as it is known of requests alone.
    """

    count: int = 0
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStatistics:
    """Counters of one version of a model since it was loaded.

    Attributes:
        succeeded: Requests that were answered with scores.
        success_ns: Nanoseconds from their arrival to their answer.
        failed: Requests that ended otherwise, by reason: "rejected" at once, "expired" while they waited, "cancelled"
            by the client, or an "error" of the workflow or the model.
        fail_ns: Nanoseconds from the arrival of failed requests to their end.
        times: Durations of the requests that succeeded, by stage. Each request of a batch counts the time of the batch.
        records: Records that were scored.
        batches: Records of a batch -> such batches.
        durations: For each stage of `StageTimes`, and "request" from arrival to answer: the requests that succeeded
            whose duration is within each of `DURATION_BOUNDS_NS` and above the bound before, and a last number for
            those beyond all bounds. Their sums are `times` and `success_ns`.
        last_inference_ms: Time of the last batch, in milliseconds since 1970; 0 before the first one.
    """

    succeeded: int = 0
    success_ns: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    fail_ns: int = 0
    times: StageTimes = field(default_factory=StageTimes)
    records: int = 0
    batches: Mapping[int, BatchCount] = field(default_factory=dict)
    durations: Mapping[str, Sequence[int]] = field(default_factory=dict)
    last_inference_ms: int = 0

    def plus(self, other: ModelStatistics) -> ModelStatistics:
        """Return the sums of both."""
        failed = dict(self.failed)
        for reason, count in other.failed.items():
            failed[reason] = failed.get(reason, 0) + count
        batches = dict(self.batches)
        for size, batch in other.batches.items():
            mine = batches.get(size, BatchCount())
            batches[size] = BatchCount(count=mine.count + batch.count, times=mine.times.plus(batch.times))
        durations = {stage: tuple(counts) for stage, counts in self.durations.items()}
        for stage, counts in other.durations.items():
            former = durations.get(stage, (0,) * len(counts))
            durations[stage] = tuple(a + b for a, b in zip(former, counts, strict=True))
        return ModelStatistics(
            succeeded=self.succeeded + other.succeeded,
            success_ns=self.success_ns + other.success_ns,
            failed=failed,
            fail_ns=self.fail_ns + other.fail_ns,
            times=self.times.plus(other.times),
            records=self.records + other.records,
            batches=dict(sorted(batches.items())),
            durations=durations,
            last_inference_ms=max(self.last_inference_ms, other.last_inference_ms),
        )

    def without_batches(self) -> ModelStatistics:
        """Return all but the counters by size of batch."""
        return dataclasses.replace(self, batches={})

    def to_json(self) -> bytes:
        """Return the counters for `of_json`."""
        batches = [[size, batch.count, *batch.times] for size, batch in self.batches.items()]
        return json.dumps({**dataclasses.asdict(self), "batches": batches}).encode()

    @classmethod
    def of_json(cls, text: bytes) -> ModelStatistics:
        """Return the counters that another process of this server has written with `to_json`."""
        data = json.loads(text)
        batches = {
            size: BatchCount(count=count, times=StageTimes(*times)) for size, count, *times in data.pop("batches")
        }
        return cls(**{**data, "times": StageTimes(*data["times"]), "batches": batches})


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowStatistics:
    """Counters of a version that scores requests without answering.

    Attributes:
        version: The version; "" for none.
        requests: Requests that it scored.
        records: Records of these.
        sum_difference: Sum of the absolute differences of its scores from those of the answers.
        max_difference: Largest of these.
        differences: Number of scores by difference, in the classes of `DIFFERENCES`.
        dropped: Requests that it was to score and did not, since too many waited.
        failed: Requests that it could not score.
    """

    version: str = ""
    requests: int = 0
    records: int = 0
    sum_difference: float = 0.0
    max_difference: float = 0.0
    differences: tuple[int, ...] = (0,) * (len(DIFFERENCES) + 1)
    dropped: int = 0
    failed: int = 0


class ErrorCounts:
    """Counts the answers of a server that are errors. Thread-safe; `_lock` guards the table."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def add(self, protocol: str, reason: str) -> None:
        """Count an answer over "http" or "grpc", by the kind of the error as `terarec.serve.calls.Call` has it."""
        with self._lock:
            self._counts[protocol, reason] = self._counts.get((protocol, reason), 0) + 1

    def read(self) -> dict[tuple[str, str], int]:
        """Return the numbers by protocol and reason."""
        with self._lock:
            return dict(self._counts)


class StatisticsCounter:
    """Counts for `ModelStatistics`. Thread-safe; `_lock` guards every attribute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._succeeded = 0
        self._success_ns = 0
        self._failed: dict[str, int] = {}
        self._fail_ns = 0
        self._times = [0, 0, 0, 0]
        self._records = 0
        self._batches: dict[int, tuple[int, StageTimes]] = {}
        self._durations = [[0] * (len(DURATION_BOUNDS_NS) + 1) for _ in (*StageTimes._fields, "request")]
        self._last_inference_ms = 0

    def add_batch(self, num_records: int, times: StageTimes, queues: list[int]) -> None:
        """Count a batch that was scored.

        Args:
            num_records: Records of the batch.
            times: Durations of its stages, of which `queue` is 0.
            queues: Nanoseconds that each of its requests had waited.
        """
        requests, queued = len(queues), sum(queues)
        spent = sum(times)
        ranges = [bisect_left(DURATION_BOUNDS_NS, time_ns) for time_ns in times[1:]]
        queue_ranges = [bisect_left(DURATION_BOUNDS_NS, waited) for waited in queues]
        request_ranges = [bisect_left(DURATION_BOUNDS_NS, waited + spent) for waited in queues]
        with self._lock:
            in_queue, *computing, whole = self._durations
            for place, counts in zip(ranges, computing, strict=True):
                counts[place] += requests
            for waited, answered in zip(queue_ranges, request_ranges, strict=True):
                in_queue[waited] += 1
                whole[answered] += 1
            self._succeeded += requests
            self._success_ns += queued + requests * spent
            self._times[0] += queued
            for place in (1, 2, 3):
                self._times[place] += requests * times[place]
            self._records += num_records
            count, former = self._batches.get(num_records, (0, StageTimes()))
            self._batches[num_records] = count + 1, former.plus(times)
            self._last_inference_ms = time.time_ns() // 1_000_000

    def add_failure(self, reason: str, nanoseconds: int = 0) -> None:
        """Count a request that ended without scores; see `ModelStatistics.failed`."""
        with self._lock:
            self._failed[reason] = self._failed.get(reason, 0) + 1
            self._fail_ns += nanoseconds

    def read(self) -> ModelStatistics:
        """Return the counters."""
        with self._lock:
            return ModelStatistics(
                succeeded=self._succeeded,
                success_ns=self._success_ns,
                failed=dict(self._failed),
                fail_ns=self._fail_ns,
                times=StageTimes(*self._times),
                records=self._records,
                batches={
                    size: BatchCount(count=count, times=times) for size, (count, times) in sorted(self._batches.items())
                },
                durations={
                    stage: tuple(counts)
                    for stage, counts in zip((*StageTimes._fields, "request"), self._durations, strict=True)
                },
                last_inference_ms=self._last_inference_ms,
            )


_MOST_FORMER = 64
"""Versions that are no longer served whose counters are kept: a server may be given a new one every minute."""


class ModelCounters:
    """Counters of the versions that a process serves; those of a version that is loaded again go on. Thread-safe.

    `_lock` guards both tables, in which the last ones are at the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, StatisticsCounter] = {}
        self._former: dict[str, StatisticsCounter] = {}

    def counter(self, model: str) -> StatisticsCounter:
        """Return the counter of a version that is served from now on."""
        with self._lock:
            former = self._former.pop(model, None)
            return self._served.setdefault(model, former or StatisticsCounter())

    def release(self, model: str) -> None:
        """Note that a version is served no longer."""
        with self._lock:
            counter = self._served.pop(model, None)
            if counter is not None:
                self._former[model] = counter
            for forgotten in list(self._former)[:-_MOST_FORMER]:
                del self._former[forgotten]

    def others(self, model: str) -> ModelStatistics:
        """Return the counters of a version in other processes."""
        del model
        return ModelStatistics()

    def read(self) -> dict[str, ModelStatistics]:
        """Return the counters of all versions; those that are served are at the end."""
        with self._lock:
            counters = {**self._former, **self._served}
        return {model: counter.read() for model, counter in counters.items()}
