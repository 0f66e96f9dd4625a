"""Sums of float64 numbers without any rounding: neither order nor grouping of the numbers shows in them."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_CHUNK_BITS = 16
_CHUNK = 1 << _CHUNK_BITS
_SPLITTER = 2.0**27 + 1.0
_LARGEST = 2.0**480
"""Beyond it and below its inverse squares and splits leave the range of float64."""


def exact_sum(numbers: NDArray[np.float64]) -> Fraction:
    """The sum of finite numbers float64[n]."""
    numbers, extremes = _parted(numbers)
    return sum(map(_chunk_sum, _chunks(numbers)), sum(extremes, Fraction(0)))


def exact_sum_of_squares(numbers: NDArray[np.float64]) -> Fraction:
    """The sum of the squares of finite numbers float64[n]."""
    numbers, extremes = _parted(numbers)
    total = sum((number * number for number in extremes), Fraction(0))
    for chunk in _chunks(numbers):
        product, error = _square(chunk)
        total += _chunk_sum(product) + _chunk_sum(error)
    return total


def _parted(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[Fraction]]:
    """The numbers of ordinary size, and the others; of these are too few in real data for their loop to matter."""
    sizes = np.abs(numbers)
    far = (sizes > _LARGEST) | ((sizes < 1.0 / _LARGEST) & (numbers != 0.0))
    return (numbers[~far], list(map(Fraction, numbers[far].tolist()))) if far.any() else (numbers, [])


def _chunks(numbers: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    return (numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK))


def _square(numbers: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Dekker's product: ``numbers ** 2 == product + error``, exactly."""
    scaled = _SPLITTER * numbers
    high = scaled - (scaled - numbers)
    low = numbers - high
    product = numbers * numbers
    return product, ((high * high - product) + 2.0 * high * low) + low * low


def _chunk_sum(numbers: NDArray[np.float64]) -> Fraction:
    """The sum of at most 2^16 numbers by the extraction of Rump, Ogita and Oishi (Accurate Floating-Point Summation).

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
