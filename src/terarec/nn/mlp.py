"""A stack of fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them, and after the last one on request.

    Weights start normal with variance 2 / (in + out), biases normal with variance 1 / out, as the DLRM paper's code
    does (Naumov et al. 2019).

    Args:
        in_width: width of the input.
        widths: width of each layer's output.
        generator: source of the first weights.
        relu_last: whether ReLU follows the last layer too.
        dropout: probability of zeroing a hidden unit while training.
    """

    def __init__(
        self,
        in_width: int,
        widths: Sequence[int],
        *,
        generator: torch.Generator,
        relu_last: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = (in_width, *widths)
        self.layers = nn.ModuleList(_linear(fan_in, fan_out, generator) for fan_in, fan_out in pairwise(sizes))
        self.relu_last = relu_last
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """float[B, in_width] -> float[B, widths[-1]]."""
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index < last or self.relu_last:
                x = nn.functional.relu_(x)
                if self.dropout and index < last:
                    x = nn.functional.dropout(x, self.dropout, self.training)
        return x


def _linear(fan_in: int, fan_out: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (fan_in + fan_out)), generator=generator)
        layer.bias.normal_(0.0, math.sqrt(1.0 / fan_out), generator=generator)
    return layer
