"""Mean binary cross-entropy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from terarec.errors import ConfigError
from terarec.metrics.columns import Values, as_columns, mean_over_labels


class LogLoss:
    """Streaming mean of -log p(label) over samples and labels, natural logarithm, from logits, in float64.

    Memory: two numbers a label. Exact up to float64 rounding; the probability is never formed, so no clipping.
    """

    def __init__(self) -> None:
        self._total: npt.NDArray[np.float64] | None = None
        self._rows = 0

    def reset(self) -> None:
        """Forget every sample."""
        self._total, self._rows = None, 0

    def update(self, logits: Values, labels: Values) -> LogLoss:
        """Take in a batch: `logits` and `labels` (in [0, 1]), each [B] or [B, L].

        Raises:
            ConfigError: a NaN logit, a label outside [0, 1], or shapes that do not match.
        """
        logit_columns, label_columns = as_columns("LogLoss", logits, labels)
        outside = ~((label_columns >= 0) & (label_columns <= 1))
        if outside.any():
            raise ConfigError(f"LogLoss.update: got the label {label_columns[outside][0]}, expected 0 to 1")
        z, y = logit_columns.astype(np.float64), label_columns.astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 * inf: an infinite logit on the right side costs nothing
            loss = y * np.logaddexp(0.0, -z) + (1.0 - y) * np.logaddexp(0.0, z)
        self._add(np.nan_to_num(loss, nan=0.0, posinf=np.inf).sum(axis=0), len(loss))
        return self

    def merge(self, other: LogLoss) -> LogLoss:
        """Take in everything that `other` has seen; `other` stays as it is."""
        if other._total is not None:
            self._add(other._total, other._rows)
        return self

    def per_label(self) -> tuple[float, ...]:
        """The mean loss of every label; empty before the first sample."""
        if self._total is None or not self._rows:
            return ()
        return tuple(float(total) / self._rows for total in self._total)

    def compute(self) -> float:
        """The mean over samples and labels; NaN before the first sample."""
        return mean_over_labels(self.per_label())

    def _add(self, total: npt.NDArray[np.float64], rows: int) -> None:
        if self._total is not None and len(self._total) != len(total):
            raise ConfigError(f"LogLoss.update: got {len(total)} labels, expected {len(self._total)} as before")
        self._total = total if self._total is None else self._total + total
        self._rows += rows
