"""How often a confident prediction is right."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from terarec.errors import ConfigError
from terarec.metrics.columns import Values, as_columns, mean_over_labels

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
        """Forget every sample."""
        self._counts = None

    def update(self, probabilities: Values, labels: Values) -> HitRate:
        """Take in a batch: `probabilities` and `labels` (1 is positive), each [B] or [B, L].

        Raises:
            ConfigError: a NaN probability, or shapes that do not match.
        """
        columns, label_columns = as_columns("HitRate", probabilities, labels)
        predicted = columns > THRESHOLD
        hits = predicted & (label_columns == 1)
        self._add(np.stack([hits.sum(axis=0), predicted.sum(axis=0)]).astype(np.int64))
        return self

    def merge(self, other: HitRate) -> HitRate:
        """Take in everything that `other` has seen; `other` stays as it is."""
        if other._counts is not None:
            self._add(other._counts)
        return self

    def per_label(self) -> tuple[float, ...]:
        """The share of every label; NaN where no probability was above 0.8. Empty before the first update."""
        if self._counts is None:
            return ()
        return tuple(int(hits) / int(count) if count else math.nan for hits, count in self._counts.T)

    def compute(self) -> float:
        """The mean over the labels; NaN before the first update or if a label has no share."""
        return mean_over_labels(self.per_label())

    def _add(self, counts: npt.NDArray[np.int64]) -> None:
        if self._counts is not None and self._counts.shape != counts.shape:
            raise ConfigError(
                f"HitRate.update: got {counts.shape[1]} labels, expected {self._counts.shape[1]} as before"
            )
        self._counts = counts if self._counts is None else self._counts + counts
