"""Tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer


class Concat(Layer):
    """Concatenation along one dimension; all others are equal."""

    KIND = "concat"
    OPTIONS = (integer("axis", "dimension, the batch being 0", default=1),)
    BOTTOMS = (1, None)
    SHAPES = "[B, n_1], [B, n_2], ... -> [B, n_1 + n_2 + ...]; with more dimensions alike"
    FORMULA = "y = x_1 beside x_2 beside ... along axis"

    def __init__(self, shapes: Sequence[TensorShape], *, axis: int) -> None:
        first = shapes[0]
        index = axis - 1
        self.require(index < len(first.dims), shapes, f"more than {axis} dimensions", axis=axis)
        others = {(shape.rows, shape.dims[:index], shape.dims[axis:], len(shape.dims)) for shape in shapes}
        self.require(len(others) == 1, shapes, f"shapes equal but for dimension {axis}", axis=axis)
        length = sum(shape.dims[index] for shape in shapes)
        super().__init__([TensorShape(first.rows, (*first.dims[:index], length, *first.dims[axis:]))])
        self.axis = axis

    def forward(self, *inputs: Tensor) -> Tensor:
        """Any type and shapes as declared."""
        return torch.cat(inputs, dim=self.axis)
