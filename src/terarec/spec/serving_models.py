# SPDX-License-Identifier: Apache-2.0
"""Options of a served model: the records it takes, and how its requests are joined into batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from terarec.spec import checks

MOST_QUEUED = 2**20
"""Largest limit of the requests that wait."""

MOST_LEVELS = 1024
"""Largest number of priority levels."""

MOST_DELAY_MICROSECONDS = 60_000_000
"""Longest time that a request may wait for others."""

MOST_TIMEOUT_SECONDS = 86_400.0
"""Longest time after which a request that waits is dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingSpec:
    """Joining of requests into batches. The fields have the meaning that Triton gives them.

    Attributes:
        max_batch_size: Records of a batch at most. A request of more is a batch of its own; 1 joins none.
        preferred_batch_sizes: Numbers of records at which a batch need not wait for more requests.
        max_queue_delay_microseconds: Time that a request waits for others to join it while the model is idle.
        target_p99_seconds: Time within which 99 of 100 requests are to be answered: the delay, up to the maximum if
            there is one, and the size of batches are then found by measurement. 0 for no target.
        priority_levels: Number of levels; requests of a lower number are scored first. 0 for no levels.
        default_priority_level: Level of requests that state none, from 1; 0 where there are no levels.
        default_timeout_seconds: Time after which a request that still waits is dropped; 0 for never. A request may
            state a shorter one.
        max_queue_size: Limit of the requests that wait; further ones are refused.

    Raises:
        ConfigError: A value out of range.
    """

    max_batch_size: int = 1024
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    target_p99_seconds: float = 0.0
    priority_levels: int = 0
    default_priority_level: int = 0
    default_timeout_seconds: float = 0.0
    max_queue_size: int = 4096

    def __post_init__(self) -> None:
        checks.positive_int(self, "max_batch_size", maximum=checks.MOST_BATCH)
        if not all(map(checks.integer(1, self.max_batch_size).accepts, self.preferred_batch_sizes)):
            checks.fail(self, "preferred_batch_sizes", f"sizes from 1 to {self.max_batch_size}, the largest batch")
        checks.positive_int(self, "max_queue_delay_microseconds", minimum=0, maximum=MOST_DELAY_MICROSECONDS)
        checks.finite_float(self, "target_p99_seconds", low=0, high=MOST_DELAY_MICROSECONDS / 1e6)
        checks.positive_int(self, "priority_levels", minimum=0, maximum=MOST_LEVELS)
        checks.positive_int(self, "default_priority_level", minimum=0, maximum=MOST_LEVELS)
        if (self.default_priority_level == 0) != (self.priority_levels == 0):
            accepted = "0 without levels" if self.priority_levels == 0 else f"a level from 1 to {self.priority_levels}"
            checks.fail(self, "default_priority_level", accepted)
        if self.default_priority_level > self.priority_levels:
            checks.fail(self, "default_priority_level", f"a level from 1 to {self.priority_levels}")
        checks.finite_float(self, "default_timeout_seconds", low=0, high=MOST_TIMEOUT_SECONDS)
        checks.positive_int(self, "max_queue_size", maximum=MOST_QUEUED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModelOptions:
    """Options of a served model.

    Attributes:
        max_batch: Maximum number of records accepted in one request.
        absent_is_missing: Whether a column that a request does not have is taken as missing values.
        batching: Joining of requests into batches.
        times_lookups: Whether the look-ups of rows in a batch are timed apart from its layers, for traces.

    Raises:
        ConfigError: A value out of range.
    """

    max_batch: int = 65536
    absent_is_missing: bool = False
    batching: BatchingSpec = field(default_factory=BatchingSpec)
    times_lookups: bool = False

    def __post_init__(self) -> None:
        checks.positive_int(self, "max_batch", maximum=checks.MOST_BATCH)
        checks.instance(self, "absent_is_missing", bool, "true or false")
        checks.instance(self, "batching", BatchingSpec, "BatchingSpec(...)")
        checks.instance(self, "times_lookups", bool, "true or false")
