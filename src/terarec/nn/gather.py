"""Chosen rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer, list_of


class Gather(Layer):
    """The rows `indices` of the whole batch.

    There are to be as many of them as samples in the batch: the output counts as one row a sample.
    """

    KIND = "gather"
    OPTIONS = (list_of(integer("indices", "the rows to take", low=0)),)
    SHAPES = "[rows, n] -> [len(indices), n]"
    FORMULA = "y[i] = x[indices[i]]"

    _indices: Tensor

    def __init__(self, shapes: Sequence[TensorShape], *, indices: tuple[int, ...]) -> None:
        (shape,) = shapes
        good = len(indices) > 0 and len(shape.dims) == 1
        self.require(good, shapes, "one input of two dimensions and at least one index", indices=indices)
        super().__init__([TensorShape(1, shape.dims)])
        self.register_buffer("_indices", torch.tensor(indices), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any type.

        Raises:
            IndexError: the batch has fewer rows than an index asks for.
        """
        return x.index_select(0, self._indices)
