"""Count, mean and deviation of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from terarec.etl.statistics.exact_sum import exact_sum, exact_sum_of_squares


@dataclass(frozen=True, slots=True)
class Moments:
    """What numbers add up to; exact, so that the moments of a whole are the sum of those of its parts, bit for bit.

    Attributes:
        count: numbers seen.
        total: their sum.
        squares: the sum of their squares.
    """

    count: int = 0
    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> Moments:
        """Those of float64[n]; NaN is missing and left out."""
        present = numbers[~np.isnan(numbers)]
        if not len(present):
            return cls()
        total, squares = exact_sum(present), exact_sum_of_squares(present)
        return cls(len(present), total, squares)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        """The mean, 0 before the first number."""
        return float(self.total / self.count) if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The population's standard deviation; 1 for numbers that do not vary."""
        if not self.count:
            return 1.0
        variance = self.squares / self.count - (self.total / self.count) ** 2
        halves = (variance.numerator.bit_length() - variance.denominator.bit_length()) // 2
        # The square of a large deviation is no float64: the root is taken near 1.
        deviation = math.ldexp(math.sqrt(variance / Fraction(4) ** halves), halves)
        return deviation if deviation > 0.0 else 1.0
