# SPDX-License-Identifier: Apache-2.0
"""Layers that only move elements: concatenation, views, slices, selections and copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape, choice, flag, integer, list_of


class Concat(Layer):
    """Concatenation along one dimension; all others are equal."""

    KIND = "concat"
    OPTIONS = (integer("axis", "dimension, the batch being 0", default=1),)
    BOTTOMS = (1, None)
    SHAPES = "[B, n_1], [B, n_2], ... -> [B, n_1 + n_2 + ...]; with more dimensions alike"
    FORMULA = "y = x_1 || x_2 || ... along axis"

    def __init__(self, shapes: Sequence[TensorShape], *, axis: int) -> None:
        first = shapes[0]
        index = axis - 1
        self.require(index < len(first.dims), shapes, f"more than {axis} dimensions", axis=axis)
        # All but the length along `axis`; the number of dimensions tells (a,) from (a, b) along axis 2.
        others = {(shape.rows, shape.dims[:index], shape.dims[axis:], len(shape.dims)) for shape in shapes}
        self.require(len(others) == 1, shapes, f"shapes equal except for dimension {axis}", axis=axis)
        length = sum(shape.dims[index] for shape in shapes)
        super().__init__([TensorShape(first.rows, (*first.dims[:index], length, *first.dims[axis:]))])
        self.axis = axis

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenate inputs of any type; shapes as declared."""
        return torch.cat(inputs, dim=self.axis)


class Reshape(Layer):
    """A row-major view of another shape, given in one of three ways; the number of rows a sample may change.

    1. ``selected``: the slots `selected_slots` of [B, slots, d] side by side (all slots if the list is empty).
    2. ``leading_dim``, with ``time_step`` on request: rows of this length.
    3. ``shape``: with one -1, which comes first.
    """

    KIND = "reshape"
    OPTIONS = (
        integer("leading_dim", "length of the last dimension; 0 for another way", default=0, low=0),
        integer("time_step", "length of the previous one; 0 for none", default=0, low=0),
        flag("selected", "whether to take slots", default=False),
        list_of(integer("selected_slots", "the slots to take, all if empty", low=0), default=()),
        list_of(integer("shape", "the shape, -1 first", low=-1), default=()),
    )
    SHAPES = "any -> [rows, leading_dim], [rows, time_step, leading_dim], [B, slots*d] or shape"
    FORMULA = "y = x, row-major"

    _slots: Tensor | None

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        leading_dim: int,
        time_step: int,
        selected: bool,
        selected_slots: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> None:
        (bottom,) = shapes
        num_options = sum((selected, leading_dim > 0, len(shape) > 0))
        self.require(num_options == 1, shapes, "exactly one of leading_dim, selected and shape")
        slots: tuple[int, ...] | None = None
        if selected:
            dims, slots = self._of_slots(bottom, selected_slots), selected_slots or None
        elif leading_dim:
            dims = (time_step, leading_dim) if time_step else (leading_dim,)
        else:
            dims = self._of_shape(bottom, shape)
        # A selection of slots changes the number of elements, which all other forms keep.
        numel = bottom.numel if slots is None else bottom.rows * dims[0]
        self.require(numel % math.prod(dims) == 0, shapes, f"whole rows of {' x '.join(map(str, dims))}")
        super().__init__([TensorShape(numel // math.prod(dims), dims)])
        index = None if slots is None else torch.tensor(slots)
        self.register_buffer("_slots", index, persistent=False)

    @classmethod
    def _of_slots(cls, bottom: TensorShape, slots: tuple[int, ...]) -> tuple[int, ...]:
        cls.require(len(bottom.dims) == 2, [bottom], "[B, slots, d]", selected_slots=slots)
        num_slots, width = bottom.dims
        cls.require(max(slots, default=0) < num_slots, [bottom], f"slots below {num_slots}", selected_slots=slots)
        return ((len(slots) or num_slots) * width,)

    @classmethod
    def _of_shape(cls, bottom: TensorShape, shape: tuple[int, ...]) -> tuple[int, ...]:
        good = len(shape) >= 2 and shape[0] == -1 and min(shape[1:]) >= 1
        cls.require(good, [bottom], "-1 followed by positive lengths", shape=shape)
        return shape[1:]

    def forward(self, x: Tensor) -> Tensor:
        """Return the elements, of any type, in the new shape, which is as declared."""
        if self._slots is not None:
            x = x.index_select(1, self._slots)
        # In two steps, because an export with any batch size may not find the one view of all.
        return x.flatten().view(-1, *self.output_shapes[0].dims)


class FusedReshapeConcatGeneral(Layer):
    """All slots as rows, the inputs' vectors side by side."""

    KIND = "fused_reshape_concat_general"
    BOTTOMS = (1, None)
    SHAPES = "[B, s, w_1], [B, s, w_2], ... -> [B*s, w_1 + w_2 + ...]"
    FORMULA = "y[b*s + i] = x_1[b, i] || x_2[b, i] || ..."

    def __init__(self, shapes: Sequence[TensorShape]) -> None:
        num_slots, width = _slots_and_width(self, shapes)
        super().__init__([TensorShape(shapes[0].rows * num_slots, (width,))])

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenate the vectors of each slot: float[B, s, w_i] -> float[B*s, sum of w_i]."""
        return torch.cat(inputs, dim=2).flatten(0, 1)


class FusedReshapeConcat(Layer):
    """All slots but the last, and the last one (DIN's history and target), the inputs' vectors side by side."""

    KIND = "fused_reshape_concat"
    BOTTOMS = (1, None)
    SHAPES = "[B, s, w_1], [B, s, w_2], ... -> [B*(s-1), w_1 + w_2 + ...], [B, w_1 + w_2 + ...]"
    FORMULA = "y_1[b*(s-1) + i] = x_1[b, i] || x_2[b, i] || ... for i < s - 1; y_2[b] the same of i = s - 1"

    def __init__(self, shapes: Sequence[TensorShape]) -> None:
        num_slots, width = _slots_and_width(self, shapes)
        self.require(num_slots >= 2, shapes, "at least two slots")
        rows = shapes[0].rows
        super().__init__([TensorShape(rows * (num_slots - 1), (width,)), TensorShape(rows, (width,))])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate and split: float[B, s, w_i] -> float[B*(s-1), sum of w_i], float[B, sum of w_i]."""
        # The gradient of a split is one concatenation, where two slices would each make a tensor of the input's size.
        items, last = torch.cat(inputs, dim=2).split_with_sizes([inputs[0].shape[1] - 1, 1], dim=1)
        return items.flatten(0, 1), last.flatten(0, 1)


def _slots_and_width(layer: Layer, shapes: Sequence[TensorShape]) -> tuple[int, int]:
    good = all(len(shape.dims) == 2 for shape in shapes)
    good = good and len({(shape.rows, shape.dims[0]) for shape in shapes}) == 1
    layer.require(good, shapes, "[B, s, w_i] with equal s")
    return shapes[0].dims[0], sum(shape.dims[1] for shape in shapes)


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
        # The gradient of a split is one concatenation; that of each slice alone is a tensor of the input's size.
        self.is_partition = starts == [0, *ends[:-1]] and ends[-1] == width

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the ranges of `x`, of any type; shapes as declared."""
        if self.is_partition:
            return x.split_with_sizes([end - start for start, end in self.ranges], dim=-1)
        width = x.shape[-1]
        # A range of everything is the input itself, for which no view is recorded.
        return tuple(x if end - start == width else x.narrow(-1, start, end - start) for start, end in self.ranges)


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
        """Return the entries of `x`, of any type; shapes as declared."""
        return x.index_select(self.dim, self._index)


class Gather(Layer):
    """The rows `indices` of the batch.

    Their number has to equal the batch size, since the output has one row a sample.
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
        self.batch_size = len(indices)
        self.register_buffer("_indices", torch.tensor(indices), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows of `x`, of any type.

        Raises:
            IndexError: The batch has fewer rows than an index needs.
        """
        return x.index_select(0, self._indices)


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
        """Repeat elements or rows: float[B, n] -> float[B, n*factor] or float[B*factor, n]."""
        # [B, 1, n] repeats rows, [B, n, 1] elements; the last line folds the copies into their axis.
        dim = 1 if self.axis == 1 else 2
        repeated = x.unsqueeze(dim)
        if self.first_copy_gradient:
            # Detached, so that the gradients of the copies end here.
            copies = repeated.detach().repeat_interleave(self.factor - 1, dim=dim)
            return torch.cat([repeated, copies], dim=dim).reshape(-1, *self.output_shapes[0].dims)
        return repeated.repeat_interleave(self.factor, dim=dim).reshape(-1, *self.output_shapes[0].dims)
