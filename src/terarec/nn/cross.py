"""Cross layers of the Deep & Cross Networks (Wang et al. 2017 and 2021): rank-one, low-rank, full, and mixtures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from terarec.nn.dense import new_linear
from terarec.nn.initializers import Distribution, by_scheme, constant, scheme_option, xavier_normal
from terarec.nn.layer import FileTensor, TensorShape, WeightedLayer
from terarec.nn.layer_option import integer


class MultiCross(WeightedLayer):
    """A stack of cross layers over x0, its input: rank-one kernels, or low-rank ones with `projection_dim`.

    Version 1 is x_{l+1} = x0 (x_l . w_l) + b_l + x_l. As x_l = c_l x0 + d_l with a number c_l a sample and a vector d_l
    for the batch, all x_l . w_l follow from the one product x0 W: however deep, the stack costs one GEMM and one pass
    over x0.
    """

    KIND = "multi_cross"
    OPTIONS = (
        integer("num_layers", "cross layers"),
        integer("projection_dim", "rank of the kernels of version 2; 0 is version 1", default=0, low=0),
        scheme_option("weight_init", "first kernels: zero, or all others the default"),
        scheme_option("bias_init", "first biases: 0 for every value"),
    )
    SHAPES = "[B, n] -> [B, n]"
    FORMULA = (
        "x <- x0 (x . w_l) + b_l + x; with projection_dim x <- x0 * (x U_l V_l + b_l) + x; "
        "w_l, U_l, V_l Xavier-normal, b_l 0"
    )

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        num_layers: int,
        projection_dim: int,
        weight_init: str,
        bias_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        self.require(len(shape.dims) == 1, shapes, "one input of two dimensions")
        super().__init__(shapes)
        width, rank = shape.dims[0], projection_dim
        self.weight: nn.Parameter | None = None
        if rank:
            self.project = nn.Parameter(torch.empty(num_layers, rank, width))
            self.expand = nn.Parameter(torch.empty(num_layers, width, rank))
            kernels = [kernel for pair in zip(self.project, self.expand, strict=True) for kernel in pair]
        else:
            self.weight = nn.Parameter(torch.empty(num_layers, width))
            kernels = list(self.weight)
        distribution = by_scheme(weight_init, default=xavier_normal(width, rank or width))
        for kernel in kernels:
            distribution.fill_(kernel, generator)
        self.bias = nn.Parameter(torch.empty(num_layers, width))
        by_scheme(bias_init, default=constant(0.0)).fill_(self.bias, generator)

    def file_tensors(self) -> list[FileTensor]:
        """Of each layer w [1, n], or U [n, projection_dim] and V [projection_dim, n]; then b [1, n]."""
        entries = []
        for layer in range(len(self.bias)):
            if self.weight is None:
                entries += [FileTensor(self.project, _matrix(layer)), FileTensor(self.expand, _matrix(layer))]
            else:
                entries.append(FileTensor(self.weight, _row(layer)))
            entries.append(FileTensor(self.bias, _row(layer)))
        return entries

    def forward(self, x: Tensor) -> Tensor:
        """float[B, n] -> float[B, n]."""
        return self._low_rank(x) if self.weight is None else self._rank_one(x, self.weight)

    def _rank_one(self, x0: Tensor, weight: Tensor) -> Tensor:
        dots = (weight @ x0.t()).to(self.bias.dtype).unbind(0)
        offsets = (self.bias @ weight.t()).triu(1).sum(0).unbind(0)  # d_l . w_l = sum over j < l of b_j . w_l
        scale = dots[0] + 1
        for dot, offset in zip(dots[1:], offsets[1:], strict=True):
            scale = torch.addcmul(scale + offset, scale, dot)
        return torch.addcmul(self.bias.sum(0), x0, scale.unsqueeze(1))

    def _low_rank(self, x0: Tensor) -> Tensor:
        x = x0
        for project, expand, bias in zip(
            self.project.unbind(0), self.expand.unbind(0), self.bias.unbind(0), strict=True
        ):
            x = torch.addcmul(x, x0, linear(linear(x, project), expand, bias))
        return x


def _row(layer: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[layer : layer + 1]


def _matrix(layer: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[layer].t()


class CrossV2(nn.Module):
    """Cross layers with full kernels (Wang et al. 2021, arXiv 2008.13535, eq. 1): x <- x0 * (W x + b) + x.

    Low-rank kernels are those of `terarec.nn.cross.MultiCross`.

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
