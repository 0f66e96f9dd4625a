"""A vector of weights for each input column."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terarec.nn.initializers import by_scheme, scheme_option, uniform, xavier_uniform
from terarec.nn.layer import FileTensor, TensorShape, WeightedLayer, whole
from terarec.nn.layer_option import integer, list_of


class WeightMultiply(WeightedLayer):
    """Turns each of s numbers into a vector: the number times the weights of its column."""

    KIND = "weight_multiply"
    OPTIONS = (
        list_of(integer("weight_dims", "columns s and length d of their vectors"), length=2),
        scheme_option("weight_init", "first weights"),
    )
    SHAPES = "[B, s] -> [B, s*d]"
    FORMULA = "y[b, s*d + j] = x[b, s] w[s, j]; w Xavier-uniform with fans s and s*d"

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        weight_dims: tuple[int, int],
        weight_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        columns, length = weight_dims
        self.require(shape.dims == (columns,), shapes, f"[B, {columns}]", weight_dims=weight_dims)
        super().__init__([TensorShape(shape.rows, (columns * length,))])
        self.weight = nn.Parameter(torch.empty(columns, length))
        fans = (columns, columns * length)
        distribution = by_scheme(
            weight_init, default=xavier_uniform(*fans), uniform=uniform(1.0 / sum(fans)), fans=fans
        )
        distribution.fill_(self.weight, generator)

    def file_tensors(self) -> list[FileTensor]:
        """The matrix w [s, d]."""
        return [FileTensor(self.weight, whole)]

    def forward(self, x: Tensor) -> Tensor:
        """float[B, s] -> float[B, s*d]."""
        return (x.unsqueeze(2) * self.weight).flatten(1)
