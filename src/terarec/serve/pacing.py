# SPDX-License-Identifier: Apache-2.0
"""`Pacing`: how long requests wait for others, and how large batches become; fixed, or found for a latency target."""

from __future__ import annotations

import math
from collections.abc import Sequence

from terarec.spec import BatchingSpec

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
