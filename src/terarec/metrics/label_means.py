"""Metrics that are functions of means over samples: the sums of their terms, by label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import (
    FloatColumns,
    Floats,
    Integers,
    LabelRange,
    Values,
    as_columns,
    as_weights,
    check_class_numbers,
    check_labels,
    check_one_score,
    mean_over_labels,
)


class LabelMeanMetric(ABC):
    """A metric that is a function of weighted means over the samples, for each label and then over labels.

    A sample whose label is unknown (NaN) does not count for that label. A subclass says what is averaged (`terms`) and
    what is made of the means (`finish`). Memory: a few numbers a label.

    Attributes:
        NAME: name in errors.
        LABELS: accepted labels.
        TAKES_CLASSES: whether scores [B, C] with the numbers of classes as labels are accepted.
    """

    NAME: ClassVar[str]
    LABELS: ClassVar[LabelRange]
    TAKES_CLASSES: ClassVar[bool] = False

    def __init__(self) -> None:
        self.reset()

    @classmethod
    @abstractmethod
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """The T terms of each sample and label, float64[T, B, L]; no label is NaN."""

    @classmethod
    def finish(cls, means: Floats) -> Floats:
        """The metric, float64[...], from the means of the terms, float64[T, ...]."""
        value: Floats = means[0]
        return value

    @classmethod
    def check(cls, predictions: FloatColumns, labels: FloatColumns) -> None:
        """Raise `ConfigError` if a label, or a prediction, is not what the metric accepts."""
        if predictions.shape != labels.shape:
            if not cls.TAKES_CLASSES:
                check_one_score(cls.NAME, predictions, labels)
            check_class_numbers(cls.NAME, labels, predictions.shape[1])
        else:
            check_labels(cls.NAME, labels, cls.LABELS)

    @classmethod
    def by_part(
        cls, predictions: FloatColumns, labels: FloatColumns, weights: FloatColumns | None, part: Integers, parts: int
    ) -> Floats:
        """The metric of each part of the samples of one label, float64[parts]; NaN for a part without weight.

        Args:
            predictions: Predictions [N, 1], or [N, C] for classes.
            labels: Known labels [N, 1].
            weights: Weights [N]; None for ones.
            part: Part of each sample, int64[N].
            parts: Number of parts.
        """
        totals = np.stack(
            [
                np.bincount(part, term[:, 0] if weights is None else term[:, 0] * weights, parts).astype(np.float64)
                for term in cls.terms(predictions, labels)
            ]
        )
        return cls._of_sums(totals, np.bincount(part, weights, parts).astype(np.float64))

    def reset(self) -> None:
        """Forget every sample."""
        self._totals: Floats | None = None  # [T, L]
        self._weights = np.zeros(0)  # [L]

    def update(self, predictions: Values, labels: Values, weights: Values | None = None) -> Self:
        """Take in a batch: `predictions` and `labels`, each [B] or [B, L], and `weights` [B] of the samples.

        Raises:
            ConfigError: a NaN prediction, a label or weight that is not accepted, or shapes that do not match.
        """
        predicted, truth = as_columns(self.NAME, predictions, labels, allow_classes=self.TAKES_CLASSES)
        sample_weights = as_weights(self.NAME, weights, len(truth))
        self.check(predicted, truth)
        counted = None if sample_weights is None else np.broadcast_to(sample_weights[:, None], truth.shape)
        unknown = np.isnan(truth)
        if unknown.any():
            counted = np.where(unknown, np.float32(0), np.float32(1) if counted is None else counted)
            truth = np.where(unknown, np.float32(0), truth)
        terms = self.terms(predicted, truth)
        if counted is None:
            self._add(terms.sum(axis=1), np.full(truth.shape[1], len(truth), np.float64))
        else:
            # A term may be infinite where nothing counts.
            totals = np.where(counted > 0, terms, 0.0) * counted
            self._add(totals.sum(axis=1), counted.sum(axis=0, dtype=np.float64))
        return self

    def merge(self, other: Self) -> Self:
        """Take in everything that `other` has seen; `other` stays as it is."""
        if other._totals is not None:
            self._add(other._totals, other._weights)
        return self

    def per_label(self) -> tuple[float, ...]:
        """The value of every label; NaN for a label without weight. Empty before the first update."""
        if self._totals is None:
            return ()
        return tuple(self._of_sums(self._totals, self._weights).tolist())

    def compute(self) -> float:
        """The mean over the labels; NaN before the first sample."""
        return mean_over_labels(self.per_label())

    def _add(self, totals: Floats, weights: Floats) -> None:
        if self._totals is not None and len(self._weights) != len(weights):
            raise ConfigError(f"{self.NAME}.update: got {len(weights)} labels, expected {len(self._weights)} as before")
        self._totals = totals if self._totals is None else self._totals + totals
        self._weights = weights if not len(self._weights) else self._weights + weights

    @classmethod
    def _of_sums(cls, totals: Floats, weights: Floats) -> Floats:
        means = np.divide(totals, weights, out=np.full_like(totals, np.nan), where=weights > 0)
        return cls.finish(means)
