# SPDX-License-Identifier: Apache-2.0
"""NDCG and HitRate as HugeCTR defines them: over all samples of an evaluation, without groups."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from terarec.errors import ConfigError
from terarec.metrics.columns import FloatColumns, Values, as_columns, mean_over_labels


class NDCG:
    """Exact streaming NDCG: DCG / ideal DCG with DCG = sum of label / log2(rank + 1), ranks from 1 by descending score.

    All samples since the last `reset` make one ranking, as HugeCTR's `MetricsType.NDCG` has it; there are no queries.
    Samples of one score share the mean of their gains, so that the order of the input has no effect.

    Memory: 8 bytes a score; `compute` needs some 40 more for each of one label's while it sorts them.

    With L labels, each has its own ranking. A label that is 0 throughout has no ideal: it is NaN, and so is the mean.

    Example:
        >>> NDCG().update(np.array([0.3, 0.2, 0.1]), np.array([0, 1, 0])).compute()
        0.6309297535714575
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all samples."""
        self._batches: list[tuple[FloatColumns, FloatColumns]] = []

    def update(self, scores: Values, labels: Values) -> NDCG:
        """Add a batch: `scores` and `labels` (gains), each [B] or [B, L].

        Raises:
            ConfigError: A NaN score, a label that is not a finite number >= 0, or shapes that do not match (this batch
                or an earlier one).
        """
        score_columns, label_columns = as_columns("NDCG", scores, labels)
        bad = ~((label_columns >= 0) & (label_columns < np.inf))
        if bad.any():
            raise ConfigError("NDCG.update", f"got the label {label_columns[bad][0]}, expected finite numbers >= 0")
        self._expect_labels(score_columns.shape[1])
        self._batches.append((score_columns.copy(), label_columns.copy()))  # the caller may reuse the memory
        return self

    def merge(self, other: NDCG) -> NDCG:
        """Add the samples of `other`, which is not changed."""
        if other._batches:
            self._expect_labels(other._batches[0][0].shape[1])
            self._batches.extend(other._batches)
        return self

    def per_label(self) -> tuple[float, ...]:
        """Return the gain of every label; NaN where all of its labels are 0. Empty before the first update."""
        num_labels = self._batches[0][0].shape[1] if self._batches else 0
        return tuple(
            _gain(*(np.concatenate([part[:, label] for part in parts]) for parts in zip(*self._batches, strict=True)))
            for label in range(num_labels)
        )

    def compute(self) -> float:
        """Return the mean over the labels; NaN before the first update or if a label has no gain."""
        return mean_over_labels(self.per_label())

    def _expect_labels(self, num_labels: int) -> None:
        if self._batches and self._batches[0][0].shape[1] != num_labels:
            before = self._batches[0][0].shape[1]
            raise ConfigError("NDCG.update", f"got {num_labels} labels, expected {before} as before")


def _gain(scores: FloatColumns, labels: FloatColumns) -> float:
    """Return the NDCG of one label's samples."""
    discounts = 1.0 / np.log2(np.arange(2, len(scores) + 2))
    ideal = float(np.sort(labels)[::-1] @ discounts)
    if ideal == 0.0:
        return math.nan
    order = np.argsort(scores)[::-1]
    falling = scores[order]
    # Equal scores have no order, so that each of their samples gets the mean discount of their ranks.
    starts = np.flatnonzero(np.concatenate([[True], falling[1:] != falling[:-1]]))  # of samples of one score
    return float(_sums(labels[order], starts) / np.diff(starts, append=len(scores)) @ _sums(discounts, starts)) / ideal


def _sums(values: npt.NDArray[np.floating], starts: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    return np.add.reduceat(values, starts, dtype=np.float64)


# In float32, as probabilities are: 0.8 in float32 is above 0.8 in float64, and would count as a prediction.
THRESHOLD = np.float32(0.8)
"""Probabilities above it are predictions; HugeCTR fixes it (`MetricsType.HitRate`)."""


class HitRate:
    """Streaming share of positive labels among the samples with a probability above 0.8.

    With L labels, each has its own share. A label without any such sample has none: it is NaN, and so is the mean.
    Memory: two numbers a label.

    Example:
        >>> HitRate().update(np.array([0.9, 0.95, 0.8, 0.1]), np.array([1, 0, 1, 1])).compute()
        0.5
    """

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] | None = None  # [2, L]: hits, predictions

    def reset(self) -> None:
        """Remove all samples."""
        self._counts = None

    def update(self, probabilities: Values, labels: Values) -> HitRate:
        """Add a batch: `probabilities` and `labels` (1 is positive), each [B] or [B, L].

        Raises:
            ConfigError: A NaN probability, or shapes that do not match.
        """
        columns, label_columns = as_columns("HitRate", probabilities, labels)
        predicted = columns > THRESHOLD
        hits = predicted & (label_columns == 1)
        self._add(np.stack([hits.sum(axis=0), predicted.sum(axis=0)]).astype(np.int64))
        return self

    def merge(self, other: HitRate) -> HitRate:
        """Add the samples of `other`, which is not changed."""
        if other._counts is not None:
            self._add(other._counts)
        return self

    def per_label(self) -> tuple[float, ...]:
        """Return the share of every label; NaN where no probability was above 0.8. Empty before the first update."""
        if self._counts is None:
            return ()
        return tuple(int(hits) / int(count) if count else math.nan for hits, count in self._counts.T)

    def compute(self) -> float:
        """Return the mean over the labels; NaN before the first update or if a label has no share."""
        return mean_over_labels(self.per_label())

    def _add(self, counts: npt.NDArray[np.int64]) -> None:
        if self._counts is not None and self._counts.shape != counts.shape:
            raise ConfigError(
                "HitRate.update", f"got {counts.shape[1]} labels, expected {self._counts.shape[1]} as before"
            )
        self._counts = counts if self._counts is None else self._counts + counts
