# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, and the products of probabilities of a funnel."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits

from terarec.nn.gates import funnel_logits, mix_experts


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def test_experts_are_weighted_by_the_softmax_of_the_gate() -> None:
    outputs, gate = drawn(5, 3, 2), drawn(5, 3, seed=1)
    weights = gate.exp() / gate.exp().sum(1, keepdim=True)
    torch.testing.assert_close(mix_experts(outputs, gate), (weights.unsqueeze(2) * outputs).sum(1))
    assert torch.autograd.gradcheck(mix_experts, (outputs, gate))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_probability_of_a_step_is_the_product_up_to_it(steps: int) -> None:
    logits = drawn(6, steps)
    torch.testing.assert_close(funnel_logits(logits).sigmoid(), logits.sigmoid().cumprod(1))
    assert torch.autograd.gradcheck(funnel_logits, logits)


def test_the_loss_is_that_of_the_paper() -> None:
    """The cross entropy of clicks, and that of purchases with the product of both probabilities."""
    logits, labels = drawn(20, 2), torch.randint(0, 2, (20, 2), generator=torch.Generator().manual_seed(1)).double()
    click, buy = logits.sigmoid().unbind(1)
    expected = binary_cross_entropy(click, labels[:, 0]) + binary_cross_entropy(click * buy, labels[:, 1])
    torch.testing.assert_close(2 * binary_cross_entropy_with_logits(funnel_logits(logits), labels), expected)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_probabilities_near_0_and_1_are_not_rounded(sign: float) -> None:
    logits = torch.full((1, 3), 60.0 * sign, requires_grad=True)
    exact = funnel_logits(torch.full((1, 3), 60.0 * sign, dtype=torch.float64))
    found = funnel_logits(logits)
    torch.testing.assert_close(found, exact.float())
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad > 0).all()


def test_16_bits_are_computed_in_32() -> None:
    assert funnel_logits(torch.zeros(2, 2, dtype=torch.bfloat16)).dtype == torch.float32
