"""Activations of dense layers by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from terarec.nn.batch_norm import BatchNorm1d


class ReLUInPlace(nn.Module):
    """The positive part, written over the input: for what a linear layer or a norm has just made."""

    def forward(self, x: Tensor) -> Tensor:
        """Any float type and shape."""
        return nn.functional.relu_(x)


class Dice(nn.Module):
    """The data-adaptive activation of the Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978, eq. 3).

    y = p x + (1 - p) alpha x with p = 1 / (1 + exp(-(x - mean) / sqrt(var + eps))). Mean and variance of a column are
    those of the batch in training and running ones in evaluation, so that a score does not depend on the other samples
    of its batch; `alpha` is learned for each column. (`terarec.nn.prelu_dice` is HugeCTR's form, which has neither.)

    Args:
        width: Number of columns n.
        eps: Number added to the variance.
        momentum: Weight of a batch in the running statistics.
    """

    def __init__(self, width: int, *, eps: float = 1e-8, momentum: float = 0.01) -> None:
        super().__init__()
        self.norm = BatchNorm1d(width, eps=eps, momentum=momentum, affine=False)
        self.alpha = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """float[B, n] -> float[B, n]."""
        gate: Tensor = self.norm(x).sigmoid()
        return x * (self.alpha + (1 - self.alpha) * gate)


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda _: ReLUInPlace(),
    "gelu": lambda _: nn.GELU(),
    "silu": lambda _: nn.SiLU(),
    "tanh": lambda _: nn.Tanh(),
    "sigmoid": lambda _: nn.Sigmoid(),
    "prelu": nn.PReLU,
    "dice": Dice,
}
"""Name -> what makes the activation of so many columns."""


def new_activation(name: str, width: int) -> nn.Module:
    """The activation `name` of ``ACTIVATIONS`` for [B, width]."""
    return ACTIVATIONS[name](width)
