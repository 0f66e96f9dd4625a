"""Area under the ROC curve, exact, ties counted by half."""

from __future__ import annotations

import math

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import FloatColumns, Values, as_columns, mean_over_labels


class AUC:
    """Exact streaming AUC: the share of (positive, negative) pairs that the scores order rightly, a tie counting 1/2.

    A label y strictly between 0 and 1 counts as y of a positive and 1 - y of a negative sample, as in HugeCTR's AUC.
    Any monotone score will do; logits keep apart what float32 probabilities round together near 0 and 1.

    Memory: 4 bytes a score with labels 0 and 1; `compute` needs as much again for sorting, and 24 bytes for each score
    of one block of positives. A score with a label in between takes 8 bytes; with any of these `compute` needs about 50
    for each score of one label.

    With L labels, each has its own AUC. A label without any positive or any negative part has none: its AUC is NaN, and
    so is the mean.

    Example:
        >>> AUC().update(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])).compute()
        0.875
        >>> AUC().update(np.array([0.2, 0.8]), np.array([0.25, 0.75])).compute()
        0.75
    """

    def __init__(self) -> None:
        self._labels: list[_Scores] = []

    def reset(self) -> None:
        """Forget every score."""
        self._labels = []

    def update(self, scores: Values, labels: Values) -> AUC:
        """Take in a batch: `scores` and `labels` (in [0, 1]), each [B] or [B, L].

        Raises:
            ConfigError: a NaN score, a label outside [0, 1], or shapes that do not match (this batch or an earlier
                one).
        """
        score_columns, label_columns = as_columns("AUC", scores, labels)
        outside = ~((label_columns >= 0) & (label_columns <= 1))
        if outside.any():
            raise ConfigError(f"AUC.update: got the label {label_columns[outside][0]}, expected 0 to 1")
        self._expect_labels(score_columns.shape[1])
        for label, held in enumerate(self._labels):
            held.add(score_columns[:, label], label_columns[:, label])
        return self

    def merge(self, other: AUC) -> AUC:
        """Take in everything that `other` has seen; `other` stays as it is."""
        if other._labels:
            self._expect_labels(len(other._labels))
            for mine, theirs in zip(self._labels, other._labels, strict=True):
                mine.extend(theirs)
        return self

    def per_label(self) -> tuple[float, ...]:
        """The AUC of every label; NaN where one side is empty. Empty before the first update."""
        return tuple(held.auc() for held in self._labels)

    def compute(self) -> float:
        """The mean over the labels; NaN before the first update or if a label has one side only."""
        return mean_over_labels(self.per_label())

    def _expect_labels(self, num_labels: int) -> None:
        if not self._labels:
            self._labels = [_Scores() for _ in range(num_labels)]
        if len(self._labels) != num_labels:
            raise ConfigError(f"AUC.update: got {num_labels} labels, expected {len(self._labels)} as before")


class _Scores:
    """The scores of one label's samples: positive ones, negative ones, and those between with their labels."""

    def __init__(self) -> None:
        self._positive: list[FloatColumns] = []
        self._negative: list[FloatColumns] = []
        self._between: list[FloatColumns] = []
        self._between_labels: list[FloatColumns] = []

    def add(self, scores: FloatColumns, labels: FloatColumns) -> None:
        """Take in scores [B] with their labels [B] in [0, 1]."""
        is_positive, is_negative = labels == 1, labels == 0
        self._positive.append(scores[is_positive])
        self._negative.append(scores[is_negative])
        is_between = ~(is_positive | is_negative)
        if is_between.any():
            self._between.append(scores[is_between])
            self._between_labels.append(labels[is_between])

    def extend(self, other: _Scores) -> None:
        """Take in what `other` holds."""
        self._positive.extend(other._positive)
        self._negative.extend(other._negative)
        self._between.extend(other._between)
        self._between_labels.extend(other._between_labels)

    def auc(self) -> float:
        """The AUC; NaN if there is nothing on one side."""
        for scores in (self._positive, self._negative):
            scores[:] = [np.sort(np.concatenate(scores))]  # later calls sort what is sorted
        positive, negative = self._positive[0], self._negative[0]
        if not self._between:
            return _sorted_auc(positive, negative)
        labels = [np.ones_like(positive), np.zeros_like(negative), *self._between_labels]
        return _weighted_auc(np.concatenate([positive, negative, *self._between]), np.concatenate(labels))


_BLOCK = 1 << 20  # positives ranked at a time, which bounds the memory of `searchsorted`'s int64 results


def _sorted_auc(positive: FloatColumns, negative: FloatColumns) -> float:
    pairs = len(positive) * len(negative)
    if pairs == 0:
        return math.nan
    half_wins = 0
    for start in range(0, len(positive), _BLOCK):
        block = positive[start : start + _BLOCK]
        below = np.searchsorted(negative, block, side="left")
        below_or_tied = np.searchsorted(negative, block, side="right")
        half_wins += int(below.sum()) + int(below_or_tied.sum())
    return half_wins / (2 * pairs)


def _weighted_auc(scores: FloatColumns, labels: FloatColumns) -> float:
    """The AUC of samples that are positive by their labels' share and negative by the rest, in float64."""
    order = np.argsort(scores, kind="stable")
    ranked, positive = scores[order], labels[order].astype(np.float64)
    firsts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))  # of each group of equal scores
    positives, sizes = np.add.reduceat(positive, firsts), np.diff(np.append(firsts, ranked.size))
    negatives = sizes - positives
    pairs = float(positives.sum()) * float(negatives.sum())
    wins = positives * (negatives.cumsum() - negatives / 2)
    return float(wins.sum()) / pairs if pairs else math.nan
