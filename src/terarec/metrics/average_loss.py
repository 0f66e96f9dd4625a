"""Mean of the losses of batches."""

from __future__ import annotations

import math

from torch import Tensor


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
        """Forget every batch."""
        self._total, self._batches = 0.0, 0

    def update(self, loss: float | Tensor) -> AverageLoss:
        """Take in the mean loss of a batch, a number or a scalar; NaN and infinity stay."""
        self._total += loss.item() if isinstance(loss, Tensor) else loss
        self._batches += 1
        return self

    def merge(self, other: AverageLoss) -> AverageLoss:
        """Take in everything that `other` has seen; `other` stays as it is."""
        self._total += other._total
        self._batches += other._batches
        return self

    def compute(self) -> float:
        """The mean over the batches; NaN before the first one."""
        return self._total / self._batches if self._batches else math.nan
