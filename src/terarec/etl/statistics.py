"""Statistics of numbers that block sizes and threads do not change: exact sums, moments, ranges, samples by hash."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK_BITS = 16
_CHUNK = 1 << _CHUNK_BITS
_SPLITTER = 2.0**27 + 1.0
_LARGEST = 2.0**480
"""Beyond it and below its inverse squares and splits leave the range of float64."""


def exact_sum(numbers: NDArray[np.float64]) -> Fraction:
    """Compute the sum of finite numbers float64[n]."""
    numbers, extremes = _parted(numbers)
    return sum(map(_chunk_sum, _chunks(numbers)), sum(extremes, Fraction(0)))


def exact_sum_of_squares(numbers: NDArray[np.float64]) -> Fraction:
    """Compute the sum of the squares of finite numbers float64[n]."""
    numbers, extremes = _parted(numbers)
    total = sum((number * number for number in extremes), Fraction(0))
    for chunk in _chunks(numbers):
        product, error = _square(chunk)
        total += _chunk_sum(product) + _chunk_sum(error)
    return total


def _parted(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[Fraction]]:
    """Return the numbers of ordinary size and the others, too few in real data for their loop to matter."""
    sizes = np.abs(numbers)
    far = (sizes > _LARGEST) | ((sizes < 1.0 / _LARGEST) & (numbers != 0.0))
    return (numbers[~far], list(map(Fraction, numbers[far].tolist()))) if far.any() else (numbers, [])


def _chunks(numbers: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    return (numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK))


def _square(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute Dekker's product: ``numbers ** 2 == product + error``, exactly."""
    scaled = _SPLITTER * numbers
    high = scaled - (scaled - numbers)
    low = numbers - high
    product = numbers * numbers
    return product, ((high * high - product) + 2.0 * high * low) + low * low


def _chunk_sum(numbers: NDArray[np.float64]) -> Fraction:
    """Sum at most 2^16 numbers by the extraction of Rump, Ogita and Oishi (Accurate Floating-Point Summation).

    Added to a large power of two and taken from it again, a number keeps its leading bits only. These leading parts are
    multiples of one unit and so few bits long that their sum is exact; what is left is at least 35 bits smaller.
    """
    total = Fraction(0)
    while len(numbers) and (largest := float(np.abs(numbers).max())) > 0.0:
        sigma = float(np.ldexp(1.0, int(np.frexp(largest)[1]) + _CHUNK_BITS + 1))
        leading = (sigma + numbers) - sigma
        total += Fraction(float(leading.sum()))
        numbers = numbers - leading
    return total


@dataclass(frozen=True, slots=True)
class Moments:
    """Exact sums of numbers: the moments of a column are those of its parts added up, bit for bit.

    Attributes:
        count: Number of numbers.
        total: Their sum.
        squares: Sum of their squares.
    """

    count: int = 0
    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> Moments:
        """Compute those of ``numbers[n]``, float64 or integers; NaN is missing and left out."""
        numbers = numbers.astype(np.float64, copy=False)
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


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The range of numbers; ranges add up.

    Attributes:
        minimum: The least number, infinity before the first.
        maximum: The largest, minus infinity before the first.
    """

    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> NumberRange:
        """Compute that of ``numbers[n]``, float64 or integers; NaN is missing and left out."""
        if numbers.dtype.kind == "i":
            return cls(float(numbers.min()), float(numbers.max())) if len(numbers) else cls()
        least, most = np.fmin.reduce(numbers, initial=math.inf), np.fmax.reduce(numbers, initial=-math.inf)
        return cls(float(least), float(most))

    def __add__(self, other: NumberRange) -> NumberRange:
        return NumberRange(min(self.minimum, other.minimum), max(self.maximum, other.maximum))

    def __bool__(self) -> bool:
        """Return whether there was any number."""
        return self.minimum <= self.maximum


SAMPLE_SIZE = 1 << 20
"""Largest number of values of a sample; quantiles of no more values are exact."""


@dataclass(frozen=True, slots=True)
class NumberSample:
    """A bottom-k sample: the numbers with the lowest hashes of their row ids, the same in every engine.

    Attributes:
        hashes: int64[k].
        numbers: float64[k].
    """

    hashes: NDArray[np.int64]
    numbers: NDArray[np.float64]

    def lowest(self) -> NumberSample:
        """Return at most `SAMPLE_SIZE` of the numbers; of equal hashes (items of one list) the first."""
        if len(self.hashes) <= SAMPLE_SIZE:
            return self
        kept = np.argsort(self.hashes, kind="stable")[:SAMPLE_SIZE]
        return NumberSample(self.hashes[kept], self.numbers[kept])

    def median(self) -> float:
        """Return the lower median: the least number that at least half of them do not exceed; 0 for no numbers."""
        middle = (len(self.numbers) - 1) // 2
        return float(np.partition(self.numbers, middle)[middle]) if len(self.numbers) else 0.0

    def boundaries(self, intervals: int) -> tuple[float, ...]:
        """Return at most ``intervals - 1`` rising boundaries that cut the numbers into intervals of about equal counts.

        With n numbers, q_k the least one that at least k n / intervals do not exceed, boundary k is the least number
        above q_k; where there is none, or the same one again, there is no boundary. So a value that fills several
        intervals gets one of its own: where nine of ten numbers are 0, the first boundary is the least number above 0.
        """
        values, counts = np.unique(self.numbers, return_counts=True)
        reached = np.cumsum(counts) * intervals
        last_inside = np.searchsorted(reached, np.arange(1, intervals) * len(self.numbers))
        firsts = np.unique(last_inside[last_inside + 1 < len(values)] + 1)
        return tuple(values[firsts].tolist())


class GrowingSample:
    """A `NumberSample` of a column whose parts come in turn."""

    def __init__(self) -> None:
        self._parts: list[NumberSample] = []
        self._size = 0

    def add(self, part: NumberSample) -> None:
        """Add the sample of a block."""
        self._parts.append(part)
        self._size += len(part.numbers)
        if self._size > 2 * SAMPLE_SIZE:
            self._compact()

    def sample(self) -> NumberSample:
        """Return the sample of all parts."""
        self._compact()
        return self._parts[0]

    def _compact(self) -> None:
        hashes = np.concatenate([np.empty(0, dtype=np.int64), *(part.hashes for part in self._parts)])
        numbers = np.concatenate([np.empty(0), *(part.numbers for part in self._parts)])
        self._parts = [NumberSample(hashes, numbers).lowest()]
        self._size = len(self._parts[0].numbers)
