"""Layers of sequences: a gated recurrent unit, and masks from lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from terarec.nn.initializers import by_scheme, constant, scheme_option, uniform, xavier_uniform
from terarec.nn.layer import FileTensor, Layer, TensorShape, WeightedLayer, as_is
from terarec.nn.layer_option import integer


class GRU(WeightedLayer):
    """One layer, one direction, from a state of 0, with the biases of the input alone (Cho et al. 2014, cuDNN's form).

    Rows are sequence-major: row t*B + b is step t of sequence b.
    """

    KIND = "gru"
    OPTIONS = (
        integer("num_output", "width h of the state"),
        integer("sequence_length", "steps t"),
        integer("vector_size", "width v of a step's input"),
        scheme_option("weight_init", "first W and R"),
        scheme_option("bias_init", "first b"),
    )
    SHAPES = "[t*B, v] (or of t*v elements a sample) -> [t*B, h]"
    FORMULA = (
        "r, z = sigmoid(W x + b + R s); n = tanh(W_n x + b_n + r * R_n s); s <- (1 - z) * n + z * s; y = s; "
        "W and R Xavier-uniform, b uniform within 1/sqrt(h)"
    )

    def __init__(
        self,
        shapes: Sequence[TensorShape],
        *,
        num_output: int,
        sequence_length: int,
        vector_size: int,
        weight_init: str,
        bias_init: str,
        generator: torch.Generator,
    ) -> None:
        (shape,) = shapes
        good = shape.numel == sequence_length * vector_size
        self.require(good, shapes, f"{sequence_length} steps of {vector_size}")
        super().__init__([TensorShape(sequence_length, (num_output,))])
        self.input_rows = shape.rows
        self.sequence_length = sequence_length
        self.vector_size = vector_size
        self.gru = nn.GRU(vector_size, num_output, device="meta").to_empty(device="cpu")
        own = uniform(1.0 / math.sqrt(num_output))
        weight_x, weight_state, bias, unused_bias = self.gru.parameters()
        for weight, fan_in in ((weight_x, vector_size), (weight_state, num_output)):
            fans = (fan_in, num_output)
            by_scheme(weight_init, default=xavier_uniform(*fans), fans=fans).fill_(weight, generator)
        by_scheme(bias_init, default=own).fill_(bias, generator)
        constant(0.0).fill_(unused_bias.requires_grad_(False), generator)

    def file_tensors(self) -> list[FileTensor]:
        """W [3 h, v], R [3 h, h] and b [3 h], of the reset gate, the update gate and the new state."""
        return [FileTensor(weight, as_is) for weight in list(self.gru.parameters())[:3]]

    def forward(self, x: Tensor) -> Tensor:
        """float[t*B, v] -> float[t*B, h]."""
        batch_size = x.shape[0] // self.input_rows
        states, _ = self.gru(x.flatten().view(self.sequence_length, batch_size, self.vector_size))
        out: Tensor = states.flatten(0, 1)
        return out


class SequenceMask(Layer):
    """1 for the pairs of positions that two sequences of given lengths have, 0 elsewhere; it has no gradient.

    With one input it masks the positions of one sequence, for all of another: `max_sequence_len_from` is not used.
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
