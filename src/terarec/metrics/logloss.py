"""Mean cross-entropy, and cross-entropy in relation to the entropy of the labels."""

from __future__ import annotations

import numpy as np

from terarec.metrics.columns import FloatColumns, Floats
from terarec.metrics.label_means import LabelMeanMetric


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
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """The cross-entropy of each sample."""
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
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """The cross-entropy and the label of each sample."""
        return np.stack([_logistic_loss(predictions, labels), labels.astype(np.float64)])

    @classmethod
    def finish(cls, means: Floats) -> Floats:
        """Cross-entropy / entropy of the mean label."""
        loss, mean_label = means
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -(mean_label * np.log(mean_label) + (1 - mean_label) * np.log1p(-mean_label))
            value: Floats = loss / entropy
        return value


def _logistic_loss(logits: FloatColumns, labels: FloatColumns) -> Floats:
    z, y = logits.astype(np.float64), labels.astype(np.float64)
    if np.isfinite(z).all():
        loss: Floats = np.maximum(z, 0.0) - z * y + np.log1p(np.exp(-np.abs(z)))
        return loss
    with np.errstate(invalid="ignore"):  # 0 * inf: an infinite logit on the right side costs nothing
        loss = y * np.logaddexp(0.0, -z) + (1.0 - y) * np.logaddexp(0.0, z)
    return np.nan_to_num(loss, nan=0.0, posinf=np.inf)


def _softmax_loss(logits: FloatColumns, labels: FloatColumns) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    of_label = np.take_along_axis(shifted, labels.astype(np.int64), axis=1)
    total: Floats = np.log(np.exp(shifted).sum(axis=1, keepdims=True)) - of_label
    return total
