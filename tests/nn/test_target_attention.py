"""Attention to a target over jagged histories: gradients against a loop over the samples."""

import pytest
import torch

from terarec.nn.mlp import MLP
from terarec.nn.target_attention import TargetAttention
from tests.nn.formula import generator


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
    attention = TargetAttention(MLP(12, (4, 1), generator=generator(), activation="tanh"), softmax=softmax)
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
    attention = TargetAttention(MLP(12, (4, 1), generator=generator(), activation="dice"), softmax=softmax).eval()
    lengths = torch.tensor([2, 0, 4, 1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    target, values = torch.randn(4, 3, generator=generator(1)), torch.randn(7, 3, generator=generator(2))
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0, [1, 3]] = mask[3, 5] = True  # a vector may be at any place
    mask[2, 1:5] = True
    padded = torch.full((4, 6, 3), torch.nan)
    padded[mask] = values
    torch.testing.assert_close(attention.padded(target, padded, mask), attention(target, values, offsets))
