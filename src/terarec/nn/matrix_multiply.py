"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import flag


class MatrixMultiply(Layer):
    """A matrix product for each sample, or of whole batches where an input has two dimensions."""

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
        self.is_of_batches = len(left.dims) == 1
        if self.is_of_batches:
            good = len(right.dims) in (1, 2) and not transpose_b
            self.require(good, shapes, "a second input of two or three dimensions, not transposed")
            out = right.dims
        else:
            good = len(left.dims) == len(right.dims) and left.rows == right.rows and left.dims[:-2] == right.dims[:-2]
            inner, out_width = (-1, -2) if transpose_b else (-2, -1)
            good = good and left.dims[-1] == right.dims[inner]
            self.require(good, shapes, "matrices m x n and n x k", transpose_b=transpose_b)
            out = (*left.dims[:-1], right.dims[out_width])
        super().__init__([TensorShape(left.rows, out)])

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Shapes as declared.

        Raises:
            RuntimeError: the rows of a batch are not as many as the columns of the first input of two dimensions.
        """
        if self.is_of_batches:
            return (left @ right.flatten(1)).reshape(-1, *right.shape[1:])
        return left @ (right.transpose(-1, -2) if self.transpose_b else right)
