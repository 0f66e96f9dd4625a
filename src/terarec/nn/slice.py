"""Ranges of the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer, list_of


class Slice(Layer):
    """One output for each range of the last dimension; ranges may overlap, their gradients are summed."""

    KIND = "slice"
    OPTIONS = (list_of(list_of(integer("ranges", "start and end of each output", low=0), length=2)),)
    SHAPES = "[B, ..., n] -> [B, ..., end - start] for each range"
    FORMULA = "y_i = x[..., start_i : end_i]"

    def __init__(self, shapes: Sequence[TensorShape], *, ranges: tuple[tuple[int, int], ...]) -> None:
        (shape,) = shapes
        self.require(len(shape.dims) >= 1, shapes, "at least two dimensions")
        width = shape.dims[-1]
        good = len(ranges) > 0 and all(start < end <= width for start, end in ranges)
        self.require(good, shapes, f"at least one range, start < end <= {width}", ranges=ranges)
        super().__init__([TensorShape(shape.rows, (*shape.dims[:-1], end - start)) for start, end in ranges])
        self.ranges = ranges
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        # The gradient of a split is one concatenation; that of each slice alone is a tensor of the whole input's size.
        self.is_partition = starts == [0, *ends[:-1]] and ends[-1] == width

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Any type; the shapes as declared."""
        if self.is_partition:
            return x.split_with_sizes([end - start for start, end in self.ranges], dim=-1)
        width = x.shape[-1]
        return tuple(x if end - start == width else x.narrow(-1, start, end - start) for start, end in self.ranges)
