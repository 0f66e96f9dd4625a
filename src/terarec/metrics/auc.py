"""Area under the ROC curve, exact, ties counted by half."""

from __future__ import annotations

import math

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import FloatColumns, Values, as_columns, mean_over_labels


class AUC:
    """Exact streaming AUC: the share of (positive, negative) pairs that the scores order rightly, a tie counting 1/2.

    Any monotone score will do; logits keep apart what float32 probabilities round together near 0 and 1.

    Memory: 4 bytes a score (float32, positives and negatives apart); `compute` needs as much again for sorting, and
    24 bytes for each score of one block of positives.

    With L labels, each has its own AUC. A label with one class only has none: its AUC is NaN, and so is the mean.

    Example:
        >>> AUC().update(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])).compute()
        0.875
    """

    def __init__(self) -> None:
        self._positive: list[list[FloatColumns]] = []
        self._negative: list[list[FloatColumns]] = []

    def reset(self) -> None:
        """Forget every score."""
        self._positive, self._negative = [], []

    def update(self, scores: Values, labels: Values) -> AUC:
        """Take in a batch: `scores` and `labels` (0 or 1), each [B] or [B, L].

        Raises:
            ConfigError: a NaN score, a label that is neither 0 nor 1, or shapes that do not match (this batch or
                an earlier one).
        """
        score_columns, label_columns = as_columns("AUC", scores, labels)
        positive = label_columns == 1
        strange = ~positive & (label_columns != 0)
        if strange.any():
            raise ConfigError(f"AUC.update: got the label {label_columns[strange][0]}, expected 0 or 1")
        self._expect_labels(score_columns.shape[1])
        for label in range(score_columns.shape[1]):
            column, mask = score_columns[:, label], positive[:, label]
            self._positive[label].append(column[mask])
            self._negative[label].append(column[~mask])
        return self

    def merge(self, other: AUC) -> AUC:
        """Take in everything that `other` has seen; `other` stays as it is."""
        if other._positive:
            self._expect_labels(len(other._positive))
            for label in range(len(other._positive)):
                self._positive[label].extend(other._positive[label])
                self._negative[label].extend(other._negative[label])
        return self

    def per_label(self) -> tuple[float, ...]:
        """The AUC of every label; NaN where a label has seen one class only. Empty before the first update."""
        for column in (*self._positive, *self._negative):
            column[:] = [np.sort(np.concatenate(column))]  # later calls sort what is sorted
        return tuple(
            _sorted_auc(positive[0], negative[0])
            for positive, negative in zip(self._positive, self._negative, strict=True)
        )

    def compute(self) -> float:
        """The mean over the labels; NaN before the first update or if a label has seen one class only."""
        return mean_over_labels(self.per_label())

    def _expect_labels(self, num_labels: int) -> None:
        if not self._positive:
            self._positive = [[] for _ in range(num_labels)]
            self._negative = [[] for _ in range(num_labels)]
        if len(self._positive) != num_labels:
            raise ConfigError(f"AUC.update: got {num_labels} labels, expected {len(self._positive)} as before")


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
