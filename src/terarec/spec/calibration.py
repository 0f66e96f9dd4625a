# SPDX-License-Identifier: Apache-2.0
"""Calibration of a trained model: how its probabilities are corrected, as stored with the run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar, Literal

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperatureSpec:
    """The probability of logit x is 1 / (1 + exp(-x / T)) (Guo et al. 2017, arXiv 1706.04599).

    Attributes:
        temperatures: T of each label.
        step: Training steps of the weights that it was fitted for.
    """

    kind: ClassVar[str] = "temperature"
    temperatures: tuple[float, ...]
    step: checks.NonNegativeInt

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not self.temperatures or not all(map(checks.number(0.0, open_low=True).accepts, self.temperatures)):
            checks.fail(self, "temperatures", "a number above 0 for each label")

    @property
    def num_labels(self) -> int:
        """Number of labels L."""
        return len(self.temperatures)


@dataclass(frozen=True, kw_only=True, slots=True)
class IsotonicSpec:
    """The probability is a rising function of the model's, straight between K points and constant outside of them.

    Attributes:
        scores: Probabilities of the model at the points of each label, rising.
        values: The probabilities in their place, never falling.
        step: Training steps of the weights that it was fitted for.
    """

    kind: ClassVar[str] = "isotonic"
    scores: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]
    step: checks.NonNegativeInt

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if list(map(len, self.scores)) != list(map(len, self.values)) or not self.scores or not all(self.scores):
            checks.fail(self, "values", "as many numbers as scores for each label, at least one")
        for name, lists in (("scores", self.scores), ("values", self.values)):
            if not all(map(checks.number(0.0, 1.0).accepts, chain.from_iterable(lists))):
                checks.fail(self, name, "probabilities, from 0 to 1")
        if any(one >= other for numbers in self.scores for one, other in pairwise(numbers)):
            checks.fail(self, "scores", "rising numbers for each label")
        if any(one > other for numbers in self.values for one, other in pairwise(numbers)):
            checks.fail(self, "values", "numbers that never fall for each label")

    @property
    def num_labels(self) -> int:
        """Number of labels L."""
        return len(self.scores)


CalibrationSpec = TemperatureSpec | IsotonicSpec
CalibrationMethod = Literal["temperature", "isotonic"]
