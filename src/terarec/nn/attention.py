"""Attention without weights of its own: whole, and its two halves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from terarec.nn.layer import Layer, TensorShape
from terarec.nn.layer_option import integer
from terarec.nn.softmax import masked_softmax

_HEADS = integer("num_attention_heads", "heads h; the width is h times theirs", default=1)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, seq, h*d] -> [B, h, seq, d]."""
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
        """Shapes as declared."""
        q, k, v = (_split_heads(x, self.num_heads) for x in (query, key, value))
        if mask is None:
            mixed = scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            mixed = masked_softmax(scores, mask).to(v.dtype) @ v
        return mixed.transpose(1, 2).flatten(2)


class AttentionScores(Layer):
    """The first half of attention: scores before their softmax, and the values by head where they are given."""

    KIND = "attention_scores"
    OPTIONS = (_HEADS,)
    BOTTOMS = (2, 3)
    SHAPES = "Q, K, V [B, seq, h*d] -> [B, h, seq, seq], [B, h, seq, d]; Q, K [B, h, seq, d] -> [B, h, seq, seq]"
    FORMULA = "scores = Q K^T / sqrt(d); V by head"

    def __init__(self, shapes: Sequence[TensorShape], *, num_attention_heads: int) -> None:
        query, key = shapes[:2]
        heads = num_attention_heads
        if len(shapes) == 3:
            good = _are_queries_keys_values(shapes, heads)
            self.require(good, shapes, "Q [B, from, w], K and V [B, to, w], w a multiple of the heads", heads=heads)
            by_head = TensorShape(key.rows, (heads, key.dims[0], key.dims[1] // heads))
            scores = TensorShape(query.rows, (heads, query.dims[0], key.dims[0]))
            super().__init__([scores, by_head])
        else:
            good = len(query.dims) == len(key.dims) == 3 and query.rows == key.rows
            good = good and (query.dims[0], query.dims[2]) == (key.dims[0], key.dims[2])
            self.require(good, shapes, "Q [B, h, from, d] and K [B, h, to, d]")
            super().__init__([TensorShape(query.rows, (*query.dims[:2], key.dims[1]))])
        self.num_heads = heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Shapes as declared."""
        if value is None:
            return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        q, k, v = (_split_heads(x, self.num_heads) for x in (query, key, value))
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), v


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
        """Shapes as declared."""
        return (weights @ value).transpose(1, 2).flatten(2)
