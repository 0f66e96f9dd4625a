# SPDX-License-Identifier: Apache-2.0
"""Gradients of key weights, against formulas in float64 that autograd derives."""

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.kernels.contract import MEAN, SQRTN
from terarec.kernels.ref.bag_lookup import key_weight_gradient as of_dots
from terarec.kernels.ref.bag_lookup import locate_checked
from terarec.kernels.registry import choose
from terarec.ops import bag_lookup
from terarec.ops.bag_lookup import key_weight_gradient
from tests.errors import at
from tests.ops.bags import make_layout, make_lookup
from tests.ops.hosts import on_every_host
from tests.ops.test_poolings import by_formula


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", ("sum", "mean", "sqrtn", "mean")])
def test_follows_the_formula(implementation, dtype, pooling):
    held = make_lookup(make_layout(19, pooling), 9, 3, seed=4)
    weights = held.weights.to(dtype)
    exact = held.key_weights.double().requires_grad_()
    expected = by_formula(held, weights.double(), exact)
    key_weights = held.key_weights.clone().requires_grad_()
    arguments = (weights, held.keys, held.offsets, held.layout)
    result = bag_lookup(*arguments, key_weights=key_weights, implementation=implementation)
    grad = torch.randn(result.shape)
    result.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(key_weights.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 15, 16, 33, 64])
def test_dots_have_the_same_bits_on_every_instruction_set_and_thread_count(width):
    held = make_lookup(make_layout(width), 3000, 2)
    grad = torch.randn(3000, 4 * width)
    arguments = (held.weights, held.keys, held.offsets, grad, held.layout.array)
    expected = choose("row_dots", "cpu", "ref")(*arguments)
    results = on_every_host(lambda: choose("row_dots", "cpu", "cpu")(*arguments), threads=(1, 3))
    torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
def test_zero_weights_have_gradients_of_zero_where_they_divide(implementation):
    held = make_lookup(make_layout(4, ("mean", "sqrtn", "sum", "mean")), 3, 1)
    arguments = (held.weights, held.keys, held.offsets, torch.ones(3, 16), held.layout)
    gradient = key_weight_gradient(*arguments, key_weights=torch.zeros(12), implementation=implementation)
    assert torch.equal(gradient[:6], torch.zeros(6))
    assert torch.equal(gradient[9:], torch.zeros(3))
    torch.testing.assert_close(gradient[6:9], held.weights[held.keys[6:9]].sum(dim=1))


@pytest.mark.parametrize("implementation", ["cpu", "ref"])
def test_what_does_not_fit_is_rejected(implementation):
    held = make_lookup(make_layout(4), 3, 1)
    grad, key_weights = torch.ones(3, 16), held.key_weights
    good = (held.weights, held.keys, held.offsets)
    with pytest.raises(ConfigError, check=at("grad")):
        key_weight_gradient(*good, grad[:2], held.layout, key_weights=key_weights, implementation=implementation)
    with pytest.raises(ConfigError, check=at("key_weights")):
        key_weight_gradient(*good, grad, make_layout(4, "max"), key_weights=key_weights, implementation=implementation)
    held.keys[5] = -1
    with pytest.raises(KeyOutOfRangeError, check=at("feature 'b'")):
        key_weight_gradient(*good, grad, held.layout, key_weights=key_weights, implementation=implementation)


def test_divisors_add_the_weights_of_a_bag_in_the_order_of_its_keys():
    """As `add.accumulate` does, so that the bits are those of another device."""
    generator = torch.Generator().manual_seed(0)
    key_weights, offsets = torch.randn(150, generator=generator), torch.tensor([0, 20, 20, 150, 150])
    pooling = torch.tensor([MEAN, SQRTN])
    factors = locate_checked(torch.zeros(150, dtype=torch.int64), offsets, torch.zeros(2).long(), pooling, key_weights)[
        2
    ]
    first, last = key_weights.numpy()[:20], key_weights.numpy()[20:]
    one = np.float32(1.0)
    expected = [one / np.add.accumulate(first)[-1], 0.0, one / np.sqrt(np.add.accumulate(last * last)[-1]), 0.0]
    assert factors.tolist() == expected


def test_the_formula_reads_no_number_for_which_a_device_would_be_waited_for():
    """Tensors of the meta device have none."""
    tensors = torch.randn(6), torch.tensor([0, 2, 2, 5, 6]), torch.tensor([MEAN, SQRTN]), torch.randn(6)
    assert of_dots(*(tensor.to("meta") for tensor in tensors)).shape == (6,)
