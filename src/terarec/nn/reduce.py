"""Sums and means along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer

_AXIS = integer("axis", "dimension, the batch being 0", default=1)


class _Reduce(Layer):
    OPTIONS = (_AXIS,)
    SHAPES = "[B, ..., n, ...] -> [B, ..., 1, ...]"

    def __init__(self, shapes: Sequence[TensorShape], *, axis: int) -> None:
        (shape,) = shapes
        self.require(axis <= len(shape.dims), shapes, f"more than {axis} dimensions", axis=axis)
        super().__init__([TensorShape(shape.rows, (*shape.dims[: axis - 1], 1, *shape.dims[axis:]))])
        self.axis = axis


class ReduceSum(_Reduce):
    """The sum along `axis`, whose length becomes 1."""

    KIND = "reduce_sum"
    FORMULA = "y = sum of x along axis"

    def forward(self, x: Tensor) -> Tensor:
        """Any float type; shapes as declared."""
        return x.sum(self.axis, keepdim=True)


class ReduceMean(_Reduce):
    """The mean along `axis`, whose length becomes 1."""

    KIND = "reduce_mean"
    FORMULA = "y = mean of x along axis"

    def forward(self, x: Tensor) -> Tensor:
        """Any float type; shapes as declared."""
        return x.mean(self.axis, keepdim=True)
