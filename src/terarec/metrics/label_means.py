"""A mean for each label, taken from sums over batches."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from terarec.errors import ConfigError
from terarec.metrics.columns import mean_over_labels


class LabelMeans:
    """Streaming means in float64, one a label. Memory: a number a label, and the count.

    Args:
        metric: name of the metric whose errors these are.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._totals: npt.NDArray[np.float64] | None = None
        self._rows = 0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Take in the values [B, L] of a batch.

        Raises:
            ConfigError: another number of labels than before.
        """
        self._add(values.sum(axis=0), len(values))

    def merge(self, other: LabelMeans) -> None:
        """Take in everything that `other` has seen; `other` stays as it is."""
        if other._totals is not None:
            self._add(other._totals, other._rows)

    def values(self) -> tuple[float, ...]:
        """The mean of every label; empty before the first sample."""
        if self._totals is None or not self._rows:
            return ()
        return tuple(float(total) / self._rows for total in self._totals)

    def _add(self, totals: npt.NDArray[np.float64], rows: int) -> None:
        if self._totals is not None and len(self._totals) != len(totals):
            raise ConfigError(
                f"{self._metric}.update: got {len(totals)} labels, expected {len(self._totals)} as before"
            )
        self._totals = totals if self._totals is None else self._totals + totals
        self._rows += rows


class LabelMeanMetric:
    """A metric that is a mean over samples, for each label and then over labels."""

    NAME: ClassVar[str]

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every sample."""
        self._means = LabelMeans(self.NAME)

    def merge(self, other: Self) -> Self:
        """Take in everything that `other` has seen; `other` stays as it is."""
        self._means.merge(other._means)
        return self

    def per_label(self) -> tuple[float, ...]:
        """The mean of every label; empty before the first sample."""
        return self._means.values()

    def compute(self) -> float:
        """The mean over samples and labels; NaN before the first sample."""
        return mean_over_labels(self.per_label())
