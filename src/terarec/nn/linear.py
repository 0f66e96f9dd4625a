"""The fully connected layer that models are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from terarec.nn.initializers import Distribution
from terarec.ops import linear


class Linear(nn.Linear):
    """`torch.nn.Linear`, multiplied by the faster of torch's libraries on a CPU (`terarec.ops.linear`)."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """float[..., n] -> float[..., m]."""
        return linear(input, self.weight, self.bias)


def new_linear(
    fan_in: int, fan_out: int, *, weight: Distribution, bias: Distribution | None, generator: torch.Generator
) -> Linear:
    """A fully connected layer whose first weights come from `generator` alone; without bias if `bias` is None."""
    layer = Linear(fan_in, fan_out, bias=bias is not None, device="meta").to_empty(device="cpu")
    weight.fill_(layer.weight, generator)
    if bias is not None:
        bias.fill_(layer.bias, generator)
    return layer
