"""The same elements under another shape, or some slots side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import flag, integer, list_of


class Reshape(Layer):
    """A row-major view under the shape that one of its three ways of saying names; rows a sample may change.

    1. ``selected``: the slots `selected_slots` of [B, slots, d] side by side (all slots if the list is empty).
    2. ``leading_dim``, with ``time_step`` on request: rows of this length.
    3. ``shape``: with one -1, which comes first.
    """

    KIND = "reshape"
    OPTIONS = (
        integer("leading_dim", "length of the last dimension; 0 for another way", default=0, low=0),
        integer("time_step", "length of the one before; 0 for none", default=0, low=0),
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
        given = sum((selected, leading_dim > 0, len(shape) > 0))
        self.require(given == 1, shapes, "exactly one of leading_dim, selected and shape")
        slots: tuple[int, ...] | None = None
        if selected:
            dims, slots = self._of_slots(bottom, selected_slots), selected_slots or None
        elif leading_dim:
            dims = (time_step, leading_dim) if time_step else (leading_dim,)
        else:
            dims = self._of_shape(bottom, shape)
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
        """Any type; the shapes as declared."""
        if self._slots is not None:
            x = x.index_select(1, self._slots)
        # In two steps, because an export with any batch size may not find the one view of all.
        return x.flatten().view(-1, *self.output_shapes[0].dims)
