"""Losses."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def logistic_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean binary cross entropy, a scalar in nats.

    Args:
        logits: [B, L], of any float type; the loss is computed in float32.
        labels: float32[B, L] in [0, 1].
    """
    return binary_cross_entropy_with_logits(logits.float(), labels)
