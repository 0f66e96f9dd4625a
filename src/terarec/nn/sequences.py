# SPDX-License-Identifier: Apache-2.0
"""Encoders of sequences of different lengths: transformers, HSTU and a GRU; each also takes padded sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, scaled_dot_product_attention, silu
from torch.nn.utils.rnn import PackedSequence

from terarec.nn.activations import dropout
from terarec.nn.dense import new_linear
from terarec.nn.initializers import Distribution, constant, normal, uniform, xavier_uniform
from terarec.ops.jagged_attention import AttentionForm, ScoreBiases, jagged_attention

_STD = 0.02
"""Standard deviation of the initial weights of transformers (Devlin et al. 2019)."""


class SequenceEncoder(nn.Module):
    """Base of the encoders: ``forward`` takes sequences one after the other, `padded` those of an exported program.

    Args:
        rate: Probability of zeroing an element in training.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, vectors: Tensor, offsets: Tensor) -> Tensor:
        """Return a vector for each position.

        Args:
            vectors: float[T, D], the positions of all sequences, one sequence after the other.
            offsets: int64[B + 1]; sequence b has the positions ``offsets[b] : offsets[b + 1]``.

        Returns:
            float[T, D].
        """
        raise NotImplementedError

    def padded(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Return the same for sequences float[B, K, D] of ``lengths int64[B]``, in evaluation; padding gives any."""
        raise NotImplementedError

    def drop(self, x: Tensor) -> Tensor:
        """Return `x` with zeroed elements in training."""
        return dropout(x, self.rate) if self.training and self.rate else x


def steps_to_end(offsets: Tensor, total: int) -> Tensor:
    """Return int64[T], how many positions of its sequence follow each of the `total` positions."""
    ends = torch.repeat_interleave(offsets[1:], offsets.diff(), output_size=total)
    return ends - 1 - torch.arange(total, device=offsets.device)


def last_positions(values: Tensor, offsets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the last positions of sequences, at most `longest` of each.

    Args:
        values: [T, ...], the positions of all sequences.
        offsets: int64[B + 1].
        longest: Greatest number of positions.

    Returns:
        The positions that are left, and their offsets.
    """
    is_recent = steps_to_end(offsets, values.shape[0]) < longest
    starts = torch.cat([offsets[:1], offsets.diff().clamp(max=longest).cumsum(0)])
    return values[is_recent], starts


def append_last(values: Tensor, offsets: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences with one more position at the end of each.

    Args:
        values: [T, ...], the positions of all sequences.
        offsets: int64[B + 1].
        last: [B, ...], the further positions.

    Returns:
        [T + B, ...] and its offsets.
    """
    total, size = values.shape[0], last.shape[0]
    sequence = torch.repeat_interleave(offsets.diff(), output_size=total)
    starts = offsets + torch.arange(size + 1, device=offsets.device)
    # The place of every position, those of `values` first.
    places = torch.cat([torch.arange(total, device=offsets.device) + sequence, starts[1:] - 1])
    return torch.cat([values, last]).index_select(0, places.argsort()), starts


class StepOrder(NamedTuple):
    """The order in which a recurrent layer takes positions: all first ones, by length, then all second ones.

    Attributes:
        places: int64[T], the place of each position in the order of sequences.
        sizes: int64[K] in host memory, the positions of each step.
        sequences: int64[B], the numbers of the sequences, the longest first.
    """

    places: Tensor
    sizes: Tensor
    sequences: Tensor


def step_order(offsets: Tensor, total: int) -> StepOrder:
    """Return the order of steps of `total` > 0 positions, for the offsets int64[B + 1] of their sequences."""
    lengths = offsets.diff()
    sequences = lengths.argsort(descending=True, stable=True)
    rank = torch.empty_like(lengths)
    rank[sequences] = torch.arange(len(lengths), device=lengths.device)
    member = torch.repeat_interleave(lengths, output_size=total)
    step = torch.arange(total, device=lengths.device) - offsets[member]
    return StepOrder((step * len(lengths) + rank[member]).argsort(), step.bincount().cpu(), sequences)


def recent_padded(values: Tensor, mask: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the last positions of padded sequences, side by side from the first place.

    Args:
        values: [B, K, D].
        mask: bool[B, K], the places that hold a position.
        longest: Greatest number of positions.

    Returns:
        [B, longest, D], zeros behind them, and their numbers int64[B].
    """
    count = mask.long().cumsum(1)
    total = count[:, -1:]
    mask = mask & (total - count < longest)
    # Vectors that do not count go to one more place, which is cut off.
    first = (total - longest).clamp(min=0)
    places = torch.where(mask, count - 1 - first, longest)
    room = values.new_zeros(values.shape[0], longest + 1, values.shape[2])
    vectors = room.scatter(1, places.unsqueeze(2).expand_as(values), values)[:, :longest]
    return vectors, total[:, 0].clamp(max=longest)


class PositionVectors(nn.Module):
    """A learned vector for each distance from the end of a sequence, added to its positions.

    Args:
        length: Number of distances M.
        width: Length D of a vector.
        generator: Source of the initial weights.
    """

    def __init__(self, length: int, width: int, *, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        normal(_STD).fill_(self.weight, generator)

    def forward(self, vectors: Tensor, offsets: Tensor) -> Tensor:
        """Add the vectors: float[T, D], int64[B + 1] -> float[T, D]."""
        return vectors + embedding(steps_to_end(offsets, vectors.shape[0]), self.weight)

    def padded(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Add the vectors to float[B, K, D] of ``lengths int64[B]``."""
        steps = lengths.unsqueeze(1) - 1 - torch.arange(vectors.shape[1], device=vectors.device)
        # Padding, which has no distance, takes that of the last position.
        return vectors + embedding(steps.clamp(0, self.weight.shape[0] - 1), self.weight)


def attention_mask(lengths: Tensor, num_positions: int, *, causal: bool) -> Tensor:
    """Return bool[B, 1, K, K], the pairs of positions of which the first attends to the second.

    Each attends to itself at least, so that padding has a weight to sum to one.
    """
    places = torch.arange(num_positions, device=lengths.device)
    is_there = (places < lengths.unsqueeze(1)).unsqueeze(1)
    if causal:
        is_there = is_there & (places <= places.unsqueeze(1))
    return (is_there | (places == places.unsqueeze(1))).unsqueeze(1)


def _of_bert(_fan_in: int, _fan_out: int) -> Distribution:
    return normal(_STD)


class TransformerBlock(SequenceEncoder):
    """Attention and an MLP, each added to its input and normalized (Vaswani et al. 2017; Devlin et al. 2019).

    Args:
        width: Width D.
        heads: Number of heads.
        inner: Width of the MLP's hidden layer.
        causal: Whether a position sees itself and earlier ones alone.
        rate: Probability of zeroing an element of what is added, in training.
        generator: Source of the initial weights.
        activation: Activation of the MLP's hidden layer.
        initial: Distribution of the initial weights of a layer by its fans; that of BERT by default.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        *,
        causal: bool,
        rate: float,
        generator: torch.Generator,
        activation: Callable[[Tensor], Tensor] = gelu,
        initial: Callable[[int, int], Distribution] = _of_bert,
    ) -> None:
        super().__init__(rate)
        self.heads = heads
        self.activation = activation
        self.form = AttentionForm(causal=causal)

        def layer(fan_in: int, fan_out: int) -> nn.Linear:
            return new_linear(fan_in, fan_out, weight=initial(fan_in, fan_out), bias=constant(0.0), generator=generator)

        self.projection = layer(width, 3 * width)
        self.output = layer(width, width)
        self.first, self.second = layer(width, inner), layer(inner, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, vectors: Tensor, offsets: Tensor) -> Tensor:
        """Encode the sequences; see `SequenceEncoder`."""
        query, key, value = self.projection(vectors).unflatten(1, (3, self.heads, -1)).unbind(1)
        return self._combined(vectors, jagged_attention(query, key, value, offsets, self.form).flatten(1))

    def padded(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Encode padded sequences; see `SequenceEncoder`."""
        query, key, value = self.projection(vectors).unflatten(2, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mask = attention_mask(lengths, vectors.shape[1], causal=self.form.causal)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self._combined(vectors, mixed.transpose(1, 2).flatten(2))

    def _combined(self, vectors: Tensor, mixed: Tensor) -> Tensor:
        vectors = self.norms[0](vectors + self.drop(self.output(mixed)))
        out: Tensor = self.norms[1](vectors + self.drop(self.second(self.activation(self.first(vectors)))))
        return out


class Transformer(SequenceEncoder):
    """Vectors of positions, and transformer blocks.

    Args:
        length: Greatest length of a sequence.
        width: Width D.
        layers: Number of blocks.
        heads: Number of heads.
        inner: Width of the hidden layer of a block's MLP.
        causal: Whether a position sees itself and earlier ones alone.
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
        causal: bool,
        rate: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__(rate)
        self.positions = PositionVectors(length, width, generator=generator)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, inner, causal=causal, rate=rate, generator=generator) for _ in range(layers)
        )

    def forward(self, vectors: Tensor, offsets: Tensor) -> Tensor:
        """Encode the sequences; see `SequenceEncoder`."""
        vectors = self.drop(self.norm(self.positions(vectors, offsets)))
        for block in self.blocks:
            vectors = block(vectors, offsets)
        return vectors

    def padded(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Encode padded sequences; see `SequenceEncoder`."""
        vectors = self.norm(self.positions.padded(vectors, lengths))
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            vectors = block.padded(vectors, lengths)
        return vectors


class HSTUBlock(SequenceEncoder):
    """A gated layer of pointwise attention (Zhai et al. 2024, arXiv 2402.17152, eq. 1 to 3).

    y = x + W_2 (norm(silu(q k^T + bias) v / M) * u) with u, v, q, k = silu(W_1 norm(x)).

    Args:
        length: Greatest length M of a sequence.
        width: Width D.
        heads: Number of heads.
        rate: Probability of zeroing an element of the input of W_2, in training.
        time_buckets: Number of biases of gaps in time; 0 for none.
        generator: Source of the initial weights.
    """

    def __init__(
        self, length: int, width: int, heads: int, *, rate: float, time_buckets: int, generator: torch.Generator
    ) -> None:
        super().__init__(rate)
        self.heads, self.width, self.length = heads, width // heads, length
        self.form = AttentionForm(kind="silu", scale=1.0, divisor=float(length))
        self.projection = new_linear(width, 4 * width, weight=normal(_STD), bias=None, generator=generator)
        self.output = new_linear(
            width, width, weight=xavier_uniform(width, width), bias=constant(0.0), generator=generator
        )
        self.distances = nn.Parameter(torch.empty(heads, 2 * length - 1))
        normal(_STD).fill_(self.distances, generator)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.gaps: nn.Parameter | None = None
        if time_buckets:
            self.gaps = nn.Parameter(torch.empty(heads, time_buckets))
            normal(_STD).fill_(self.gaps, generator)

    def forward(self, vectors: Tensor, offsets: Tensor, times: Tensor | None = None) -> Tensor:
        """Encode the sequences, whose positions have `times` int64[T] if there are biases of gaps."""
        gate, value, query, key = silu(self.projection(self.norms[0](vectors))).chunk(4, dim=1)
        q, k, v = (part.reshape(*part.shape[:1], self.heads, self.width) for part in (query, key, value))
        biases = ScoreBiases(position=self.distances, time=self.gaps, times=times)
        mixed = jagged_attention(q, k, v, offsets, self.form, biases)
        return self._combined(vectors, mixed.flatten(1), gate)

    def padded(self, vectors: Tensor, lengths: Tensor, times: Tensor | None = None) -> Tensor:
        """Encode padded sequences, whose positions have `times` int64[B, K] if there are biases of gaps."""
        gate, value, query, key = silu(self.projection(self.norms[0](vectors))).chunk(4, dim=2)
        shape = (*vectors.shape[:2], self.heads, self.width)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in (query, key, value))
        places = torch.arange(vectors.shape[1], device=vectors.device)
        scores = q @ k.transpose(2, 3) + self.distances[:, self.length - 1 + places.unsqueeze(1) - places]
        if self.gaps is not None and times is not None:
            buckets = ScoreBiases(time=self.gaps).of_gaps(times.unsqueeze(2) - times.unsqueeze(1))
            scores = scores + self.gaps[:, buckets].transpose(0, 1)
        mask = attention_mask(lengths, vectors.shape[1], causal=True)
        mixed = silu(scores).masked_fill(~mask, 0.0) / self.length @ v
        return self._combined(vectors, mixed.transpose(1, 2).flatten(2), gate)

    def _combined(self, vectors: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = vectors + self.output(self.drop(self.norms[1](mixed) * gate))
        return out


class HSTU(SequenceEncoder):
    """Vectors of positions, and HSTU blocks; the input vectors are multiplied by the root of their width.

    Args:
        length: Greatest length of a sequence.
        width: Width D.
        layers: Number of blocks.
        heads: Number of heads.
        rate: Probability of zeroing an element in training.
        time_buckets: Number of biases of gaps in time; 0 for none.
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
        time_buckets: int = 0,
        generator: torch.Generator,
    ) -> None:
        super().__init__(rate)
        self.scale = width**0.5
        self.positions = PositionVectors(length, width, generator=generator)
        self.blocks = nn.ModuleList(
            HSTUBlock(length, width, heads, rate=rate, time_buckets=time_buckets, generator=generator)
            for _ in range(layers)
        )

    def forward(self, vectors: Tensor, offsets: Tensor, times: Tensor | None = None) -> Tensor:
        """Encode the sequences, whose positions have `times` int64[T] if there are biases of gaps."""
        vectors = self.drop(self.positions(vectors * self.scale, offsets))
        for block in self.blocks:
            vectors = block(vectors, offsets, times)
        return vectors

    def padded(self, vectors: Tensor, lengths: Tensor, times: Tensor | None = None) -> Tensor:
        """Encode padded sequences, whose positions have `times` int64[B, K] if there are biases of gaps."""
        vectors = self.positions.padded(vectors * self.scale, lengths)
        for block in self.blocks:
            assert isinstance(block, HSTUBlock)
            vectors = block.padded(vectors, lengths, times)
        return vectors


def new_gru(width: int, state: int, layers: int, *, generator: torch.Generator) -> nn.GRU:
    """Return layers of gated recurrent units with torch's initial weights, drawn from `generator` alone."""
    # On "meta", so that torch draws no weights of its own from the global generator.
    gru = nn.GRU(width, state, layers, batch_first=True, device="meta").to_empty(device="cpu")
    for parameter in gru.parameters():
        uniform(state**-0.5).fill_(parameter, generator)
    return gru


class RecurrentEncoder(SequenceEncoder):
    """Gated recurrent units (Cho et al. 2014) over the sequences, and a linear layer to the width of the input.

    Args:
        width: Width D.
        state: Width of the state.
        layers: Number of layers.
        rate: Probability of zeroing an element of the input in training.
        generator: Source of the initial weights.
    """

    def __init__(self, width: int, state: int, layers: int, *, rate: float, generator: torch.Generator) -> None:
        super().__init__(rate)
        self.gru = new_gru(width, state, layers, generator=generator)
        self.output = new_linear(
            state, width, weight=xavier_uniform(state, width), bias=constant(0.0), generator=generator
        )

    def forward(self, vectors: Tensor, offsets: Tensor) -> Tensor:
        """Encode the sequences; see `SequenceEncoder`."""
        vectors = self.drop(vectors)
        if not vectors.shape[0]:
            return vectors
        order, sizes, _ = step_order(offsets, vectors.shape[0])
        states, _ = self.gru(PackedSequence(vectors.index_select(0, order), sizes))
        unsorted = torch.zeros_like(states.data).index_copy(0, order, states.data)
        out: Tensor = self.output(unsorted)
        return out

    def padded(self, vectors: Tensor, lengths: Tensor) -> Tensor:
        """Encode padded sequences; see `SequenceEncoder`."""
        # A state depends on earlier positions alone, so padding behind them changes nothing.
        states, _ = self.gru(vectors)
        out: Tensor = self.output(states)
        return out
