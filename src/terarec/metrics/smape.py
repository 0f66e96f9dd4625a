"""Symmetric mean absolute percentage error."""

from __future__ import annotations

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import Values, as_columns
from terarec.metrics.label_means import LabelMeanMetric


class SMAPE(LabelMeanMetric):
    """Streaming mean of abs(p - y) / ((p + y) / 2) over samples and labels, in float64; from 0, the best, to 2.

    A sample with p = y = 0 counts 0. Memory: two numbers a label. The form of HugeCTR's `MetricsType.SMAPE`.

    Example:
        >>> SMAPE().update(np.array([0.5, 1.0]), np.array([1.0, 1.0])).compute()
        0.3333333333333333
    """

    NAME = "SMAPE"

    def update(self, predictions: Values, labels: Values) -> SMAPE:
        """Take in a batch: `predictions` and `labels`, each [B] or [B, L], finite and not negative.

        Raises:
            ConfigError: a prediction or a label that is no finite number >= 0, or shapes that do not match.
        """
        prediction_columns, label_columns = as_columns(self.NAME, predictions, labels)
        for name, columns in (("prediction", prediction_columns), ("label", label_columns)):
            bad = ~((columns >= 0) & (columns < np.inf))
            if bad.any():
                raise ConfigError(f"SMAPE.update: got the {name} {columns[bad][0]}, expected finite numbers >= 0")
        p, y = prediction_columns.astype(np.float64), label_columns.astype(np.float64)
        half_sum = (p + y) / 2
        self._means.add(np.divide(np.abs(p - y), half_sum, out=np.zeros_like(p), where=half_sum > 0))
        return self
