"""The least and the largest of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The range of numbers; ranges add up.

    Attributes:
        minimum: the least number, infinity before the first.
        maximum: the largest, minus infinity before the first.
    """

    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> NumberRange:
        """That of float64[n]; NaN is missing and left out."""
        least, most = np.fmin.reduce(numbers, initial=math.inf), np.fmax.reduce(numbers, initial=-math.inf)
        return cls(float(least), float(most))

    def __add__(self, other: NumberRange) -> NumberRange:
        return NumberRange(min(self.minimum, other.minimum), max(self.maximum, other.maximum))

    def __bool__(self) -> bool:
        """Whether there was any number."""
        return self.minimum <= self.maximum
