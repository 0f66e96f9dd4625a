"""DLRM's interaction as a layer of the registry."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.nn.dot_interaction import DotInteraction
from terarec.nn.layer import Layer, TensorShape


class Interaction(Layer):
    """Dots of all pairs of an MLP's output and the slots' vectors (Naumov et al. 2019), in HugeCTR's columns."""

    KIND = "interaction"
    BOTTOMS = (2, 2)
    SHAPES = "[B, d] and [B, s, d] -> [B, d + s(s+1)/2 + 1]"
    FORMULA = "y = first || dots of vectors (1, 0), (2, 0), (2, 1), ... || 0, vector 0 being the first input"

    def __init__(self, shapes: Sequence[TensorShape]) -> None:
        first, others = shapes
        good = len(first.dims) == 1 and len(others.dims) == 2 and first.dims[-1] == others.dims[-1]
        self.require(good and first.rows == others.rows, shapes, "[B, d] and [B, s, d]")
        dots = DotInteraction(1 + others.dims[0], first.dims[0], num_zeros=1)
        super().__init__([TensorShape(first.rows, (dots.out_width,))])
        self.dots = dots

    def forward(self, first: Tensor, others: Tensor) -> Tensor:
        """float[B, d] and float[B, s, d] -> float[B, d + s (s + 1) / 2 + 1]."""
        out: Tensor = self.dots(first, others.flatten(1))
        return out
