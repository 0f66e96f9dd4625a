# SPDX-License-Identifier: Apache-2.0
"""Calibration of probabilities: whether the samples of a predicted probability p have the mean label p."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import (
    FloatColumns,
    Floats,
    Integers,
    Values,
    as_columns,
    as_weights,
    check_labels,
    mean_over_labels,
)

Binning: TypeAlias = Literal["count", "width"]
"""Bins of about equal weight, or of equal widths in [0, 1]."""

BINS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationCurve:
    """Means of the samples in K bins by their score; bins without weight are left out.

    Attributes:
        score: Mean score of each bin, rising.
        label: Mean label of each bin.
        weight: Sum of the weights of each bin.
    """

    # Tuples and not arrays, so that curves compare as values.
    score: tuple[float, ...]
    label: tuple[float, ...]
    weight: tuple[float, ...]

    @property
    def error(self) -> float:
        """The expected calibration error: the weighted mean of abs(score - label) over the bins; NaN without any."""
        bins = zip(self.score, self.label, self.weight, strict=True)
        distance = math.fsum(weight * abs(score - label) for score, label, weight in bins)
        return distance / math.fsum(self.weight) if self.weight else math.nan

    def to_json(self) -> dict[str, float | list[float] | None]:
        """Return the columns of the curve and ``ece`` as JSON data; None for an undefined error."""
        error = self.error
        return {
            "ece": None if math.isnan(error) else error,
            "score": list(self.score),
            "label": list(self.label),
            "weight": list(self.weight),
        }


def calibration_curve(
    scores: Values, labels: Values, weights: Values | None = None, *, bins: int = BINS, binning: Binning = "count"
) -> CalibrationCurve:
    """Return the calibration curve of the scores of one label, and with it the expected calibration error.

    See `Calibration` for the bins. Of several labels, `Calibration.curves` has the curve of each.

    Args:
        scores: Probabilities [B].
        labels: Labels [B], from 0 to 1; NaN for unknown ones, which do not count.
        weights: Weights [B]; None for ones.
        bins: Number of bins.
        binning: "count" or "width".

    Raises:
        ConfigError: As `Calibration` and its `Calibration.update`, or several labels.

    Example:
        >>> curve = calibration_curve(np.array([0.1, 0.3, 0.7, 0.9]), np.array([0, 0, 1, 0]), bins=2)
        >>> list(curve.label), round(curve.error, 4)
        ([0.0, 0.5], 0.25)
    """
    curves = Calibration(bins=bins, binning=binning).update(scores, labels, weights).curves()
    if len(curves) != 1:
        raise ConfigError("calibration_curve", f"got {len(curves)} labels, expected one")
    return curves[0]


# Scores are compared by their 11 leading bits, of float32's 24, down to 2^-32, which is below any rate of clicks. So
# 32,770 cells hold what is needed of any number of samples.
_DROPPED_BITS = 13
_LOWEST = (127 - 32) << (23 - _DROPPED_BITS)
_CELLS = ((127 << 23) >> _DROPPED_BITS) - _LOWEST + 1


class Calibration:
    """Streaming calibration curves of probabilities, one a label.

    * "count": bins of equal weight (Nguyen & O'Connor 2015; the default, as click rates are low and nearly all samples
      would be in the first bin of equal width). A sample is in bin floor(bins * (w_below + w_equal / 2) / w), with the
      weights of the samples with lower, with equal and with any scores. Scores are equal here if their 11 leading bits
      are, so that equal ones are never apart, and a curve needs bounded memory.
    * "width": bins (k / bins, (k + 1) / bins], the first with 0, as in Guo et al. 2017.

    The means of the bins are those of the exact scores. `compute` is the mean of the labels' expected calibration
    errors. Memory: 800 KB a label with "count".

    Args:
        bins: Number of bins.
        binning: "count" or "width".

    Raises:
        ConfigError: No bin, or an unknown kind.
    """

    def __init__(self, *, bins: int = BINS, binning: Binning = "count") -> None:
        if bins < 1:
            raise ConfigError("bins", f"got {bins}, expected at least 1")
        if binning not in ("count", "width"):
            raise ConfigError("binning", f"got {binning!r}, expected 'count' or 'width'")
        self._bins, self._binning = bins, binning
        self.reset()

    def reset(self) -> None:
        """Remove all samples."""
        self._sums: list[Floats] = []  # [3, cells] of each label: weights, weighted scores, weighted labels

    def update(self, scores: Values, labels: Values, weights: Values | None = None) -> Calibration:
        """Add a batch: `scores` and `labels` (in [0, 1]; NaN is an unknown label), [B] or [B, L], and `weights` [B].

        Raises:
            ConfigError: A score or label outside [0, 1], a weight that is not a finite number >= 0, or shapes that do
                not match (this batch or an earlier one).
        """
        predicted, truth = as_columns("Calibration", scores, labels)
        sample_weights = as_weights("Calibration", weights, len(truth))
        check_probabilities(predicted, truth)
        cells = _CELLS if self._binning == "count" else self._bins
        if not self._sums:
            self._sums = [np.zeros((3, cells)) for _ in range(truth.shape[1])]
        if len(self._sums) != truth.shape[1]:
            raise ConfigError(
                "Calibration.update", f"got {truth.shape[1]} labels, expected {len(self._sums)} as before"
            )
        for number, sums in enumerate(self._sums):
            known = ~np.isnan(truth[:, number])
            own_weights = None if sample_weights is None else sample_weights[known]
            own = predicted[known, number]
            sums += _sums(own, truth[known, number], own_weights, self._cell(own), cells)
        return self

    def merge(self, other: Calibration) -> Calibration:
        """Add the samples of `other`, which has the same bins and is not changed.

        Raises:
            ConfigError: Other bins, or another number of labels.
        """
        if (self._bins, self._binning) != (other._bins, other._binning):
            raise ConfigError("Calibration.merge", f"got {other._bins} bins by {other._binning}, expected the same")
        if self._sums and other._sums and len(self._sums) != len(other._sums):
            raise ConfigError("Calibration.merge", f"got {len(other._sums)} labels, expected {len(self._sums)}")
        pairs = zip(self._sums or [np.zeros_like(sums) for sums in other._sums], other._sums, strict=False)
        if other._sums:
            self._sums = [mine + theirs for mine, theirs in pairs]
        return self

    def curves(self) -> tuple[CalibrationCurve, ...]:
        """Return the curve of every label; empty before the first update."""
        return tuple(self._curve(sums) for sums in self._sums)

    def per_label(self) -> tuple[float, ...]:
        """Return the error of every label; NaN for a label without weight. Empty before the first update."""
        return tuple(curve.error for curve in self.curves())

    def compute(self) -> float:
        """Return the mean error over the labels; NaN before the first sample."""
        return mean_over_labels(self.per_label())

    def by_part(
        self, scores: FloatColumns, labels: FloatColumns, weights: FloatColumns | None, part: Integers, parts: int
    ) -> Floats:
        """Return the error of each part of the samples of one label, float64[parts]; NaN for a part without weight.

        Args:
            scores: Scores [N].
            labels: Known labels [N].
            weights: Weights [N]; None for ones.
            part: Part of each sample, int64[N].
            parts: Number of parts.
        """
        cells = _CELLS if self._binning == "count" else self._bins
        # Of the cells of all parts only those that have samples.
        used, place = np.unique(part * cells + self._cell(scores), return_inverse=True)
        sums = _sums(scores, labels, weights, place, len(used))
        bounds = np.searchsorted(used, np.arange(parts + 1) * cells)
        return np.array([self._curve(sums[:, a:b]).error for a, b in itertools.pairwise(bounds)])

    def _cell(self, scores: FloatColumns) -> Integers:
        if self._binning == "width":
            inner = np.arange(1, self._bins) / self._bins
            bins: Integers = np.searchsorted(inner, scores.astype(np.float64), side="left").astype(np.int64)
            return bins
        # The bits of numbers >= 0 have the order of the numbers.
        bits = np.ascontiguousarray(scores).view(np.int32).astype(np.int64) >> _DROPPED_BITS
        cells: Integers = np.maximum(bits, _LOWEST) - _LOWEST
        return cells

    def _curve(self, sums: Floats) -> CalibrationCurve:
        if self._binning == "width":
            return _curve_of(sums)
        sums = sums[:, sums[0] > 0]
        weight = sums[0]
        # Divided last, so that a middle on a border of bins is exactly on it.
        middle = self._bins * (weight.cumsum() - weight / 2)
        bins = np.minimum((middle / weight.sum()).astype(np.int64), self._bins - 1) if len(weight) else np.zeros(0, int)
        return _curve_of(np.stack([np.bincount(bins, row, self._bins) for row in sums]))


def check_probabilities(scores: FloatColumns, labels: FloatColumns) -> None:
    """Raise `ConfigError` unless scores and labels are from 0 to 1; an unknown label, NaN, passes."""
    bad = (scores < 0) | (scores > 1)
    if bad.any():
        raise ConfigError("Calibration.update", f"got the score {scores[bad][0]}, expected probabilities, 0 to 1")
    check_labels("Calibration", labels, "share")


def _sums(
    scores: FloatColumns, labels: FloatColumns, weights: FloatColumns | None, cell: Integers, cells: int
) -> Floats:
    """Return the sums of weights, weighted scores and weighted labels of each cell, float64[3, cells]."""
    factor = np.ones(len(scores)) if weights is None else weights.astype(np.float64)
    return np.stack([np.bincount(cell, values, cells) for values in (factor, factor * scores, factor * labels)])


def _curve_of(sums: Floats) -> CalibrationCurve:
    weight, score, label = sums[:, sums[0] > 0]
    return CalibrationCurve(
        score=tuple((score / weight).tolist()), label=tuple((label / weight).tolist()), weight=tuple(weight.tolist())
    )
