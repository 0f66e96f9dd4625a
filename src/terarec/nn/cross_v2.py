"""The cross layers of DCN V2 with whole kernels, and with a mixture of low-rank ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from terarec.nn.initializers import Distribution, xavier_normal
from terarec.nn.linear import new_linear


class CrossV2(nn.Module):
    """Cross layers with whole kernels (Wang et al. 2021, arXiv 2008.13535, eq. 1): x <- x0 * (W x + b) + x.

    Low-rank kernels are those of `terarec.nn.multi_cross.MultiCross`.

    Args:
        width: Width n of the input.
        num_layers: Number of layers.
        generator: Source of the first weights.
        initial: (fan_in, fan_out) -> distributions of a layer's first weight and bias.
    """

    def __init__(
        self,
        width: int,
        num_layers: int,
        *,
        generator: torch.Generator,
        initial: Callable[[int, int], tuple[Distribution, Distribution]],
    ) -> None:
        super().__init__()
        weight, bias = initial(width, width)
        self.layers = nn.ModuleList(
            new_linear(width, width, weight=weight, bias=bias, generator=generator) for _ in range(num_layers)
        )

    def forward(self, x0: Tensor) -> Tensor:
        """float[B, n] -> float[B, n]."""
        x = x0
        for layer in self.layers:
            x = torch.addcmul(x, x0, layer(x))
        return x


class CrossMixture(nn.Module):
    """Cross layers with a mixture of low-rank experts (Wang et al. 2021, arXiv 2008.13535, eq. 3 and 4).

    x <- sum over experts i of g_i(x) x0 * (U_i tanh(C_i tanh(V_i^T x)) + b) + x; g is a softmax over the experts of
    x . w_i, with gates w_i that all layers share.

    Args:
        width: Width n of the input.
        num_layers: Number of layers.
        rank: Rank r of the experts' kernels.
        experts: Number K of experts of a layer.
        generator: Source of the first weights, which are Xavier-normal; biases are 0.
    """

    def __init__(self, width: int, num_layers: int, *, rank: int, experts: int, generator: torch.Generator) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(num_layers, experts, rank, width))
        self.inner = nn.Parameter(torch.empty(num_layers, experts, rank, rank))
        self.up = nn.Parameter(torch.empty(num_layers, experts, width, rank))
        self.gate = nn.Parameter(torch.empty(experts, width))
        self.bias = nn.Parameter(torch.zeros(num_layers, width))
        for kernels in (self.down, self.inner, self.up):
            xavier_normal(kernels.shape[3], kernels.shape[2]).fill_(kernels, generator)
        xavier_normal(width, 1).fill_(self.gate, generator)

    def forward(self, x0: Tensor) -> Tensor:
        """float[B, n] -> float[B, n]."""
        x = x0
        for down, inner, up, bias in zip(self.down, self.inner, self.up, self.bias, strict=True):
            weights = nn.functional.linear(x, self.gate).softmax(1).to(x.dtype)
            hidden = torch.einsum("bn,krn->kbr", x, down).tanh()
            hidden = torch.einsum("kbr,kqr->kbq", hidden, inner).tanh()
            mixed = torch.einsum("bk,kbr,knr->bn", weights, hidden, up)  # the gates sum to 1, so b stays as it is
            x = torch.addcmul(x, x0, mixed + bias)
        return x
