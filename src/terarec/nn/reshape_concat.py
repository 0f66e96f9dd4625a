"""Slots of several tensors side by side, as rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape


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
        """float[B, s, w_i] -> float[B*s, sum of w_i]."""
        return torch.cat(inputs, dim=2).flatten(0, 1)


class FusedReshapeConcat(Layer):
    """The same in two outputs: all slots but the last, and the last one (DIN's history and candidate)."""

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
        """float[B, s, w_i] -> float[B*(s-1), sum of w_i], float[B, sum of w_i]."""
        items, last = torch.cat(inputs, dim=2).split_with_sizes([inputs[0].shape[1] - 1, 1], dim=1)
        return items.flatten(0, 1), last.flatten(0, 1)


def _slots_and_width(layer: Layer, shapes: Sequence[TensorShape]) -> tuple[int, int]:
    good = all(len(shape.dims) == 2 for shape in shapes)
    good = good and len({(shape.rows, shape.dims[0]) for shape in shapes}) == 1
    layer.require(good, shapes, "[B, s, w_i] with equal s")
    return shapes[0].dims[0], sum(shape.dims[1] for shape in shapes)
