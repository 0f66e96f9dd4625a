# SPDX-License-Identifier: Apache-2.0
"""Metrics that are means over samples or batches: log loss, errors of values, accuracy, mean loss, throughput."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

import numpy as np
from torch import Tensor
from typing_extensions import override

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

    A sample whose label is unknown (NaN) does not count for that label. A subclass defines the averaged terms (`terms`)
    and the result of their means (`finish`). Memory: a few numbers a label.

    Attributes:
        NAME: Name in errors.
        LABELS: Accepted labels.
        TAKES_CLASSES: Whether scores [B, C] with the numbers of classes as labels are accepted.
    """

    NAME: ClassVar[str]
    LABELS: ClassVar[LabelRange]
    TAKES_CLASSES: ClassVar[bool] = False

    def __init__(self) -> None:
        self.reset()

    @classmethod
    @abstractmethod
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """Return the T terms of each sample and label, float64[T, B, L]; no label is NaN."""

    @classmethod
    def finish(cls, means: Floats) -> Floats:
        """Return the metric, float64[...], from the means of the terms, float64[T, ...]."""
        value: Floats = means[0]
        return value

    @classmethod
    def check(cls, predictions: FloatColumns, labels: FloatColumns) -> None:
        """Raise `ConfigError` if the metric does not accept a label or a prediction."""
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
        """Return the metric of each part of the samples of one label, float64[parts]; NaN for a part without weight.

        Args:
            predictions: Predictions [N, 1], or [N, C] for classes.
            labels: Known labels [N, 1].
            weights: Weights [N]; None for ones.
            part: Part of each sample, int64[N].
            parts: Number of parts.
        """
        # `bincount` adds in float64, in the order of the samples.
        totals = np.stack(
            [
                np.bincount(part, term[:, 0] if weights is None else term[:, 0] * weights, parts).astype(np.float64)
                for term in cls.terms(predictions, labels)
            ]
        )
        return cls._of_sums(totals, np.bincount(part, weights, parts).astype(np.float64))

    def reset(self) -> None:
        """Remove all samples."""
        self._totals: Floats | None = None  # [T, L]
        self._weights = np.zeros(0)  # [L]

    def update(self, predictions: Values, labels: Values, weights: Values | None = None) -> Self:
        """Add a batch: `predictions` and `labels`, each [B] or [B, L], and `weights` [B] of the samples.

        Raises:
            ConfigError: A NaN prediction, a label or weight that is not accepted, or shapes that do not match.
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
        """Add the samples of `other`, which is not changed."""
        if other._totals is not None:
            self._add(other._totals, other._weights)
        return self

    def per_label(self) -> tuple[float, ...]:
        """Return the value of every label; NaN for a label without weight. Empty before the first update."""
        if self._totals is None:
            return ()
        return tuple(self._of_sums(self._totals, self._weights).tolist())

    def compute(self) -> float:
        """Return the mean over the labels; NaN before the first sample."""
        return mean_over_labels(self.per_label())

    def _add(self, totals: Floats, weights: Floats) -> None:
        if self._totals is not None and len(self._weights) != len(weights):
            raise ConfigError(
                f"{self.NAME}.update", f"got {len(weights)} labels, expected {len(self._weights)} as before"
            )
        self._totals = totals if self._totals is None else self._totals + totals
        self._weights = weights if not len(self._weights) else self._weights + weights

    @classmethod
    def _of_sums(cls, totals: Floats, weights: Floats) -> Floats:
        means = np.divide(totals, weights, out=np.full_like(totals, np.nan), where=weights > 0)
        return cls.finish(means)


class LogLoss(LabelMeanMetric):
    """Streaming weighted mean of -log p(label) over samples, natural logarithm, from logits, in float64.

    Labels are numbers in [0, 1]: -(y log p + (1 - y) log(1 - p)) with p = sigmoid(logit). With logits [B, C] of several
    classes, labels are the numbers of the classes: -log softmax(logits)[label]. NaN is an unknown label.

    Exact up to float64 rounding; the probability is never formed, so no clipping.
    """

    NAME = "LogLoss"
    LABELS = "share"
    TAKES_CLASSES = True

    @classmethod
    @override
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        if predictions.shape != labels.shape:
            return _softmax_loss(predictions, labels)[None]
        return _logistic_loss(predictions, labels)[None]


class NormalizedEntropy(LabelMeanMetric):
    """Streaming normalised entropy: mean log loss / entropy of the mean label; below 1 is better than the mean label.

    NE = mean(-(y log p + (1 - y) log(1 - p))) / -(q log q + (1 - q) log(1 - q)) with p = sigmoid(logit) and q the mean
    of the labels (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD). Both means are
    weighted. Labels are numbers in [0, 1]; NaN is an unknown label. The value is NaN where all labels are 0 or all 1.
    """

    NAME = "NormalizedEntropy"
    LABELS = "share"

    @classmethod
    @override
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        return np.stack([_logistic_loss(predictions, labels), labels.astype(np.float64)])

    @classmethod
    @override
    def finish(cls, means: Floats) -> Floats:
        loss, mean_label = means
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -(mean_label * np.log(mean_label) + (1 - mean_label) * np.log1p(-mean_label))
            value: Floats = loss / entropy
        return value


def _logistic_loss(logits: FloatColumns, labels: FloatColumns) -> Floats:
    z, y = logits.astype(np.float64), labels.astype(np.float64)
    if np.isfinite(z).all():
        # This form never takes the exponential of a positive number, so that no logit overflows.
        loss: Floats = np.maximum(z, 0.0) - z * y + np.log1p(np.exp(-np.abs(z)))
        return loss
    with np.errstate(invalid="ignore"):  # 0 * inf: an infinite logit on the right side costs nothing
        loss = y * np.logaddexp(0.0, -z) + (1.0 - y) * np.logaddexp(0.0, z)
    return np.nan_to_num(loss, nan=0.0, posinf=np.inf)


def _softmax_loss(logits: FloatColumns, labels: FloatColumns) -> Floats:
    # The largest exponent is 0, so that none overflows.
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    of_label = np.take_along_axis(shifted, labels.astype(np.int64), axis=1)
    total: Floats = np.log(np.exp(shifted).sum(axis=1, keepdims=True)) - of_label
    return total


class MSE(LabelMeanMetric):
    """Streaming weighted mean of (p - y)^2, in float64; with probabilities this is the Brier score.

    Example:
        >>> MSE().update(np.array([1.0, 3.0]), np.array([1.0, 1.0])).compute()
        2.0
    """

    NAME = "MSE"
    LABELS = "value"

    @classmethod
    @override
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        return np.square(predictions.astype(np.float64) - labels)[None]


class RMSE(MSE):
    """Streaming root of the weighted mean of (p - y)^2, in float64; the root is taken for each label."""

    NAME = "RMSE"

    @classmethod
    @override
    def finish(cls, means: Floats) -> Floats:
        value: Floats = np.sqrt(means[0])
        return value


class MAE(LabelMeanMetric):
    """Streaming weighted mean of abs(p - y), in float64."""

    NAME = "MAE"
    LABELS = "value"

    @classmethod
    @override
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        return np.abs(predictions.astype(np.float64) - labels)[None]


class SMAPE(LabelMeanMetric):
    """Streaming weighted mean of abs(p - y) / ((p + y) / 2), in float64; from 0, the best, to 2.

    A sample with p = y = 0 counts 0. Predictions and labels are finite and not negative. The form of HugeCTR's
    `MetricsType.SMAPE`.

    Example:
        >>> SMAPE().update(np.array([0.5, 1.0]), np.array([1.0, 1.0])).compute()
        0.3333333333333333
    """

    NAME = "SMAPE"
    LABELS = "gain"

    @classmethod
    @override
    def check(cls, predictions: FloatColumns, labels: FloatColumns) -> None:
        # Negated, since NaN fails every comparison.
        bad = ~((predictions >= 0) & (predictions < np.inf))
        if bad.any():
            raise ConfigError("SMAPE.update", f"got the prediction {predictions[bad][0]}, expected finite numbers >= 0")
        super().check(predictions, labels)

    @classmethod
    @override
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        p, y = predictions.astype(np.float64), labels.astype(np.float64)
        half_sum = (p + y) / 2
        return np.divide(np.abs(p - y), half_sum, out=np.zeros_like(p), where=half_sum > 0)[None]


class Accuracy(LabelMeanMetric):
    """Streaming weighted share of samples whose predicted class is that of the label.

    One score a label: a probability above 0.5 predicts 1, and a label above 0.5 is 1. Several scores for one label: the
    class of the highest score (the first of equal ones) is predicted, and the label is the number of a class. NaN is an
    unknown label.

    Example:
        >>> Accuracy().update(np.array([0.9, 0.4, 0.6]), np.array([1, 0, 0])).compute()
        0.6666666666666666
        >>> Accuracy().update(np.array([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]]), np.array([1, 2])).compute()
        0.5
    """

    NAME = "Accuracy"
    LABELS = "share"
    TAKES_CLASSES = True

    @classmethod
    @override
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        if predictions.shape != labels.shape:
            right = predictions.argmax(axis=1)[:, None] == labels
        else:
            right = (predictions > 0.5) == (labels > 0.5)
        terms: Floats = right.astype(np.float64)[None]
        return terms


class AverageLoss:
    """Streaming mean of the losses of batches, in float64; each batch counts the same, whatever its size.

    Unlike `LogLoss` it takes what the model's own loss gave, regularisation included. Memory: two numbers.

    Example:
        >>> AverageLoss().update(0.5).update(0.25).compute()
        0.375
    """

    def __init__(self) -> None:
        self._total, self._batches = 0.0, 0

    def reset(self) -> None:
        """Remove all batches."""
        self._total, self._batches = 0.0, 0

    def update(self, loss: float | Tensor) -> AverageLoss:
        """Add the mean loss of a batch, a number or a scalar; NaN and infinity persist."""
        self._total += loss.item() if isinstance(loss, Tensor) else loss
        self._batches += 1
        return self

    def merge(self, other: AverageLoss) -> AverageLoss:
        """Add the samples of `other`, which is not changed."""
        self._total += other._total
        self._batches += other._batches
        return self

    def compute(self) -> float:
        """Return the mean over the batches; NaN before the first one."""
        return self._total / self._batches if self._batches else math.nan


class Throughput:
    """Counts samples and the wall-clock seconds since the start or the last `reset`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self.samples = 0
        self._start = self._clock()

    def update(self, samples: int) -> Throughput:
        """Count `samples` more."""
        self.samples += samples
        return self

    @property
    def seconds(self) -> float:
        """Wall-clock seconds counted."""
        return self._clock() - self._start

    def compute(self) -> float:
        """Return the samples a second; 0.0 before any time has passed."""
        seconds = self.seconds
        return self.samples / seconds if seconds > 0 else 0.0
