"""How often the predicted class is the label's."""

from __future__ import annotations

import numpy as np

from terarec.metrics.columns import FloatColumns, Floats
from terarec.metrics.label_means import LabelMeanMetric


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
    def terms(cls, predictions: FloatColumns, labels: FloatColumns) -> Floats:
        """1 for a sample whose class is predicted, 0 for another."""
        if predictions.shape != labels.shape:
            right = predictions.argmax(axis=1)[:, None] == labels
        else:
            right = (predictions > 0.5) == (labels > 0.5)
        terms: Floats = right.astype(np.float64)[None]
        return terms
