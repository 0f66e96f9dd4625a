"""Repeated elements or rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import choice, flag, integer


class Scale(Layer):
    """Each element `factor` times in its row (axis 0), or each row `factor` times (axis 1).

    The gradient is the sum over the copies. HugeCTR passes that of the first copy alone, and so does
    `first_copy_gradient`.
    """

    KIND = "scale"
    OPTIONS = (
        choice("axis", "0: elements, 1: rows", (0, 1), default=1),
        integer("factor", "copies"),
        flag("first_copy_gradient", "whether only the first copy has a gradient", default=False),
    )
    SHAPES = "[B, n] -> [B, n*factor] or [B*factor, n]"
    FORMULA = "y[b, j*factor + i] = x[b, j], or y[b*factor + i, j] = x[b, j]"

    def __init__(self, shapes: Sequence[TensorShape], *, axis: int, factor: int, first_copy_gradient: bool) -> None:
        (shape,) = shapes
        self.require(len(shape.dims) == 1, shapes, "one input of two dimensions")
        width = shape.dims[0]
        of_rows = TensorShape(shape.rows * factor, (width,))
        super().__init__([of_rows if axis == 1 else TensorShape(shape.rows, (width * factor,))])
        self.axis = axis
        self.factor = factor
        self.first_copy_gradient = first_copy_gradient

    def forward(self, x: Tensor) -> Tensor:
        """float[B, n] -> float[B, n*factor] or float[B*factor, n]."""
        dim = 1 if self.axis == 1 else 2
        repeated = x.unsqueeze(dim)
        if self.first_copy_gradient:
            copies = repeated.detach().repeat_interleave(self.factor - 1, dim=dim)
            return torch.cat([repeated, copies], dim=dim).reshape(-1, *self.output_shapes[0].dims)
        return repeated.repeat_interleave(self.factor, dim=dim).reshape(-1, *self.output_shapes[0].dims)
