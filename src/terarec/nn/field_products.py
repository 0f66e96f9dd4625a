# SPDX-License-Identifier: Apache-2.0
"""Products of pairs of columns' vectors: of field-aware machines, and bilinear ones of FiBiNET and FinalMLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from terarec.nn.dense import new_linear
from terarec.nn.initializers import Distribution
from terarec.spec.interactions import BilinearKernels


def field_aware_products(vectors: Tensor) -> Tensor:
    """Return the products of the vectors that two columns have for each other, summed over all pairs of columns.

    Args:
        vectors: float[B, m, m, D]; [:, i, j] is the vector of column i for column j.

    Returns:
        float[B, D], the sum of v[i, j] * v[j, i] over i < j.
    """
    products = vectors * vectors.transpose(1, 2)
    # Both orders of a pair are in the sum over all i and j, and so are the columns with themselves.
    both = products.sum((1, 2)) - products.diagonal(dim1=1, dim2=2).sum(-1)
    return 0.5 * both


class BilinearProducts(nn.Module):
    """Products (v_i W) * v_j of all pairs i < j of m vectors (Huang et al. 2019, arXiv 1905.09433).

    Args:
        num_vectors: Number m of vectors a sample.
        width: Length D of a vector.
        kernels: "all": one W; "each": W_i for the first vector of a pair; "interaction": W_ij for each pair.
        generator: Source of the initial weights.
        initial: (fan_in, fan_out) -> distributions of a kernel's initial weights, and of a bias, which there is none.
    """

    _first: Tensor
    _second: Tensor

    def __init__(
        self,
        num_vectors: int,
        width: int,
        kernels: BilinearKernels,
        *,
        generator: torch.Generator,
        initial: Callable[[int, int], tuple[Distribution, Distribution]],
    ) -> None:
        super().__init__()
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("_first", first, persistent=False)
        self.register_buffer("_second", second, persistent=False)
        self.out_width = first.numel() * width
        self.is_by_pair = kernels == "interaction"
        count = {"all": 1, "each": num_vectors - 1, "interaction": first.numel()}[kernels]
        self.kernels = nn.Parameter(torch.empty(count, width, width))
        weight, _ = initial(width, width)
        weight.fill_(self.kernels, generator)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the products of all pairs side by side: float[B, m, D] -> float[B, m (m - 1) / 2 * D]."""
        second = vectors.index_select(1, self._second)
        if self.is_by_pair:
            # p: pair; d and e: elements of a vector.
            projected = torch.einsum("bpd,pde->bpe", vectors.index_select(1, self._first), self.kernels)
        else:
            # The last vector is the first one of no pair. One kernel broadcasts to all others.
            others = vectors[:, :-1].unsqueeze(2) @ self.kernels
            projected = others.squeeze(2).index_select(1, self._first)
        return (projected.to(second.dtype) * second).flatten(1)


class BilinearFusion(nn.Module):
    """Outputs of two vectors: b + w . (x || y) + sum over heads of x_h^T W_h y_h (Mao et al. 2023, arXiv 2304.00902).

    Args:
        first_width: Width n of x.
        second_width: Width m of y.
        heads: Parts of x and of y, side by side.
        num_outputs: Number of outputs C.
        generator: Source of the initial weights.
        initial: (fan_in, fan_out) -> distributions of a layer's initial weight and bias.
    """

    def __init__(
        self,
        first_width: int,
        second_width: int,
        heads: int,
        num_outputs: int,
        *,
        generator: torch.Generator,
        initial: Callable[[int, int], tuple[Distribution, Distribution]],
    ) -> None:
        super().__init__()
        weight, bias = initial(first_width + second_width, num_outputs)
        self.linear = new_linear(first_width + second_width, num_outputs, weight=weight, bias=bias, generator=generator)
        first, second = first_width // heads, second_width // heads
        self.kernels = nn.Parameter(torch.empty(heads, num_outputs, first, second))
        initial(first, second)[0].fill_(self.kernels, generator)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the outputs: float[B, n], float[B, m] -> float[B, C]."""
        heads, num_outputs, first, second = self.kernels.shape
        # h: head, c: output, i and j: elements of x and y.
        projected = torch.einsum("bhi,hcij->bhcj", x.reshape(-1, heads, first), self.kernels)
        forms = (projected * y.reshape(-1, heads, 1, second)).sum((1, 3))
        out: Tensor = self.linear(torch.cat([x, y], dim=1)) + forms.view(-1, num_outputs)
        return out
