"""Which unseen keys a dynamic table takes up in training. What it does not take up has the table's default vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from terarec.spec import checks

MOST_FILTER_COUNT = 255  # a counting filter's cells are bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FrequencyAdmission:
    """A key gets a row in the batch in which it occurs for the `count`-th time in training. Exact; made by `freq`.

    Keys without a row are counted in an index of up to 24 bytes a key.
    """

    kind: ClassVar[str] = "freq"
    count: int

    def __post_init__(self) -> None:
        checks.positive_int(self, "count")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityAdmission:
    """Each training batch gives a key without a row one with this `probability`. No memory; made by `prob`."""

    kind: ClassVar[str] = "prob"
    probability: float

    def __post_init__(self) -> None:
        checks.finite_float(self, "probability", low=0.0, high=1.0, open_low=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterAdmission:
    """As `FrequencyAdmission`, counted in a fixed number of bytes, `num_bytes`; made by `counting_filter`.

    Keys that share all their cells with others may get a row before their `count`-th occurrence, never after it.
    """

    kind: ClassVar[str] = "counting_filter"
    count: int
    num_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        checks.positive_int(self, "count")
        if self.count > MOST_FILTER_COUNT:
            checks.fail(self, "count", f"an integer from 1 to {MOST_FILTER_COUNT}")
        checks.positive_int(self, "num_bytes", minimum=64)


AdmissionSpec = FrequencyAdmission | ProbabilityAdmission | FilterAdmission


def freq(count: int) -> FrequencyAdmission:
    """A row in the batch of a key's `count`-th occurrence, counted exactly."""
    return FrequencyAdmission(count=count)


def prob(probability: float) -> ProbabilityAdmission:
    """A row with this `probability` in each batch that holds the key."""
    return ProbabilityAdmission(probability=probability)


def counting_filter(count: int, *, num_bytes: int = 64 * 2**20) -> FilterAdmission:
    """A row at a key's `count`-th occurrence or, where the filter of `num_bytes` is crowded, before it."""
    return FilterAdmission(count=count, num_bytes=num_bytes)
