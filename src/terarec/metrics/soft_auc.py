"""Area under the ROC curve for labels between 0 and 1."""

from __future__ import annotations

import math

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import FloatColumns, Values, as_columns, mean_over_labels


class SoftAUC:
    """Exact streaming AUC where a label y in [0, 1] counts as y of a positive and 1 - y of a negative sample.

    With labels 0 and 1 alone it is `AUC`, which needs less memory: the share of (positive, negative) pairs that the
    scores order rightly, a tie counting 1/2. HugeCTR's AUC is this one.

    Memory: 8 bytes a score; `compute` needs about 40 more for each score of one label. With L labels, each has its own
    AUC; NaN for a label that has no positive or no negative part.

    Example:
        >>> SoftAUC().update(np.array([0.2, 0.8]), np.array([0.25, 0.75])).compute()
        0.75
    """

    def __init__(self) -> None:
        self._batches: list[tuple[FloatColumns, FloatColumns]] = []

    def reset(self) -> None:
        """Forget every score."""
        self._batches = []

    def update(self, scores: Values, labels: Values) -> SoftAUC:
        """Take in a batch: `scores` and `labels` (in [0, 1]), each [B] or [B, L].

        Raises:
            ConfigError: a NaN score, a label outside [0, 1], or shapes that do not match (this batch or an earlier
                one).
        """
        score_columns, label_columns = as_columns("SoftAUC", scores, labels)
        outside = ~((label_columns >= 0) & (label_columns <= 1))
        if outside.any():
            raise ConfigError(f"SoftAUC.update: got the label {label_columns[outside][0]}, expected 0 to 1")
        if self._batches and self._batches[0][0].shape[1] != score_columns.shape[1]:
            before = self._batches[0][0].shape[1]
            raise ConfigError(f"SoftAUC.update: got {score_columns.shape[1]} labels, expected {before} as before")
        self._batches.append((score_columns, label_columns))
        return self

    def merge(self, other: SoftAUC) -> SoftAUC:
        """Take in everything that `other` has seen; `other` stays as it is."""
        for scores, labels in other._batches:
            self.update(scores, labels)
        return self

    def per_label(self) -> tuple[float, ...]:
        """The AUC of every label; NaN where one side is empty. Empty before the first update."""
        if not self._batches:
            return ()
        scores, labels = (np.concatenate(part) for part in zip(*self._batches, strict=True))
        return tuple(_auc(scores[:, label], labels[:, label]) for label in range(scores.shape[1]))

    def compute(self) -> float:
        """The mean over the labels; NaN before the first update or if a label has one side only."""
        return mean_over_labels(self.per_label())


def _auc(scores: FloatColumns, labels: FloatColumns) -> float:
    order = np.argsort(scores, kind="stable")
    ranked, positive = scores[order], labels[order].astype(np.float64)
    if not ranked.size:
        return math.nan
    firsts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))  # of each group of equal scores
    positives, sizes = np.add.reduceat(positive, firsts), np.diff(np.append(firsts, ranked.size))
    negatives = sizes - positives
    pairs = float(positives.sum()) * float(negatives.sum())
    wins = positives * (negatives.cumsum() - negatives / 2)
    return float(wins.sum()) / pairs if pairs else math.nan
