# SPDX-License-Identifier: Apache-2.0
"""Area under the ROC curve: exact, weighted, ties counted by half; of all samples, of parts of them, and of groups."""

from __future__ import annotations

import math

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


class AUC:
    """Exact streaming AUC: the share of (positive, negative) pairs that the scores order correctly, a tie counting 1/2.

    A pair counts by the product of the weights of its samples. A label y strictly between 0 and 1 counts as y of a
    positive and 1 - y of a negative sample, as in HugeCTR's AUC. A sample whose label is unknown (NaN) does not count.
    Any monotone score will do; logits keep apart what float32 probabilities round together near 0 and 1.

    Memory: 4 bytes a score with labels 0 and 1 and weight 1; `compute` needs as much again for sorting, and 24 bytes
    for each score of one block of positives. A score with another label or weight takes 12 bytes; with any of these
    `compute` needs about 100 for each score of one label. Weights are added in float64.

    With L labels, each has its own AUC. A label without any positive or any negative part has none: its AUC is NaN, and
    so is the mean.

    Example:
        >>> AUC().update(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])).compute()
        0.875
        >>> AUC().update(np.array([0.2, 0.8]), np.array([0.25, 0.75])).compute()
        0.75
        >>> AUC().update(np.array([0.1, 0.3, 0.2]), np.array([0, 0, 1]), np.array([3.0, 1.0, 5.0])).compute()
        0.75
    """

    def __init__(self) -> None:
        self._labels: list[_Scores] = []

    def reset(self) -> None:
        """Remove all scores."""
        self._labels = []

    def update(self, scores: Values, labels: Values, weights: Values | None = None) -> AUC:
        """Add a batch: `scores` and `labels` (in [0, 1]; NaN is unknown), each [B] or [B, L], and `weights` [B].

        Raises:
            ConfigError: A NaN score, a label outside [0, 1], a weight that is not a finite number >= 0, or shapes that
                do not match (this batch or an earlier one).
        """
        score_columns, label_columns = as_columns("AUC", scores, labels)
        sample_weights = as_weights("AUC", weights, len(score_columns))
        check_labels("AUC", label_columns, "share")
        self._expect_labels(score_columns.shape[1])
        for label, scores_of_label in enumerate(self._labels):
            scores_of_label.add(score_columns[:, label], label_columns[:, label], sample_weights)
        return self

    def merge(self, other: AUC) -> AUC:
        """Add the samples of `other`, which is not changed."""
        if other._labels:
            self._expect_labels(len(other._labels))
            for mine, theirs in zip(self._labels, other._labels, strict=True):
                mine.extend(theirs)
        return self

    def per_label(self) -> tuple[float, ...]:
        """Return the AUC of every label; NaN where one side is empty. Empty before the first update."""
        return tuple(scores_of_label.auc() for scores_of_label in self._labels)

    def compute(self) -> float:
        """Return the mean over the labels; NaN before the first update or if a label has one side only."""
        return mean_over_labels(self.per_label())

    def _expect_labels(self, num_labels: int) -> None:
        if not self._labels:
            self._labels = [_Scores() for _ in range(num_labels)]
        if len(self._labels) != num_labels:
            raise ConfigError("AUC.update", f"got {num_labels} labels, expected {len(self._labels)} as before")


def auc_by_group(
    scores: FloatColumns, labels: FloatColumns, weights: FloatColumns | None, group: Integers, groups: int
) -> Floats:
    """Return the weighted AUC of each group of samples, float64[groups]; NaN where one side is empty.

    Sums are exact as long as float64 holds the sum of all weights, which it does for integer weights up to 2**53.

    Args:
        scores: Scores [N].
        labels: Labels in [0, 1], [N].
        weights: Weights [N]; None for ones.
        group: Group of each sample, int64[N] in [0, groups).
        groups: Number of groups.
    """
    if not len(scores):
        return np.full(groups, np.nan)
    # lexsort sorts twice; one group needs only the scores.
    order = np.lexsort((scores, group)) if groups > 1 else np.argsort(scores, kind="stable")
    ranked, group = scores[order], group[order]
    positive = labels[order].astype(np.float64)
    negative = 1.0 - positive
    if weights is not None:
        positive *= weights[order]
        negative *= weights[order]
    is_first = np.concatenate([[True], (ranked[1:] != ranked[:-1]) | (group[1:] != group[:-1])])
    firsts = np.flatnonzero(is_first)  # of each run of equal scores in a group
    run_group = group[firsts]
    positives, negatives = np.add.reduceat(positive, firsts), np.add.reduceat(negative, firsts)
    # Negatives below a run: those before it, less those before its group.
    before = negatives.cumsum() - negatives
    is_group_start = np.concatenate([[True], run_group[1:] != run_group[:-1]])
    starts = np.flatnonzero(is_group_start)
    below = before - before[starts][is_group_start.cumsum() - 1]
    # A positive wins against the negatives below its run of equal scores, and half against those in it.
    wins = np.bincount(run_group, positives * (below + negatives / 2), groups)
    pairs = np.bincount(run_group, positives, groups) * np.bincount(run_group, negatives, groups)
    areas: Floats = np.divide(wins, pairs, out=np.full(groups, np.nan), where=pairs > 0)
    return areas


class _Scores:
    """The scores of one label's samples: positive ones, negative ones, and the rest with their labels and weights."""

    def __init__(self) -> None:
        self._positive: list[FloatColumns] = []
        self._negative: list[FloatColumns] = []
        self._rest: list[FloatColumns] = []  # [3, n] each: score, label, weight

    def add(self, scores: FloatColumns, labels: FloatColumns, weights: FloatColumns | None) -> None:
        """Add scores [B] with their labels [B] in [0, 1] or NaN."""
        is_positive, is_negative = labels == 1, labels == 0
        if weights is not None:
            is_one = weights == 1
            # Those of weight 1 take 4 bytes each; only the rest keeps labels and weights.
            is_positive &= is_one
            is_negative &= is_one
        # A mask copies, so that the caller may use the memory again.
        self._positive.append(scores[is_positive])
        self._negative.append(scores[is_negative])
        is_rest = ~(is_positive | is_negative)
        if is_rest.any():
            sample_weights = np.ones_like(scores) if weights is None else weights
            is_rest &= ~np.isnan(labels) & (sample_weights > 0)
            self._rest.append(np.stack([scores[is_rest], labels[is_rest], sample_weights[is_rest]]))

    def extend(self, other: _Scores) -> None:
        """Add the scores of `other`."""
        self._positive.extend(other._positive)
        self._negative.extend(other._negative)
        self._rest.extend(other._rest)

    def auc(self) -> float:
        """Return the AUC; NaN if there is nothing on one side."""
        for scores in (self._positive, self._negative):
            scores[:] = [np.sort(np.concatenate(scores))]  # later calls sort what is sorted
        positive, negative = self._positive[0], self._negative[0]
        if not self._rest:
            return _sorted_auc(positive, negative)
        rest_scores, rest_labels, rest_weights = np.concatenate(self._rest, axis=1)
        labels = np.concatenate([np.ones_like(positive), np.zeros_like(negative), rest_labels])
        weights = np.concatenate([np.ones(len(positive) + len(negative), np.float32), rest_weights])
        scores_of_all = np.concatenate([positive, negative, rest_scores])
        return float(auc_by_group(scores_of_all, labels, weights, np.zeros(len(labels), np.int64), 1)[0])


_BLOCK = 1 << 20  # positives ranked at a time, which bounds the memory of `searchsorted`'s int64 results


def _sorted_auc(positive: FloatColumns, negative: FloatColumns) -> float:
    pairs = len(positive) * len(negative)
    if pairs == 0:
        return math.nan
    # Python integers: the sum of half wins passes 2^63 from some 2^31 samples of each side on.
    half_wins = 0
    for start in range(0, len(positive), _BLOCK):
        block = positive[start : start + _BLOCK]
        below = np.searchsorted(negative, block, side="left")
        below_or_tied = np.searchsorted(negative, block, side="right")
        half_wins += int(below.sum()) + int(below_or_tied.sum())
    return half_wins / (2 * pairs)
