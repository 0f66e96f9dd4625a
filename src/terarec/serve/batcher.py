# SPDX-License-Identifier: Apache-2.0
"""`Batcher`: joins requests that arrive one by one into batches, which a thread scores."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from terarec.serve.columns import RecordColumns
from terarec.serve.protocol import DeadlineError, ServerBusyError
from terarec.serve.request_queue import RequestQueue, Waiting
from terarec.serve.session import Scored
from terarec.serve.statistics import StageTimes, StatisticsCounter
from terarec.spec import BatchingSpec

_LOGGER = logging.getLogger(__name__)

_WINDOW_NS = 200_000_000
_WINDOW_REQUESTS = 100
"""Time and requests after which the pace is set anew: a hundred requests are the fewest that have a 99th percentile."""

_HIGH, _LOW = 0.8, 0.6
"""Shares of the target between which the pace stays; the latencies that are seen here lack what the transport takes."""

_IDLE = 0.3
"""Share of the time in which the model computes, below which waiting would save nothing that somebody needs."""

_LEAST_DELAY_NS = 50_000
"""Shorter waiting is none: waking a thread takes as long."""


class Pacing:
    """The pace of a `Batcher`. Only its thread calls `observe`; other threads may read the attributes.

    With a target, waiting grows while the 99th percentile stays below it and the model is busy, since larger batches
    take less time a record; it is halved when the percentile comes close to the target, or when the model is idle.
    Batches whose computing alone takes up half of the target become smaller.

    Attributes:
        delay_ns: Nanoseconds that a request waits for others.
        max_records: Records of a batch at most.

    Args:
        spec: Batches and limits.
        now_ns: Time of the beginning, by `time.monotonic_ns`.
    """

    def __init__(self, spec: BatchingSpec, now_ns: int) -> None:
        self._spec = spec
        self._target_ns = int(spec.target_p99_seconds * 1e9)
        self.delay_ns = 0 if self._target_ns else spec.max_queue_delay_microseconds * 1000
        self.max_records = spec.max_batch_size
        self._begin(now_ns)

    def _begin(self, now_ns: int) -> None:
        """Begin a window."""
        self._begun_ns = now_ns
        self._latencies: list[int] = []
        self._busy_ns = 0
        self._longest_ns = 0
        self._largest = 0

    def observe(self, latencies_ns: Sequence[int], num_records: int, compute_ns: int, now_ns: int) -> None:
        """Take note of a batch.

        Args:
            latencies_ns: Nanoseconds from the arrival of each request to its answer.
            num_records: Records of the batch.
            compute_ns: Nanoseconds that encoding and scoring it took.
            now_ns: The time.
        """
        if not self._target_ns:
            return
        self._latencies.extend(latencies_ns)
        self._busy_ns += compute_ns
        self._longest_ns = max(self._longest_ns, compute_ns)
        self._largest = max(self._largest, num_records)
        if now_ns - self._begun_ns >= _WINDOW_NS and len(self._latencies) >= _WINDOW_REQUESTS:
            self._adapt(now_ns - self._begun_ns)
            self._begin(now_ns)

    def _adapt(self, window_ns: int) -> None:
        target = self._target_ns
        ordered = sorted(self._latencies)
        percentile = ordered[math.ceil(0.99 * len(ordered)) - 1]
        delay = self.delay_ns
        if percentile > _HIGH * target or self._busy_ns < _IDLE * window_ns:
            delay //= 2
        elif percentile < _LOW * target:
            delay += target // 20
        # A request may arrive while a batch is computed, wait for others then, and is computed with them.
        most = int(_HIGH * target) - 2 * self._longest_ns
        delay = min(delay, most, int(self._spec.max_queue_delay_microseconds * 1000) or most)
        self.delay_ns = delay if delay >= _LEAST_DELAY_NS else 0
        if self._longest_ns > target // 2:
            # Of the batches that were computed, rather than of the limit, which may be far above them.
            self.max_records = max(min(self.max_records, self._largest) * 3 // 4, 1)
        elif self._longest_ns < target // 3 and self.max_records < self._spec.max_batch_size:
            self.max_records = min(self.max_records * 5 // 4 + 1, self._spec.max_batch_size)


Answer = TypeVar("Answer")

_LONGEST_GATHERING_NS = 25_000_000
"""Time after a batch in which requests that have arrived may come to the queue before the next batch is taken; also
twice the time that the batch took, so that what other threads do for themselves does not keep short ones waiting."""

_LOOK_SECONDS = 1e-4
"""Time between two looks whether other threads still compute. Each look interrupts them."""

_IDLE_NS = 10_000
"""Processor time in a look below which other threads wait for clients."""

_PURGE_NS = 10_000_000
"""Time between two searches of a full queue for requests that have ended: a search takes as long as the queue is."""


class ScoredBatch(NamedTuple):
    """Scores of the requests of a batch.

    Attributes:
        outcomes: For each request its scores, or its error.
        times: Durations of the stages, of which `queue` and `compute_output` are 0.
        lookup_ns: Part of `times.compute_infer` in which rows were looked up; 0 where that is not timed.
    """

    outcomes: Sequence[Scored | Exception]
    times: StageTimes
    lookup_ns: int = 0


class ScoredPart(NamedTuple):
    """Scores of one request.

    Attributes:
        scores: float32[B, C].
        step: Training steps of the weights that scored it.
        times: Durations of its stages; those of computing are of its batch, and `compute_output` is 0.
        lookup_ns: As in `ScoredBatch`.
    """

    scores: NDArray[np.float32]
    step: int
    times: StageTimes
    lookup_ns: int = 0


class _Pending(Future[Answer]):
    """An answer to come. `cancel` takes the request out of the queue: what holds its memory goes with its client.

    Who holds the answer does not hold the model: while the request waits, the batcher's thread does.
    """

    batcher: weakref.ref[Batcher]

    @override
    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        batcher = self.batcher() if is_cancelled else None
        if batcher is not None:
            batcher._drop(self)
        return is_cancelled


class Batcher:
    """Joins requests into batches. Thread-safe.

    While a batch is scored, requests gather for the next one. `_lock` guards the queue and `_is_closed`; futures are
    resolved without it, since their callbacks may call this batcher. On one core, scoring keeps other threads from
    bringing requests: those that have arrived come to the queue before the next batch is taken, and with them those of
    clients that have just been answered.

    Args:
        score: Function that scores the requests of a batch; called in the thread of the batcher alone.
        spec: Batches and limits.
        name: Name of the model, for errors and the thread.
        statistics: Counter of the requests; None for one of its own.
        has_one_core: Whether one thread computes.
    """

    def __init__(
        self,
        score: Callable[[Sequence[RecordColumns]], ScoredBatch],
        spec: BatchingSpec,
        *,
        name: str,
        statistics: StatisticsCounter | None = None,
        has_one_core: bool = False,
    ) -> None:
        self._score = score
        self._has_one_core = has_one_core
        self._spec = spec
        self._name = name
        self._statistics = StatisticsCounter() if statistics is None else statistics
        self._queue = RequestQueue(max(spec.priority_levels, 1))
        self._pacing = Pacing(spec, time.monotonic_ns())
        self._preferred = frozenset(spec.preferred_batch_sizes)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Number of waiting records at which `submit` wakes the thread; None while it does not sleep.
        self._wakes_at: int | None = None
        self._wakes_ns: int | None = None  # time at which it wakes by itself
        self._next_purge_ns = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"terarec-batcher-{name}", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return self._queue.num_requests

    @property
    def delay_seconds(self) -> float:
        """Time that a request waits for others at present."""
        return self._pacing.delay_ns / 1e9

    def submit(
        self,
        records: RecordColumns,
        answer: Callable[[ScoredPart], Answer],
        *,
        priority: int = 0,
        timeout_seconds: float | None = None,
    ) -> Future[Answer]:
        """Let a request wait for its batch.

        Args:
            records: Its raw columns.
            answer: Makes the result of the future, in the thread of the batcher.
            priority: 1 for the first level; 0, or a level that there is not, for `BatchingSpec.default_priority_level`.
            timeout_seconds: Time after which the request is dropped unless it is being scored; None for that of the
                spec, which holds in any case.

        Returns:
            Its answer. It fails with `DeadlineError` for a request that was dropped, and with the error of the workflow
            or the model; `cancel` drops the request from the queue.

        Raises:
            ServerBusyError: The queue is full, or the batcher is closed.
        """
        now = time.monotonic_ns()
        future: _Pending[Answer] = _Pending()
        future.batcher = weakref.ref(self)
        timeouts = [seconds for seconds in (timeout_seconds, self._spec.default_timeout_seconds) if seconds]
        deadline = now + int(min(timeouts) * 1e9) if timeouts else None
        # A request with a short timeout must not expire by waiting for others.
        due, hurried = now + self._pacing.delay_ns, now if deadline is None else (now + deadline) // 2
        is_hurried = now < hurried < due
        waiting = Waiting(
            records, future, answer, self._level(priority), now, hurried if is_hurried else due, deadline, is_hurried
        )
        ended: list[Waiting] = []
        with self._lock:
            if self._queue.num_requests >= self._spec.max_queue_size and now >= self._next_purge_ns:
                self._next_purge_ns = now + _PURGE_NS
                ended = self._queue.remove_ended(now)
            problem, is_closed = self._refusal(), self._is_closed
            if problem is None:
                self._queue.add(waiting)
                is_early = self._wakes_ns is not None and waiting.due_ns < self._wakes_ns
                if self._wakes_at is not None and (is_early or self._queue.num_records >= self._wakes_at):
                    self._wakes_at = None  # woken once is enough
                    self._changed.notify()
        self._end(ended)
        if problem is not None:
            if not is_closed:  # else a successor takes the request, and counts it
                self._statistics.add_failure("rejected")
            raise ServerBusyError(f"model {self._name!r}", problem)
        return future

    def _level(self, priority: int) -> int:
        if not 1 <= priority <= self._spec.priority_levels:
            priority = self._spec.default_priority_level
        return max(priority - 1, 0)

    def _refusal(self) -> str | None:
        if self._is_closed:
            return "is being unloaded; try again"
        if self._queue.num_requests >= self._spec.max_queue_size:
            return f"{self._spec.max_queue_size} requests wait, which is the limit; try again"
        return None

    def close(self) -> None:
        """Refuse further requests, score those that wait, and end the thread."""
        with self._lock:
            self._is_closed = True
            self._changed.notify()
        # A callback of a future may close the batcher in its own thread, which then ends by itself.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            begun = time.monotonic_ns()
            try:
                self._score_batch(batch)
            except Exception as error:  # without this thread no request would be answered any more
                _LOGGER.exception("model %r: a batch could not be answered", self._name)
                for waiting in batch:
                    if not waiting.future.done():
                        waiting.future.set_exception(error)
            has_others = len(batch) > 1
            del batch  # whose columns would be kept until the next one comes
            if self._has_one_core and has_others:
                self._gather(time.monotonic_ns() - begun)

    def _gather(self, spent_ns: int) -> None:
        """Let the threads that answer and read requests go on until they wait for their clients.

        Clients answer while others are answered. A batch that is taken before has about half of those in flight, and
        the other half is the next one, and so on.

        Args:
            spent_ns: Nanoseconds that the last batch took.
        """
        look = time.monotonic_ns()
        end = look + min(_LONGEST_GATHERING_NS, 2 * spent_ns)
        first = others = time.process_time_ns() - time.thread_time_ns()
        while self._queue.num_records < self._pacing.max_records and look < end:
            before, begun, arrived = others, look, self._queue.num_requests
            time.sleep(_LOOK_SECONDS)  # the interpreter's lock comes back when they wait, or between two requests
            look, others = time.monotonic_ns(), time.process_time_ns() - time.thread_time_ns()
            is_idle = others - before < _IDLE_NS and self._queue.num_requests == arrived
            # Where other processes have the core, a look takes longer, or the answers have not been seen yet.
            if is_idle and look - begun < 3e9 * _LOOK_SECONDS and others - first >= _IDLE_NS:
                return

    def _next_batch(self) -> list[Waiting] | None:
        """Wait for the next batch; None once the batcher is closed and the queue empty."""
        with self._lock:
            while True:
                now = time.monotonic_ns()
                batch, ended = self._queue.take(
                    self._pacing.max_records, self._preferred, now, is_closed=self._is_closed
                )
                if batch or ended:
                    break
                if not self._queue.num_requests and self._is_closed:
                    return None
                self._sleep(now)
        self._end(ended)
        return batch

    def _sleep(self, now_ns: int) -> None:
        due = self._queue.due_ns
        waiting = self._queue.num_records
        # Only an arrival that completes a batch wakes the thread before the waiting ones are due.
        sizes = (*self._preferred, self._pacing.max_records)
        self._wakes_at = 0 if due is None else min((size for size in sizes if size > waiting), default=0)
        self._wakes_ns = due
        self._changed.wait(None if due is None else max(due - now_ns, 0) / 1e9)
        self._wakes_at = self._wakes_ns = None

    def _drop(self, future: Future[Any]) -> None:
        with self._lock:
            ended = self._queue.remove(future)
        self._end(ended)

    def _end(self, ended: Sequence[Waiting]) -> None:
        """Answer requests that were dropped."""
        for waiting in ended:
            spent = time.monotonic_ns() - waiting.arrived_ns
            # False for one that was cancelled; its client expects no answer.
            if waiting.future.set_running_or_notify_cancel():
                self._statistics.add_failure("expired", spent)
                problem = f"the request waited for {spent / 1e6:.1f} ms, which is beyond its timeout"
                waiting.future.set_exception(DeadlineError(f"model {self._name!r}", problem))
            else:
                self._statistics.add_failure("cancelled", spent)

    def _score_batch(self, batch: Sequence[Waiting]) -> None:
        running = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
        for _ in range(len(batch) - len(running)):
            self._statistics.add_failure("cancelled")
        if not running:
            return
        begun = time.monotonic_ns()
        try:
            scored = self._score([waiting.records for waiting in running])
        # Whatever a model raises belongs to those who asked; the thread goes on with the next batch.
        except Exception as error:
            scored = ScoredBatch([error] * len(running), StageTimes())
        ended = time.monotonic_ns()
        queues: list[int] = []
        num_records, (_, *computing) = 0, scored.times
        answers: list[tuple[Future[Any], Any, Exception | None]] = []
        for waiting, outcome in zip(running, scored.outcomes, strict=True):
            queued = begun - waiting.arrived_ns
            if isinstance(outcome, Exception):
                self._statistics.add_failure("error", time.monotonic_ns() - waiting.arrived_ns)
                answers.append((waiting.future, None, outcome))
                continue
            queues.append(queued)
            num_records += waiting.records.num_records
            part = ScoredPart(outcome.scores, outcome.step, StageTimes(queued, *computing), scored.lookup_ns)
            try:
                answers.append((waiting.future, waiting.answer(part), None))
            except Exception as error:
                answers.append((waiting.future, None, error))
        now = time.monotonic_ns()
        if queues:
            # Before the answers: who has one and reads the counters finds it counted.
            self._statistics.add_batch(num_records, scored.times._replace(compute_output=now - ended), queues)
        for future, answered, problem in answers:
            if problem is None:
                future.set_result(answered)
            else:
                future.set_exception(problem)
        now = time.monotonic_ns()
        if queues:
            self._pacing.observe([queued + now - begun for queued in queues], num_records, ended - begun, now)
