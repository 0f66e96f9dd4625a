"""Distances between two distributions over the same bins. Formulas are described in docs/drift.md."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SMOOTHING = 0.5
"""Added to the count of every bin, so that an empty one has a finite logarithm (Jeffreys' prior)."""


def stability_index(reference: NDArray[np.int64], current: NDArray[np.int64]) -> float:
    """The population stability index of counts in k bins, int64[k]; 0 where either holds nothing."""
    if not reference.sum() or not current.sum():
        return 0.0
    expected, actual = reference + SMOOTHING, current + SMOOTHING
    expected, actual = expected / expected.sum(), actual / actual.sum()
    return float(((actual - expected) * np.log(actual / expected)).sum())


def jensen_shannon_distance(reference: NDArray[np.int64], current: NDArray[np.int64]) -> float:
    """The square root of the Jensen-Shannon divergence in bits: 0 for equal shares, 1 for disjoint ones."""
    if not reference.sum() or not current.sum():
        return 0.0
    shares = reference / reference.sum(), current / current.sum()
    middle = (shares[0] + shares[1]) / 2.0
    divergence = sum(_divergence(share, middle) for share in shares) / 2.0
    return float(np.sqrt(max(divergence, 0.0)))


def _divergence(share: NDArray[np.float64], middle: NDArray[np.float64]) -> float:
    there = share > 0.0
    return float((share[there] * np.log2(share[there] / middle[there])).sum())
