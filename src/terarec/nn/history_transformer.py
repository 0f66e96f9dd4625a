# SPDX-License-Identifier: Apache-2.0
"""`HistoryTransformer`: a transformer over a history and its target, as in the Behavior Sequence Transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from terarec.nn.attention import HistoryPooling
from terarec.nn.sequences import (
    PositionVectors,
    TransformerBlock,
    append_last,
    last_positions,
    recent_padded,
    steps_to_end,
)
from terarec.spec.histories import HistoryOutput


class HistoryTransformer(HistoryPooling):
    """Vectors of positions and transformer blocks over a history with its target behind it (Chen et al. 2019).

    A position is its distance from the target. A block is that of `TransformerBlock` with a leaky ReLU, in which each
    position sees all others.

    Args:
        length: Number M of items of a history that count, the last ones.
        width: Width D.
        layers: Number of blocks.
        heads: Number of heads.
        inner: Width of the hidden layer of a block's MLP.
        output: "concat": the vectors of target and history side by side, the last item first, zeros where there is
            none; "mean": their mean; "target": that of the target.
        rate: Probability of zeroing an element in training.
        generator: Source of the initial weights.
    """

    def __init__(
        self,
        length: int,
        width: int,
        *,
        layers: int,
        heads: int,
        inner: int,
        output: HistoryOutput,
        rate: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__(width * (length + 1) if output == "concat" else width)
        self.length, self.output = length, output
        self.positions = PositionVectors(length + 1, width, generator=generator)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, inner, causal=False, rate=rate, generator=generator, activation=leaky_relu)
            for _ in range(layers)
        )

    def forward(self, target: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Reduce the histories; see `HistoryPooling`."""
        recent, starts = last_positions(values, offsets, self.length)
        positions, ends = append_last(recent, starts, target)
        vectors: Tensor = self.positions(positions, ends)
        for block in self.blocks:
            vectors = block(vectors, ends)
        if self.output == "target":
            return vectors.index_select(0, ends[1:] - 1)
        sample = torch.repeat_interleave(ends.diff(), output_size=vectors.shape[0])
        size, width = target.shape
        if self.output == "mean":
            total = vectors.new_zeros(size, width).index_add(0, sample, vectors)
            return total / ends.diff().unsqueeze(1)
        places = sample * (self.length + 1) + steps_to_end(ends, vectors.shape[0])
        filled = vectors.new_zeros(size * (self.length + 1), width).index_copy(0, places, vectors)
        return filled.view(size, self.out_width)

    def padded(self, target: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Reduce padded histories; see `HistoryPooling`."""
        recent, lengths = recent_padded(values, mask, self.length)
        is_target = torch.arange(self.length + 1, device=mask.device) == lengths.unsqueeze(1)
        longer = nn.functional.pad(recent, (0, 0, 0, 1))
        vectors = torch.where(is_target.unsqueeze(2), target.unsqueeze(1), longer)
        vectors = self.positions.padded(vectors, lengths + 1)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            vectors = block.padded(vectors, lengths + 1)
        if self.output == "target":
            return (vectors * is_target.unsqueeze(2)).sum(1)
        places = lengths.unsqueeze(1) - torch.arange(self.length + 1, device=mask.device)
        is_there = (places >= 0).unsqueeze(2)
        # From the target backwards: place k has the vector of distance k.
        backwards = vectors.gather(1, places.clamp(min=0).unsqueeze(2).expand_as(vectors)).masked_fill(~is_there, 0.0)
        return backwards.sum(1) / (lengths + 1).unsqueeze(1) if self.output == "mean" else backwards.flatten(1)
