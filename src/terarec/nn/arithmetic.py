# SPDX-License-Identifier: Apache-2.0
"""Arithmetic without weights: elementwise operations, reductions and matrix products."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import ClassVar

from torch import Tensor

from terarec.nn.layer import Layer, TensorShape, flag, integer


class _OfEqualShapes(Layer):
    BOTTOMS: ClassVar[tuple[int, int | None]] = (2, None)

    def __init__(self, shapes: Sequence[TensorShape]) -> None:
        self.require(len(set(shapes)) == 1, shapes, "equal shapes")
        super().__init__(shapes[:1])


class Add(_OfEqualShapes):
    """The sum of its inputs."""

    KIND = "add"
    SHAPES = "two or more equal -> the same"
    FORMULA = "y = x_1 + x_2 + ..."

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the sum of the inputs, of any float type and one shape."""
        return reduce(operator.add, inputs)


class Sub(_OfEqualShapes):
    """The first input less the second."""

    KIND = "sub"
    BOTTOMS = (2, 2)
    SHAPES = "two equal -> the same"
    FORMULA = "y = x_1 - x_2"

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the difference of two inputs, of any float type and one shape."""
        return left - right


class ElementwiseMultiply(_OfEqualShapes):
    """The product of its inputs, element by element."""

    KIND = "elementwise_multiply"
    SHAPES = "two or more equal -> the same"
    FORMULA = "y = x_1 x_2 ..."

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the product of the inputs, of any float type and one shape."""
        return reduce(operator.mul, inputs)


_AXIS = integer("axis", "dimension, the batch being 0", default=1)


class _Reduce(Layer):
    OPTIONS = (_AXIS,)
    SHAPES = "[B, ..., n, ...] -> [B, ..., 1, ...]"

    def __init__(self, shapes: Sequence[TensorShape], *, axis: int) -> None:
        (shape,) = shapes
        self.require(axis <= len(shape.dims), shapes, f"more than {axis} dimensions", axis=axis)
        # `dims` leaves the batch out, so that dimension `axis` is its entry `axis - 1`.
        super().__init__([TensorShape(shape.rows, (*shape.dims[: axis - 1], 1, *shape.dims[axis:]))])
        self.axis = axis


class ReduceSum(_Reduce):
    """The sum along `axis`, whose length becomes 1."""

    KIND = "reduce_sum"
    FORMULA = "y = sum of x along axis"

    def forward(self, x: Tensor) -> Tensor:
        """Sum along `axis`; shapes as declared."""
        return x.sum(self.axis, keepdim=True)


class ReduceMean(_Reduce):
    """The mean along `axis`, whose length becomes 1."""

    KIND = "reduce_mean"
    FORMULA = "y = mean of x along axis"

    def forward(self, x: Tensor) -> Tensor:
        """Average along `axis`; shapes as declared."""
        return x.mean(self.axis, keepdim=True)


class MatrixMultiply(Layer):
    """A matrix product for each sample, or of entire batches where an input has two dimensions."""

    KIND = "matrix_multiply"
    OPTIONS = (flag("transpose_b", "whether the second matrix is transposed", default=False),)
    BOTTOMS = (2, 2)
    SHAPES = (
        "[B, m, n] and [B, n, k] -> [B, m, k], a dimension more alike; "
        "[B, n] and a batch [n, k] or [n, g, h] -> [B, k] or [B, g, h]"
    )
    FORMULA = "y = x_1 x_2, or x_1 x_2^T"

    def __init__(self, shapes: Sequence[TensorShape], *, transpose_b: bool) -> None:
        left, right = shapes
        self.transpose_b = transpose_b
        # HugeCTR multiplies two inputs of [B, n] as matrices, although rows of the second are samples. This fits only
        # where the batch has n samples, which is known at the call.
        self.is_of_batches = len(left.dims) == 1
        if self.is_of_batches:
            good = len(right.dims) in (1, 2) and not transpose_b
            self.require(good, shapes, "a second input of two or three dimensions, not transposed")
            out = right.dims
            self.batch_size = left.dims[0] // right.rows
        else:
            good = len(left.dims) == len(right.dims) and left.rows == right.rows and left.dims[:-2] == right.dims[:-2]
            inner, out_width = (-1, -2) if transpose_b else (-2, -1)
            good = good and left.dims[-1] == right.dims[inner]
            self.require(good, shapes, "matrices m x n and n x k", transpose_b=transpose_b)
            out = (*left.dims[:-1], right.dims[out_width])
        super().__init__([TensorShape(left.rows, out)])

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply; shapes as declared.

        Raises:
            RuntimeError: The rows of a batch are not as many as the columns of the first input of two dimensions.
        """
        if self.is_of_batches:
            return (left @ right.flatten(1)).reshape(-1, *right.shape[1:])
        return left @ (right.transpose(-1, -2) if self.transpose_b else right)
