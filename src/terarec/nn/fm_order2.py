"""The second-order term of a factorization machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer


class FmOrder2(Layer):
    """Sum over all pairs of vectors of their elementwise product (Rendle 2010)."""

    KIND = "fm_order2"
    OPTIONS = (integer("out_dim", "length d of a vector"),)
    SHAPES = "[B, s*d] or [B, s, d] -> [B, d]"
    FORMULA = "y = ((sum_s v_s)^2 - sum_s v_s^2) / 2"

    def __init__(self, shapes: Sequence[TensorShape], *, out_dim: int) -> None:
        (shape,) = shapes
        elements = shape.numel // shape.rows
        self.require(elements % out_dim == 0, shapes, "whole vectors of out_dim", out_dim=out_dim)
        super().__init__([TensorShape(shape.rows, (out_dim,))])
        self.num_vectors = elements // out_dim
        self.out_dim = out_dim

    def forward(self, x: Tensor) -> Tensor:
        """float[B, s*d] -> float[B, d]."""
        vectors = x.reshape(-1, self.num_vectors, self.out_dim)
        return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
