"""The activation of the Deep Interest Network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import number


class PReLUDice(Layer):
    """A leaky unit whose gate adapts to the data (Zhou et al. 2018).

    Mean and variance are those of the batch at hand, of each column, in evaluation too: there is no state. The gradient
    is that of the formula, the statistics included.
    """

    KIND = "prelu_dice"
    OPTIONS = (
        number("alpha", "slope where the gate is shut", default=1.0),
        number("eps", "added to the variance", default=1e-5, low=0.0),
    )
    SHAPES = "[B, ...] -> the same"
    FORMULA = "y = p x + (1 - p) alpha x; p = 1 / (1 + exp((mean - x) / sqrt(var + eps)))"

    def __init__(self, shapes: Sequence[TensorShape], *, alpha: float, eps: float) -> None:
        super().__init__(shapes)
        self.alpha = alpha
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """float[B, ...] -> the same."""
        var, mean = torch.var_mean(x, dim=0, correction=0)
        gate = ((x - mean) * (var + self.eps).rsqrt()).sigmoid()
        return x * (self.alpha + (1 - self.alpha) * gate)
