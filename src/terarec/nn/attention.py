# SPDX-License-Identifier: Apache-2.0
"""Layers of sequences and attention: masks, masked softmax, multi-head attention, AutoInt, DIN, a GRU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from terarec.nn.activations import dropout
from terarec.nn.dense import MLP, new_linear
from terarec.nn.initializers import Distribution, by_scheme, constant, scheme_option, uniform, xavier_uniform
from terarec.nn.layer import FileTensor, Layer, TensorShape, WeightedLayer, as_is, flag, integer, number


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """Return exp(z_i) / (sum of exp(z_j) + 1e-6) over the last dimension, z = x - 10000 (1 - mask) less its maximum.

    The gradient takes the maximum for a constant, as HugeCTR's does.

    Args:
        x: float[..., n].
        mask: Ones for elements that count, zeros for the others; broadcast against `x`.
    """
    # As HugeCTR's; with minus infinity a row of masked elements alone would be NaN.
    shifted = x - (1.0 - mask) * 10000.0
    exponents = (shifted - shifted.amax(-1, keepdim=True).detach()).exp()
    return exponents / (exponents.sum(-1, keepdim=True) + 1e-6)


class Softmax(Layer):
    """Softmax over the last dimension; a second input masks elements out."""

    KIND = "softmax"
    OPTIONS = (number("factor", "scale of the input, where there is a mask", default=1.0),)
    BOTTOMS = (1, 2)
    SHAPES = "[B, ..., n] [, mask that broadcasts to it] -> [B, ..., n]"
    FORMULA = "y = softmax(x); with a mask exp(z) / (sum exp(z) + 1e-6), z = factor x - 10000 (1 - mask) - max"

    def __init__(self, shapes: Sequence[TensorShape], *, factor: float) -> None:
        first = shapes[0]
        self.require(len(first.dims) >= 1, shapes, "at least two dimensions")
        if len(shapes) == 2:
            mask = shapes[1]
            good = mask.rows == first.rows and len(mask.dims) == len(first.dims)
            good = good and all(length in (1, full) for length, full in zip(mask.dims, first.dims, strict=False))
            self.require(good, shapes, "a mask that broadcasts to the first input")
        super().__init__([first])
        self.factor = factor

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the softmax of float[B, ..., n], with a mask on request, in the same shape."""
        return x.softmax(-1) if mask is None else masked_softmax(x * self.factor, mask)


_HEADS = integer("num_attention_heads", "heads h; the width is h times theirs", default=1)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [B, seq, h*d] as [B, h, seq, d]."""
    return x.reshape(-1, x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def _are_queries_keys_values(shapes: Sequence[TensorShape], heads: int) -> bool:
    query, key, value = shapes[:3]
    good = {len(shape.dims) for shape in shapes[:3]} == {2} and query.rows == key.rows and key == value
    return good and query.dims[1] == key.dims[1] and query.dims[1] % heads == 0


class MultiHeadAttention(Layer):
    """Scaled dot-product attention (Vaswani et al. 2017) of queries, keys and values, with a mask on request."""

    KIND = "multi_head_attention"
    OPTIONS = (_HEADS,)
    BOTTOMS = (3, 4)
    SHAPES = "Q [B, from, h*d], K and V [B, to, h*d] [, mask [B, 1, from, to]] -> [B, from, h*d]"
    FORMULA = "y = softmax(Q K^T / sqrt(d)) V for each head; the mask acts as in softmax"

    def __init__(self, shapes: Sequence[TensorShape], *, num_attention_heads: int) -> None:
        heads = num_attention_heads
        good = _are_queries_keys_values(shapes, heads)
        self.require(good, shapes, "Q [B, from, w], K and V [B, to, w], w a multiple of the heads", heads=heads)
        from_length, to_length = shapes[0].dims[0], shapes[1].dims[0]
        for mask in shapes[3:]:
            good = mask == TensorShape(shapes[0].rows, (1, from_length, to_length))
            self.require(good, shapes, f"a mask [B, 1, {from_length}, {to_length}]")
        super().__init__(shapes[:1])
        self.num_heads = heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the values of each query; shapes as declared."""
        q, k, v = (_split_heads(x, self.num_heads) for x in (query, key, value))
        if mask is None:
            # Not with a mask, where HugeCTR's softmax adds 1e-6 to the sum and torch's kernel does not.
            mixed = scaled_dot_product_attention(q, k, v)
        else:
            # (B, h, from, d) times (B, h, d, to) gives (B, h, from, to)
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            mixed = masked_softmax(scores, mask).to(v.dtype) @ v
        return mixed.transpose(1, 2).flatten(2)


class AttentionScores(Layer):
    """The first half of attention: scores before their softmax, and the values by head where they are given."""

    KIND = "attention_scores"
    OPTIONS = (_HEADS, flag("scaled", "whether scores are divided by sqrt(d)", default=True))
    BOTTOMS = (2, 3)
    SHAPES = (
        "Q [B, from, h*d], K [, V] [B, to, h*d] -> [B, h, from, to] [, [B, h, to, d]]; "
        "Q [B, h, from, d], K [B, h, to, d] -> [B, h, from, to]"
    )
    FORMULA = "scores = Q K^T / sqrt(d); V by head"

    def __init__(self, shapes: Sequence[TensorShape], *, num_attention_heads: int, scaled: bool) -> None:
        query, key = shapes[:2]
        heads = num_attention_heads
        if len(shapes) == 2 and len(query.dims) == 3:
            good = len(key.dims) == 3 and query.rows == key.rows
            good = good and (query.dims[0], query.dims[2]) == (key.dims[0], key.dims[2])
            self.require(good, shapes, "Q [B, h, from, d] and K [B, h, to, d]")
            super().__init__([TensorShape(query.rows, (*query.dims[:2], key.dims[1]))])
        else:
            good = _are_queries_keys_values((query, key, shapes[-1]), heads)
            self.require(good, shapes, "Q [B, from, w], K and V [B, to, w], w a multiple of the heads", heads=heads)
            scores = TensorShape(query.rows, (heads, query.dims[0], key.dims[0]))
            by_head = TensorShape(key.rows, (heads, key.dims[0], key.dims[1] // heads))
            super().__init__([scores, by_head][: len(shapes) - 1])
        self.num_heads, self.scaled = heads, scaled

    def forward(self, query: Tensor, key: Tensor, value: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the scores, and the values by head where they are given; shapes as declared."""
        q, k = (x if x.ndim == 4 else _split_heads(x, self.num_heads) for x in (query, key))
        scores = q @ k.transpose(-1, -2)
        if self.scaled:
            scores = scores / math.sqrt(q.shape[-1])
        return scores if value is None else (scores, _split_heads(value, self.num_heads))


class AttentionValues(Layer):
    """The second half of attention: values weighted by the softmax of the scores, heads side by side."""

    KIND = "attention_values"
    BOTTOMS = (2, 2)
    SHAPES = "[B, h, from, to] and [B, h, to, d] -> [B, from, h*d]"
    FORMULA = "y = weights V for each head"

    def __init__(self, shapes: Sequence[TensorShape]) -> None:
        weights, value = shapes
        good = len(weights.dims) == len(value.dims) == 3 and weights.rows == value.rows
        good = good and (weights.dims[0], weights.dims[2]) == value.dims[:2]
        self.require(good, shapes, "[B, h, from, to] and [B, h, to, d]")
        super().__init__([TensorShape(weights.rows, (weights.dims[1], value.dims[0] * value.dims[2]))])

    def forward(self, weights: Tensor, value: Tensor) -> Tensor:
        """Mix the values by their weights; shapes as declared."""
        return (weights @ value).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """An interacting layer of AutoInt (Song et al. 2019, arXiv 1810.11921, eq. 5 to 8).

    For each head: softmax(Q K^T) V with Q, K, V = x W_q, x W_k, x W_v. The heads lie side by side; the input, projected
    where its width is another, is added; then come layer norm on request and ReLU.

    Args:
        in_width: Length of the input vectors.
        width: Length of the output vectors, all heads together.
        heads: Number of heads.
        generator: Source of the initial weights.
        initial: (fan_in, fan_out) -> distributions of initial weights; there are no biases.
        residual: Whether the input is added.
        scale: Whether scores are divided by the root of a head's width (the paper does not).
        layer_norm: Whether the sum is normalized.
        dropout: Probability of zeroing an attention weight in training.
    """

    def __init__(
        self,
        in_width: int,
        width: int,
        heads: int,
        *,
        generator: torch.Generator,
        initial: Callable[[int, int], tuple[Distribution, Distribution]],
        residual: bool = True,
        scale: bool = False,
        layer_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.factor = (width // heads) ** -0.5 if scale else 1.0
        self.dropout = dropout
        self.adds_input = residual

        # Query, key and value are drawn in this order: another one would change the initial weights of a seed.
        def projection() -> nn.Linear:
            return new_linear(in_width, width, weight=initial(in_width, width)[0], bias=None, generator=generator)

        self.query, self.key, self.value = projection(), projection(), projection()
        self.projection = projection() if residual and in_width != width else nn.Identity()
        self.norm = nn.LayerNorm(width) if layer_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Mix the vectors of each sample: float[B, m, in_width] -> float[B, m, width]."""
        # Each is (B, heads, m, width / heads).
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = (query @ key.transpose(2, 3) * self.factor).softmax(3)
        if self.training and self.dropout:
            weights = dropout(weights, self.dropout)
        # Under autocast a softmax on a GPU returns float32, while the values are of 16 bits.
        mixed = (weights.to(value.dtype) @ value).transpose(1, 2).flatten(2)
        if self.adds_input:
            mixed = mixed + self.projection(x)
        out: Tensor = self.norm(mixed).relu()
        return out


def segment_softmax(scores: Tensor, offsets: Tensor, sample: Tensor) -> Tensor:
    """Return the softmax of the scores of each list.

    Args:
        scores: float32[n, 1], those of all lists.
        offsets: int64[B + 1]; list b has ``scores[offsets[b] : offsets[b + 1]]``.
        sample: int64[n], the list of each.
    """
    # A softmax does not change with the number that is subtracted, which needs no gradient then.
    highest = torch.segment_reduce(scores.detach(), "max", offsets=offsets, axis=0, initial=-torch.inf)
    exponents = (scores - highest.index_select(0, sample)).exp()
    total: Tensor = torch.segment_reduce(exponents, "sum", offsets=offsets, axis=0, initial=0)
    return exponents / total.index_select(0, sample)


class HistoryPooling(nn.Module):
    """Base of the modules that reduce a history to one vector, for a target.

    Args:
        out_width: Width of the result.
    """

    def __init__(self, out_width: int) -> None:
        super().__init__()
        self.out_width = out_width

    def forward(self, target: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Reduce each history.

        Args:
            target: float[B, D].
            values: float[n, D], the vectors of all histories.
            offsets: int64[B + 1]; sample b has ``values[offsets[b] : offsets[b + 1]]``.

        Returns:
            float[B, out_width].
        """
        raise NotImplementedError

    def padded(self, target: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Reduce histories padded to one length, as in an exported program.

        Args:
            target: float[B, D].
            values: float[B, K, D].
            mask: bool[B, K], the places that hold a vector.

        Returns:
            float[B, out_width], as `forward` gives it in evaluation.
        """
        raise NotImplementedError


class TargetAttention(HistoryPooling):
    """The local activation unit of the Deep Interest Network (Zhou et al. 2018, arXiv 1706.06978, eq. 3).

    The weight of a vector e of the history is a(e, t) = MLP(t, e, t - e, t * e); the output is the sum of a e. There is
    no padding: all vectors of all samples go through the MLP at once.

    Args:
        mlp: Module that returns a weight [n, 1] for inputs [n, 4 D].
        width: Length D of a vector.
        softmax: Whether the weights of a sample are normalized by a softmax; the paper leaves them as they are.
    """

    def __init__(self, mlp: MLP, width: int, *, softmax: bool = False) -> None:
        super().__init__(width)
        self.mlp = mlp
        self.softmax = softmax

    def forward(self, target: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
        """Pool each history by attention to its target, an empty one to zeros; see `HistoryPooling`."""
        lengths = offsets.diff()
        # The size is given, because torch would wait for the device to sum the lengths.
        sample = torch.repeat_interleave(lengths, output_size=values.shape[0])
        targets = target.index_select(0, sample)
        # In float32 under autocast, too: the sum over a long history would lose small terms in 16 bits.
        inputs = torch.cat([targets, values, targets - values, targets * values], dim=1)
        weights: Tensor = self.mlp(inputs).float()
        if not values.shape[0]:
            # Behind the MLP, whose statistics are those of all ranks. The empty sum keeps both in the graph: the MLP's
            # backward pass has a collective, too, and the values get a gradient of their own shape.
            return torch.zeros_like(target) + (weights * values).sum(0).to(target.dtype)
        if self.softmax:
            weights = segment_softmax(weights, offsets, sample)
        pooled: Tensor = torch.segment_reduce(weights * values.float(), "sum", offsets=offsets, axis=0, initial=0)
        return pooled.to(target.dtype)

    def padded(self, target: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Pool padded histories; see `HistoryPooling`."""
        targets = target.unsqueeze(1).expand_as(values)
        inputs = torch.cat([targets, values, targets - values, targets * values], dim=2)
        weights = self.mlp(inputs.flatten(0, 1)).float().unflatten(0, (-1, values.shape[1]))
        is_there = mask.unsqueeze(2)
        if self.softmax:
            highest = weights.masked_fill(~is_there, torch.finfo(weights.dtype).min).amax(1, keepdim=True)
            exponents = (weights - highest).exp().masked_fill(~is_there, 0.0)
            # The clamp is for empty histories, whose sum is 0.
            weights = exponents / exponents.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        pooled: Tensor = (weights * values.float()).masked_fill(~is_there, 0.0).sum(1)
        return pooled.to(target.dtype)


class GRU(WeightedLayer):
    """One layer, one direction, from a state of 0, with the biases of the input alone (Cho et al. 2014, cuDNN's form).

    Rows are sequence-major: row t*B + b is step t of sequence b.
    """

    KIND = "gru"
    OPTIONS = (
        integer("num_output", "width h of the state"),
        integer("sequence_length", "steps t"),
        integer("vector_size", "width v of a step's input"),
        scheme_option("weight_init", "initial W and R"),
        scheme_option("bias_init", "initial b"),
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
        # On "meta", so that torch draws no weights of its own from the global generator.
        self.gru = nn.GRU(vector_size, num_output, device="meta").to_empty(device="cpu")
        own = uniform(1.0 / math.sqrt(num_output))
        weight_x, weight_state, bias, unused_bias = self.gru.parameters()
        for weight, fan_in in ((weight_x, vector_size), (weight_state, num_output)):
            fans = (fan_in, num_output)
            by_scheme(weight_init, default=xavier_uniform(*fans), fans=fans).fill_(weight, generator)
        by_scheme(bias_init, default=own).fill_(bias, generator)
        # torch's GRU has two biases, cuDNN's in HugeCTR one: the second stays zero and is not trained.
        constant(0.0).fill_(unused_bias.requires_grad_(False), generator)

    @override
    def file_tensors(self) -> list[FileTensor]:
        """Return W [3 h, v], R [3 h, h] and b [3 h], of the reset gate, the update gate and the new state."""
        return [FileTensor(weight, as_is) for weight in list(self.gru.parameters())[:3]]

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after every step: float[t*B, v] -> float[t*B, h]."""
        batch_size = x.shape[0] // self.input_rows
        # Rows are reinterpreted and not transposed: HugeCTR passes its buffer to cuDNN, which reads step after step.
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
        # Buffers move with the model; they are not persistent, because the options determine them.
        self.register_buffer("_from_positions", torch.arange(max_sequence_len_from).view(1, 1, -1, 1), persistent=False)
        self.register_buffer("_to_positions", torch.arange(max_sequence_len_to).view(1, 1, 1, -1), persistent=False)

    def forward(self, length_from: Tensor, length_to: Tensor | None = None) -> Tensor:
        """Return the mask [B, 1, from or 1, to] for one or two float[B, 1] of lengths, in the first one's type."""
        last = length_from if length_to is None else length_to
        counts = self._to_positions < last.trunc().view(-1, 1, 1, 1)
        if length_to is not None:
            counts = counts & (self._from_positions < length_from.trunc().view(-1, 1, 1, 1))
        return counts.to(length_from.dtype)
