"""Mean binary cross-entropy."""

from __future__ import annotations

import numpy as np

from terarec.errors import ConfigError
from terarec.metrics.columns import Values, as_columns
from terarec.metrics.label_means import LabelMeanMetric


class LogLoss(LabelMeanMetric):
    """Streaming mean of -log p(label) over samples and labels, natural logarithm, from logits, in float64.

    Memory: two numbers a label. Exact up to float64 rounding; the probability is never formed, so no clipping.
    """

    NAME = "LogLoss"

    def update(self, logits: Values, labels: Values) -> LogLoss:
        """Take in a batch: `logits` and `labels` (in [0, 1]), each [B] or [B, L].

        Raises:
            ConfigError: a NaN logit, a label outside [0, 1], or shapes that do not match.
        """
        logit_columns, label_columns = as_columns(self.NAME, logits, labels)
        outside = ~((label_columns >= 0) & (label_columns <= 1))
        if outside.any():
            raise ConfigError(f"LogLoss.update: got the label {label_columns[outside][0]}, expected 0 to 1")
        z, y = logit_columns.astype(np.float64), label_columns.astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 * inf: an infinite logit on the right side costs nothing
            loss = y * np.logaddexp(0.0, -z) + (1.0 - y) * np.logaddexp(0.0, z)
        self._means.add(np.nan_to_num(loss, nan=0.0, posinf=np.inf))
        return self
