"""Normalization over the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from terarec.nn.initializers import by_scheme, constant, scheme_option
from terarec.nn.layer import FileTensor, TensorShape, WeightedLayer, whole
from terarec.nn.layer_option import number


class LayerNorm(WeightedLayer):
    """Rows with their own mean and variance taken out (Ba et al. 2016)."""

    KIND = "layer_norm"
    OPTIONS = (
        number("eps", "added to the variance", default=1e-5, low=0.0),
        scheme_option("gamma_init", "first gamma: zero, or all others 1"),
        scheme_option("beta_init", "first beta: 0 whatever is chosen"),
    )
    SHAPES = "[B, ..., n] -> the same"
    FORMULA = "y = gamma (x - mean) / sqrt(var + eps) + beta over the last dimension"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        eps: float,
        gamma_init: str,
        beta_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        self.require(len(shape.dims) >= 1, shapes, "at least two dimensions")
        super().__init__(shapes)
        self.eps = eps
        self.gamma = nn.Parameter(torch.empty(shape.dims[-1]))
        self.beta = nn.Parameter(torch.empty(shape.dims[-1]))
        by_scheme(gamma_init, default=constant(1.0)).fill_(self.gamma, generator)
        by_scheme(beta_init, default=constant(0.0)).fill_(self.beta, generator)

    def file_tensors(self) -> list[FileTensor]:
        """The two vectors gamma [n] and beta [n]."""
        return [FileTensor(self.gamma, whole), FileTensor(self.beta, whole)]

    def forward(self, x: Tensor) -> Tensor:
        """float[B, ..., n] -> the same."""
        return layer_norm(x, (x.shape[-1],), self.gamma, self.beta, self.eps)
