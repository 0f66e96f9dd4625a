"""Chosen entries of one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer, list_of


class Select(Layer):
    """The entries `index` of dimension `dim`, which is not the batch; an entry may be taken several times."""

    KIND = "select"
    OPTIONS = (
        integer("dim", "dimension, the batch being 0"),
        list_of(integer("index", "the entries to take", low=0)),
    )
    SHAPES = "[B, ..., n, ...] -> [B, ..., len(index), ...]"
    FORMULA = "y[..., i, ...] = x[..., index[i], ...]"

    _index: Tensor

    def __init__(self, shapes: Sequence[TensorShape], *, dim: int, index: tuple[int, ...]) -> None:
        (shape,) = shapes
        self.require(dim <= len(shape.dims), shapes, f"more than {dim} dimensions", dim=dim)
        length = shape.dims[dim - 1]
        good = len(index) > 0 and max(index) < length
        self.require(good, shapes, f"entries below {length}, at least one", dim=dim, index=index)
        super().__init__([TensorShape(shape.rows, (*shape.dims[: dim - 1], len(index), *shape.dims[dim:]))])
        self.dim = dim
        self.register_buffer("_index", torch.tensor(index), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any type; the shapes as declared."""
        return x.index_select(self.dim, self._index)
