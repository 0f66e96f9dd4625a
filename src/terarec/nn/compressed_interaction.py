"""The compressed interaction network of xDeepFM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from terarec.nn.initializers import Distribution
from terarec.nn.linear import new_linear


class CompressedInteraction(nn.Module):
    """Products of vectors of ever higher order, compressed to so many maps in each layer.

    x_k[h] = sum over i, j of W_k[h, i, j] (x_{k-1}[i] * x_0[j]) + b_k[h], elementwise along the vectors; the output is
    the sums of all maps of all layers along the vectors (Lian et al. 2018, arXiv 1803.05170, eq. 6 and 7). The
    activation is the identity, as in the paper.

    Args:
        num_vectors: Number m of vectors a sample.
        maps: Number of maps H_k of each layer.
        generator: Source of the first weights.
        initial: (fan_in, fan_out) -> distributions of a layer's first weight and bias.
    """

    def __init__(
        self,
        num_vectors: int,
        maps: Sequence[int],
        *,
        generator: torch.Generator,
        initial: Callable[[int, int], tuple[Distribution, Distribution]],
    ) -> None:
        super().__init__()
        self.out_width = sum(maps)
        self.layers = nn.ModuleList()
        for before, after in pairwise((num_vectors, *maps)):
            weight, bias = initial(before * num_vectors, after)
            self.layers.append(new_linear(before * num_vectors, after, weight=weight, bias=bias, generator=generator))

    def forward(self, vectors: Tensor) -> Tensor:
        """float[B, m, D] -> float[B, sum of the maps]."""
        first = vectors.transpose(1, 2)  # the maps in the last dimension, so that a layer is one matrix product
        x, sums = first, []
        for layer in self.layers:
            products = x.unsqueeze(3) * first.unsqueeze(2)
            x = layer(products.flatten(2))
            sums.append(x.sum(1))
        return torch.cat(sums, dim=1)
