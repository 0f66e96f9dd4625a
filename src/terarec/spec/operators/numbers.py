"""Operators on numbers. x is a value, n the number of training values that are not missing; see docs/workflows.md."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from terarec.spec import checks
from terarec.spec.operators.mapped import MappedColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class FillMissing(MappedColumns):
    """Gives missing values a value.

    Attributes:
        value: what missing becomes: a number for numbers and integers, a text for text columns.
        median: take the lower median of the training values instead (the smallest x with at least n / 2 values <= x).
        indicator: also add the number column ``<output>_missing``, 1 where the value was missing and 0 elsewhere.
    """

    kind: ClassVar[str] = "fill_missing"
    value: float | str | None = None
    median: bool = False
    indicator: bool = False

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        checks.one_of(self, "median", (False, True))
        checks.one_of(self, "indicator", (False, True))
        if (self.value is None) is not self.median:
            checks.reject(self, "", f"got value {self.value!r} and median {self.median}, expected exactly one of them")
        if self.value is not None and not isinstance(self.value, str):
            checks.finite_float(self, "value")
        if self.value == "":
            checks.fail(self, "value", "a number or a text that is not empty")

    @property
    def indicators(self) -> tuple[str, ...]:
        """Names of the columns that `indicator` adds, one for each output."""
        return tuple(f"{name}_missing" for name in self.outputs or self.columns) if self.indicator else ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return (*(self.outputs or self.columns), *self.indicators)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip(MappedColumns):
    """min(max(x, low), high); None is no bound."""

    kind: ClassVar[str] = "clip"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        for bound in ("low", "high"):
            if getattr(self, bound) is not None:
                checks.finite_float(self, bound)
        if self.low is None and self.high is None:
            checks.reject(self, "", "got neither low nor high, expected at least one")
        if self.low is not None and self.high is not None and self.low > self.high:
            checks.fail(self, "low", f"at most high, {self.high!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogOp(MappedColumns):
    """ln(x + shift).

    Attributes:
        shift: None learns it: 1 - (least training value), so that this one becomes 0; lower values are raised to it.
    """

    kind: ClassVar[str] = "log_op"
    shift: float | None = 1.0

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        if self.shift is not None:
            checks.finite_float(self, "shift")


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalize(MappedColumns):
    """(x - mean) / deviation of the training values; the population's deviation, 1 where it is 0."""

    kind: ClassVar[str] = "normalize"


@dataclass(frozen=True, kw_only=True, slots=True)
class NormalizeMinMax(MappedColumns):
    """(x - min) / (max - min) of the training values; 0 where max = min."""

    kind: ClassVar[str] = "normalize_min_max"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucketize(MappedColumns):
    """Number -> id of its interval: 0 missing, else 1 + the number of boundaries that are <= x.

    Attributes:
        boundaries: rising numbers.
        intervals: learn boundaries instead, which cut the training values into about so many equal parts.
    """

    kind: ClassVar[str] = "bucketize"
    boundaries: tuple[float, ...] = ()
    intervals: int | None = None

    def __post_init__(self) -> None:
        MappedColumns.__post_init__(self)
        if bool(self.boundaries) is (self.intervals is not None):
            checks.reject(self, "", "expected exactly one of boundaries and intervals")
        if self.intervals is not None:
            checks.positive_int(self, "intervals", minimum=2)
        numbers = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in self.boundaries)
        if not numbers or not all(a < b for a, b in itertools.pairwise(self.boundaries)):
            checks.fail(self, "boundaries", "rising numbers")
