"""How far predicted values are from the labels."""

from __future__ import annotations

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import FloatColumns, Floats
from terarec.metrics.label_means import LabelMeanMetric


class MSE(LabelMeanMetric):
    """Streaming weighted mean of (p - y)^2, in float64; with probabilities this is the Brier score.

    Example:
        >>> MSE().update(np.array([1.0, 3.0]), np.array([1.0, 1.0])).compute()
        2.0
    """

    NAME = "MSE"
    LABELS = "value"

    @classmethod
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """The square of each error."""
        return np.square(predictions.astype(np.float64) - labels)[None]


class RMSE(MSE):
    """Streaming root of the weighted mean of (p - y)^2, in float64; the root is taken for each label."""

    NAME = "RMSE"

    @classmethod
    def finish(cls, means: Floats) -> Floats:
        """The root of the mean square."""
        value: Floats = np.sqrt(means[0])
        return value


class MAE(LabelMeanMetric):
    """Streaming weighted mean of abs(p - y), in float64."""

    NAME = "MAE"
    LABELS = "value"

    @classmethod
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """The size of each error."""
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
    def check(cls, predictions: FloatColumns, labels: FloatColumns) -> None:
        """Raise `ConfigError` unless predictions and labels are finite and not negative."""
        bad = ~((predictions >= 0) & (predictions < np.inf))
        if bad.any():
            raise ConfigError(f"SMAPE.update: got the prediction {predictions[bad][0]}, expected finite numbers >= 0")
        super().check(predictions, labels)

    @classmethod
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """The relative size of each error."""
        p, y = predictions.astype(np.float64), labels.astype(np.float64)
        half_sum = (p + y) / 2
        return np.divide(np.abs(p - y), half_sum, out=np.zeros_like(p), where=half_sum > 0)[None]
