"""Masks from lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer


class SequenceMask(Layer):
    """1 for the pairs of positions that two sequences of given lengths have, 0 elsewhere; it has no gradient.

    With one input it tells the positions of one sequence, for all of another: `max_sequence_len_from` is not used.
    """

    KIND = "sequence_mask"
    OPTIONS = (
        integer("max_sequence_len_from", "greatest length of the first sequence", default=1),
        integer("max_sequence_len_to", "greatest length of the second sequence", default=1),
    )
    BOTTOMS = (1, 2)
    SHAPES = "lengths [B, 1] and [B, 1] -> [B, 1, from, to]; lengths [B, 1] -> [B, 1, 1, to]"
    FORMULA = "y[b, 0, i, j] = 1 if i < length_from[b] and j < length_to[b], else 0; lengths rounded towards 0"

    _from_positions: Tensor
    _to_positions: Tensor

    def __init__(self, shapes: Sequence[TensorShape], *, max_sequence_len_from: int, max_sequence_len_to: int) -> None:
        good = all(shape.dims == (1,) for shape in shapes) and shapes[0].rows == shapes[-1].rows
        self.require(good, shapes, "one or two of [B, 1]")
        num_from = max_sequence_len_from if len(shapes) == 2 else 1
        super().__init__([TensorShape(shapes[0].rows, (1, num_from, max_sequence_len_to))])
        self.register_buffer("_from_positions", torch.arange(max_sequence_len_from).view(1, 1, -1, 1), persistent=False)
        self.register_buffer("_to_positions", torch.arange(max_sequence_len_to).view(1, 1, 1, -1), persistent=False)

    def forward(self, length_from: Tensor, length_to: Tensor | None = None) -> Tensor:
        """float[B, 1], once or twice -> [B, 1, from or 1, to] of the first one's type."""
        last = length_from if length_to is None else length_to
        counts = self._to_positions < last.trunc().view(-1, 1, 1, 1)
        if length_to is not None:
            counts = counts & (self._from_positions < length_from.trunc().view(-1, 1, 1, 1))
        return counts.to(length_from.dtype)
