# SPDX-License-Identifier: Apache-2.0
"""Attention, its halves, softmax with a mask, and masks from lengths."""

from typing import Any

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn import TensorShape
from terarec.nn.attention import TargetAttention
from terarec.nn.dense import MLP
from tests.errors import at
from tests.nn.formula import Array, assert_gradcheck, compare, draw, generator, make


def softmax_under(x: Array, mask: Array | None) -> Array:
    if mask is None:
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    z = x - 10000.0 * (1 - mask)
    exponents = np.exp(z - z.max(-1, keepdims=True))
    return exponents / (exponents.sum(-1, keepdims=True) + 1e-6)


def by_head(x: Array, heads: int) -> Array:
    width = x.shape[2] // heads
    return np.stack([x[:, :, head * width : (head + 1) * width] for head in range(heads)], axis=1)


def attention(heads: int, mask: Array | None) -> Any:
    def formula(query: Array, key: Array, value: Array) -> Array:
        q, k, v = (by_head(x, heads) for x in (query, key, value))
        out = np.zeros((len(q), q.shape[2], heads * q.shape[3]))
        for b in range(len(q)):
            for head in range(heads):
                scores = np.einsum("fd,td->ft", q[b, head], k[b, head]) / np.sqrt(q.shape[3])
                weights = softmax_under(scores, None if mask is None else mask[b, 0])
                out[b, :, head * q.shape[3] : (head + 1) * q.shape[3]] = np.einsum("ft,td->fd", weights, v[b, head])
        return out

    return formula


SIZES = [(1, 1, 1, 1), (2, 3, 5, 2), (3, 2, 2, 3)]


@pytest.mark.parametrize(("heads", "from_length", "to_length", "width"), SIZES)
def test_attention_equals_the_formula(heads: int, from_length: int, to_length: int, width: int) -> None:
    dims = [(from_length, heads * width), (to_length, heads * width), (to_length, heads * width)]
    layer = make("multi_head_attention", dims, {"num_attention_heads": heads})
    compare(layer, attention(heads, None), draw(2, *dims), rtol=1e-6)


class Masked(torch.nn.Module):
    """A layer under a mask that stays the same."""

    def __init__(self, layer: Any, mask: Array) -> None:
        super().__init__()
        self.layer, self.mask = layer, torch.from_numpy(mask)
        self.output_shapes = layer.output_shapes

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.layer(*inputs, self.mask)


@pytest.mark.parametrize(("heads", "from_length", "to_length", "width"), SIZES)
def test_attention_under_a_mask_equals_the_formula(heads: int, from_length: int, to_length: int, width: int) -> None:
    dims = [(from_length, heads * width), (to_length, heads * width), (to_length, heads * width)]
    mask_dims = (1, from_length, to_length)
    layer = make("multi_head_attention", [*dims, mask_dims], {"num_attention_heads": heads})
    mask = np.random.default_rng(3).integers(0, 2, size=(2, *mask_dims)).astype(float)
    mask[0, :, 0] = 0.0  # a position that sees nothing
    compare(Masked(layer, mask), attention(heads, mask), draw(2, *dims), gradient_atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "length", "width"), [(1, 1, 1), (2, 3, 5)])
def test_the_halves_make_the_whole(heads: int, length: int, width: int) -> None:
    dims = [(length, heads * width)] * 3
    inputs = draw(2, *dims)
    scores = make("attention_scores", dims, {"num_attention_heads": heads})

    def formula(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        q, k = by_head(query, heads), by_head(key, heads)
        return np.einsum("bhfd,bhtd->bhft", q, k) / np.sqrt(width), by_head(value, heads)

    compare(scores, formula, inputs)
    by_heads = (heads, length, width)
    alone = make("attention_scores", [by_heads, by_heads], {"num_attention_heads": heads})
    compare(alone, lambda q, k: formula(q, k, q)[0] if q.ndim == 3 else four(q, k), draw(2, by_heads, by_heads))
    values = make("attention_values", [(heads, length, length), by_heads])
    compare(values, weighted, draw(2, (heads, length, length), by_heads))
    raw, value = scores(*map(torch.from_numpy, inputs))
    whole = make("multi_head_attention", dims, {"num_attention_heads": heads})
    torch.testing.assert_close(values(raw.softmax(-1), value), whole(*map(torch.from_numpy, inputs)))


def four(q: Array, k: Array) -> Array:
    return np.einsum("bhfd,bhtd->bhft", q, k) / np.sqrt(q.shape[3])


def weighted(weights: Array, value: Array) -> Array:
    out = np.einsum("bhft,bhtd->bfhd", weights, value)
    return out.reshape(*out.shape[:2], -1)


@pytest.mark.parametrize(("dims", "mask_dims"), [((5,), (5,)), ((2, 3), (1, 3)), ((2, 3, 4), (1, 3, 4))])
def test_softmax_under_a_mask_equals_the_formula(dims: tuple[int, ...], mask_dims: tuple[int, ...]) -> None:
    mask = np.random.default_rng(3).integers(0, 2, size=(3, *mask_dims)).astype(float)
    layer = Masked(make("softmax", [dims, mask_dims], {"factor": 0.7}), mask)
    compare(layer, lambda x: softmax_under(0.7 * x, mask), draw(3, dims), gradient_atol=1e-5)  # type: ignore[arg-type]
    assert_gradcheck(layer, draw(3, dims))  # type: ignore[arg-type]


def test_a_mask_hides_the_masked_positions() -> None:
    layer = make("softmax", [(4,), (4,)]).float()
    out = layer(torch.randn(2, 4), torch.tensor([[1.0, 0, 1, 0], [0, 0, 0, 1]]))
    assert not out[0, [1, 3]].any()
    torch.testing.assert_close(out.sum(1), torch.ones(2))


@pytest.mark.parametrize(("from_length", "to_length"), [(1, 1), (3, 5), (10, 2)])
def test_masks_from_lengths(from_length: int, to_length: int) -> None:
    options = {"max_sequence_len_from": from_length, "max_sequence_len_to": to_length}
    layer = make("sequence_mask", [(1,), (1,)], options)
    first, second = np.array([[0.0], [1.0], [2.9], [30.0]]), np.array([[1.0], [2.0], [0.5], [5.0]])
    got = layer(torch.from_numpy(first), torch.from_numpy(second)).numpy()
    assert got.shape == (4, 1, from_length, to_length)
    for b, _, i, j in np.ndindex(got.shape):
        assert got[b, 0, i, j] == float(i < int(first[b, 0]) and j < int(second[b, 0]))


def test_a_mask_from_one_length() -> None:
    layer = make("sequence_mask", [(1,)], {"max_sequence_len_from": 3, "max_sequence_len_to": 3})
    got = layer(torch.tensor([[0.0], [2.5], [9.0]]))
    assert got.tolist() == [[[[0, 0, 0]]], [[[1, 1, 0]]], [[[1, 1, 1]]]]
    assert layer.output_shapes == (TensorShape(1, (1, 1, 3)),)


WRONG: list[tuple[str, list[tuple[int, ...]], dict[str, Any], str]] = [
    ("multi_head_attention", [(2, 6)] * 2, {}, ("layer multi_head_attention", "expected 3 to 4 inputs")),
    (
        "multi_head_attention",
        [(2, 6)] * 3,
        {"num_attention_heads": 4},
        ("layer multi_head_attention", "w a multiple of the heads"),
    ),
    (
        "multi_head_attention",
        [(2, 6), (3, 6), (2, 6)],
        {},
        ("layer multi_head_attention", "[B, 2, 6], [B, 3, 6], [B, 2, 6]"),
    ),
    (
        "multi_head_attention",
        [(2, 6), (3, 6), (3, 6), (1, 3, 2)],
        {},
        ("layer multi_head_attention", "expected a mask [B, 1, 2, 3]"),
    ),
    ("attention_scores", [(2, 6), (2, 4)], {}, ("layer attention_scores",)),
    ("attention_values", [(2, 3, 4), (2, 3, 4)], {}, ("layer attention_values",)),
    ("softmax", [(2, 3), (3,)], {}, ("layer softmax",)),
    ("softmax", [(2, 3), (2, 2)], {}, ("layer softmax",)),
    ("sequence_mask", [(1,), (2,)], {}, ("layer sequence_mask",)),
]


@pytest.mark.parametrize(("kind", "dims", "options", "place"), WRONG)
def test_wrong_shapes_and_options_are_rejected(
    kind: str, dims: list[tuple[int, ...]], options: dict[str, Any], place: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        make(kind, dims, options)


def looped(attention, target, values, offsets, softmax):
    rows = []
    for row, one in enumerate(target):
        vectors = values[offsets[row] : offsets[row + 1]]
        if not len(vectors):
            rows.append(torch.zeros_like(one))
            continue
        targets = one.expand_as(vectors)
        scores = attention.mlp(torch.cat([targets, vectors, targets - vectors, targets * vectors], dim=1))
        rows.append(((scores.softmax(0) if softmax else scores) * vectors).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 1, 0], [0, 0, 0], [1], [5, 1]])
def test_it_equals_a_loop_over_samples(softmax: bool, lengths: list[int]) -> None:
    attention = TargetAttention(MLP(12, (4, 1), generator=generator(), activation="tanh"), 3, softmax=softmax)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    grads = []
    outs = []
    for compute in (attention, lambda *inputs: looped(attention, *inputs, softmax)):
        target = torch.randn(len(lengths), 3, generator=generator(1)).requires_grad_()
        values = torch.randn(int(offsets[-1]), 3, generator=generator(2)).requires_grad_()
        attention.zero_grad()
        out = compute(target, values, offsets)
        outs.append(out)
        if out.requires_grad:
            (out * torch.randn(out.shape, generator=generator(3))).sum().backward()
        held = [target.grad, values.grad, *(weight.grad for weight in attention.parameters())]
        grads.append([torch.zeros(1) if grad is None else grad.clone() for grad in held])
    torch.testing.assert_close(outs[0], outs[1])
    if sum(lengths):
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softmax", [False, True])
def test_padded_histories_give_the_same(softmax: bool) -> None:
    attention = TargetAttention(MLP(12, (4, 1), generator=generator(), activation="dice"), 3, softmax=softmax).eval()
    lengths = torch.tensor([2, 0, 4, 1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    target, values = torch.randn(4, 3, generator=generator(1)), torch.randn(7, 3, generator=generator(2))
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0, [1, 3]] = mask[3, 5] = True  # a vector may be at any place
    mask[2, 1:5] = True
    padded = torch.full((4, 6, 3), torch.nan)
    padded[mask] = values
    torch.testing.assert_close(attention.padded(target, padded, mask), attention(target, values, offsets))
