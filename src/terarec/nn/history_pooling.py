# SPDX-License-Identifier: Apache-2.0
"""Poolings of a history that see its target: the transformer of BST, the layers of HSTU, the units of DIEN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu
from torch.nn.utils.rnn import PackedSequence

from terarec.nn.attention import HistoryPooling, segment_softmax
from terarec.nn.dense import new_linear
from terarec.nn.initializers import normal, uniform, xavier_uniform
from terarec.nn.sequences import (
    HSTU,
    PositionVectors,
    TransformerBlock,
    append_last,
    last_positions,
    new_gru,
    recent_padded,
    step_order,
    steps_to_end,
)
from terarec.spec.histories import HistoryOutput


class HistoryTransformer(HistoryPooling):
    """Vectors of positions and transformer blocks over a history with its target behind it (Chen et al. 2019).

    A position is its distance from the target. A block is that of `TransformerBlock` with a leaky ReLU, in which each
    position sees all others. Its initial weights are those of Glorot and Bengio: with the small ones of BERT,
    whose width is 768, attention of a width of 16 begins to learn late.

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
            TransformerBlock(
                width,
                heads,
                inner,
                causal=False,
                rate=rate,
                generator=generator,
                activation=leaky_relu,
                initial=xavier_uniform,
            )
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
        vectors, lengths, is_target = _padded_before(target, *recent_padded(values, mask, self.length))
        vectors = self.positions.padded(vectors, lengths + 1)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            vectors = block.padded(vectors, lengths + 1)
        if self.output == "target":
            return (vectors * is_target).sum(1)
        places = lengths.unsqueeze(1) - torch.arange(self.length + 1, device=mask.device)
        is_there = (places >= 0).unsqueeze(2)
        # From the target backwards: place k has the vector of distance k.
        backwards = vectors.gather(1, places.clamp(min=0).unsqueeze(2).expand_as(vectors)).masked_fill(~is_there, 0.0)
        return backwards.sum(1) / (lengths + 1).unsqueeze(1) if self.output == "mean" else backwards.flatten(1)


def _padded_before(target: Tensor, recent: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return histories [B, K, D] of ``lengths int64[B]`` with their targets behind them, and where these are.

    Returns:
        [B, K + 1, D]; the lengths without the targets; bool[B, K + 1, 1].
    """
    is_target = (torch.arange(recent.shape[1] + 1, device=lengths.device) == lengths.unsqueeze(1)).unsqueeze(2)
    return torch.where(is_target, target.unsqueeze(1), nn.functional.pad(recent, (0, 0, 0, 1))), lengths, is_target


class HistoryTransducer(HistoryPooling):
    """Layers of `HSTU` over a history with its target behind it, which gives the result (Zhai et al. 2024).

    A position is the sum of the vectors of an item and of the user's action on it, where the paper has two positions;
    that of the target has a learned vector in the place of the action, which is not known yet. The result is
    normalized.

    Args:
        length: Number of items of a history that count, the last ones.
        width: Width D.
        layers: Number of layers.
        heads: Number of heads.
        rate: Probability of zeroing an element in training.
        time_buckets: Number of biases of gaps in time; 0 for none.
        has_actions: Whether the items of histories have actions.
        generator: Source of the initial weights.
    """

    def __init__(
        self,
        length: int,
        width: int,
        *,
        layers: int,
        heads: int,
        rate: float,
        time_buckets: int,
        has_actions: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__(width)
        self.length = length
        self.encoder = HSTU(
            length + 1, width, layers=layers, heads=heads, rate=rate, time_buckets=time_buckets, generator=generator
        )
        self.norm = nn.LayerNorm(width)
        self.unknown: nn.Parameter | None = None
        if has_actions:
            self.unknown = nn.Parameter(torch.empty(width))
            normal(0.02).fill_(self.unknown, generator)

    def forward(
        self,
        target: Tensor,
        values: Tensor,
        offsets: Tensor,
        actions: Tensor | None = None,
        times: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Reduce the histories, whose items may have actions float[n, D] and times; see `HistoryPooling`.

        `times` are int64[n] of the items and int64[B] of the targets.
        """
        target, values = self._with_actions(target, values, actions)
        recent, starts = last_positions(values, offsets, self.length)
        positions, ends = append_last(recent, starts, target)
        of_positions = None
        if times is not None:
            of_positions, _ = append_last(last_positions(times[0], offsets, self.length)[0], starts, times[1])
        hidden: Tensor = self.norm(self.encoder(positions, ends, of_positions).index_select(0, ends[1:] - 1))
        return hidden

    def padded(
        self,
        target: Tensor,
        values: Tensor,
        mask: Tensor,
        actions: Tensor | None = None,
        times: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Reduce padded histories, whose items may have actions float[B, K, D] and times; see `HistoryPooling`.

        `times` are int64[B, K] of the items and int64[B] of the targets.
        """
        target, values = self._with_actions(target, values, actions)
        of_positions = None
        if times is not None:
            recent = recent_padded(times[0].unsqueeze(2), mask, self.length)
            of_positions = _padded_before(times[1].unsqueeze(1), *recent)[0].squeeze(2)
        vectors, lengths, is_target = _padded_before(target, *recent_padded(values, mask, self.length))
        hidden: Tensor = self.norm((self.encoder.padded(vectors, lengths + 1, of_positions) * is_target).sum(1))
        return hidden

    def _with_actions(self, target: Tensor, values: Tensor, actions: Tensor | None) -> tuple[Tensor, Tensor]:
        if actions is None or self.unknown is None:
            return target, values
        return target + self.unknown, values + actions


class InterestEvolution(HistoryPooling):
    """The interest extractor and evolving layers of the Deep Interest Evolution Network (Zhou et al. 2019).

    The states h_t of a GRU over the history have the weights a_t = softmax over t of h_t W e, e the target's vector
    (arXiv 1809.03672, eq. 14). A second recurrent layer reads the states, the update gates of which are multiplied by
    these weights (AUGRU, eq. 16 to 18): s <- (1 - a_t u_t) s + a_t u_t tanh(W_n h_t + b_n + r_t (U_n s + c_n)). The
    output is its last state; zeros for an empty history. Memory grows with the sum of the lengths.

    Args:
        length: Number of items of a history that count, the last ones.
        width: Width D of vectors and states.
        generator: Source of the initial weights.
    """

    def __init__(self, length: int, width: int, *, generator: torch.Generator) -> None:
        super().__init__(width)
        self.length = length
        bound = uniform(width**-0.5)
        self.extractor = new_gru(width, width, 1, generator=generator)
        self.attention = new_linear(width, width, weight=xavier_uniform(width, width), bias=None, generator=generator)
        # Of the gates r and u, and of the new state.
        self.of_input = new_linear(width, 3 * width, weight=bound, bias=bound, generator=generator)
        self.of_state = new_linear(width, 3 * width, weight=bound, bias=bound, generator=generator)

    def forward(self, target: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Reduce the histories; see `HistoryPooling`."""
        recent, starts = last_positions(values, offsets, self.length)
        return self.evolved(target, self.states(recent, starts), starts)

    def states(self, values: Tensor, offsets: Tensor) -> Tensor:
        """Return the states of the first layer at all positions: float[n, D], int64[B + 1] -> float[n, D]."""
        if not values.shape[0]:
            return values
        order, sizes, _ = step_order(offsets, values.shape[0])
        states, _ = self.extractor(PackedSequence(values.index_select(0, order), sizes))
        return torch.zeros_like(states.data).index_copy(0, order, states.data)

    def evolved(self, target: Tensor, states: Tensor, offsets: Tensor) -> Tensor:
        """Return the last state of the second layer for the `states` float[n, D] of the first one: float[B, D]."""
        if not states.shape[0]:
            # The empty sum keeps the values in the graph, which get a gradient of their own shape.
            return torch.zeros_like(target) + states.sum(0)
        order, sizes, sequences = step_order(offsets, states.shape[0])
        weights = self._weights(target, states, offsets).index_select(0, order)
        inputs = self.of_input(states.index_select(0, order))
        counts = sizes.tolist()
        state, ended = states.new_zeros(counts[0], states.shape[1]), []
        steps = zip(torch.split(inputs, counts), torch.split(weights, counts), [*counts[1:], 0], strict=True)
        for of_input, weight, remaining in steps:
            state = self._next(state, of_input, weight)
            # The longest sequences come first: those that end here are the last rows.
            ended.append(state[remaining:])
            state = state[:remaining]
        last = torch.cat(ended[::-1])
        return torch.zeros_like(target).index_copy(0, sequences[: counts[0]], last.to(target.dtype))

    def padded(self, target: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Reduce padded histories; see `HistoryPooling`."""
        # A fixed number of places, and so of steps below, which a program holds one by one.
        vectors, lengths = recent_padded(values, mask, self.length)
        states, _ = self.extractor(vectors)
        is_there = torch.arange(self.length, device=lengths.device) < lengths.unsqueeze(1)
        scores = (self.attention(states) * target.unsqueeze(1)).sum(2)
        # The least number instead of minus infinity, of which alone the softmax of an empty history would be NaN.
        weights = scores.masked_fill(~is_there, torch.finfo(scores.dtype).min).softmax(1)
        # Padding has the weight 0, which leaves the state as it is.
        weights = weights.masked_fill(~is_there, 0.0)
        state = torch.zeros_like(target)
        for of_input, weight in zip(self.of_input(states).unbind(1), weights.split(1, dim=1), strict=True):
            state = self._next(state, of_input, weight)
        return state

    def _weights(self, target: Tensor, states: Tensor, offsets: Tensor) -> Tensor:
        """Return the weight of each position: float[n, 1]."""
        sample = torch.repeat_interleave(offsets.diff(), output_size=states.shape[0])
        # In float32 under autocast, too: `segment_reduce` takes no 16 bits.
        scores: Tensor = (self.attention(states) * target.index_select(0, sample)).sum(1, keepdim=True).float()
        return segment_softmax(scores, offsets, sample)

    def _next(self, state: Tensor, of_input: Tensor, weight: Tensor) -> Tensor:
        input_reset, input_update, input_new = of_input.chunk(3, dim=1)
        reset, update, new = self.of_state(state).chunk(3, dim=1)
        update = weight * (input_update + update).sigmoid()
        candidate = (input_new + (input_reset + reset).sigmoid() * new).tanh()
        # Under autocast the gates have 16 bits, while the state and the weights have 32.
        following: Tensor = state + update * (candidate - state)
        return following
