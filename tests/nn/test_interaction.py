# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn import DotInteraction, TensorShape, build_layer
from terarec.nn.layer import WeightedLayer
from tests.errors import at
from tests.nn.formula import Array, assert_gradcheck, compare, draw, generator, make


def naive(first: torch.Tensor, others: torch.Tensor, num_vectors: int) -> torch.Tensor:
    vectors = torch.cat([first, others], dim=1).view(first.shape[0], num_vectors, first.shape[1])
    rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    return torch.cat([first, torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]], dim=1)


@pytest.mark.parametrize(("batch_size", "num_vectors", "width"), [(0, 3, 4), (1, 2, 1), (7, 5, 3), (16, 27, 16)])
def test_equals_the_plain_formula_and_its_gradient(batch_size: int, num_vectors: int, width: int) -> None:
    layer = DotInteraction(num_vectors, width).double()
    first = torch.randn(batch_size, width, dtype=torch.float64, requires_grad=True)
    others = torch.randn(batch_size, (num_vectors - 1) * width, dtype=torch.float64, requires_grad=True)
    got, expected = layer(first, others), naive(first, others, num_vectors)
    used = expected.shape[1]
    assert got.shape == (batch_size, layer.out_width)
    assert layer.out_width % 16 == 0
    torch.testing.assert_close(got[:, :used], expected)
    assert not got[:, used:].any()
    weight = torch.randn_like(got)
    got_grads = torch.autograd.grad((got * weight).sum(), (first, others))
    expected_grads = torch.autograd.grad((expected * weight[:, :used]).sum(), (first, others))
    torch.testing.assert_close(got_grads, expected_grads)


def test_the_gradient_is_right_numerically() -> None:
    layer = DotInteraction(4, 3).double()
    inputs = (torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 9, dtype=torch.float64))
    assert torch.autograd.gradcheck(layer, tuple(value.requires_grad_() for value in inputs))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_16_bits_stay_16_bits_and_the_others_get_a_float32_gradient(dtype: torch.dtype, tolerance: float) -> None:
    layer = DotInteraction(5, 8)
    first = torch.randn(6, 8).to(dtype).requires_grad_()
    others = torch.randn(6, 32, requires_grad=True)
    out = layer(first, others)
    weight = torch.randn(out.shape).to(dtype)
    got = torch.autograd.grad((out * weight).sum(), (first, others))
    assert (out.dtype, got[0].dtype, got[1].dtype) == (dtype, dtype, torch.float32)

    exact = (first.detach().double().requires_grad_(), others.detach().double().requires_grad_())
    expected = naive(*exact, 5)
    expected_gradients = torch.autograd.grad((expected * weight[:, : expected.shape[1]].double()).sum(), exact)
    used = out[:, : expected.shape[1]]
    for found, right in zip((used, *got), (expected, *expected_gradients), strict=True):
        error = (found.double() - right).abs().max() / right.abs().max()
        assert error <= tolerance


def rank_one(x0: Array, *weights: Array) -> Array:
    x = x0
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        x = x0 * (x * w).sum(1, keepdims=True) + b + x
    return x


def low_rank(x0: Array, *weights: Array) -> Array:
    x = x0
    for u, v, b in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
        x = x0 * (np.einsum("bk,kn->bn", np.einsum("bn,nk->bk", x, u), v) + b) + x
    return x


@pytest.mark.parametrize(("batch_size", "width", "num_layers"), [(1, 1, 1), (3, 5, 2), (2, 7, 4)])
def test_version_one_equals_the_formula(batch_size: int, width: int, num_layers: int) -> None:
    layer = make("multi_cross", [(width,)], {"num_layers": num_layers})
    compare(layer, rank_one, draw(batch_size, (width,)))
    assert_gradcheck(layer, draw(batch_size, (width,)))


@pytest.mark.parametrize(("batch_size", "width", "rank", "num_layers"), [(1, 1, 1, 1), (3, 5, 2, 2), (2, 3, 5, 3)])
def test_version_two_equals_the_formula(batch_size: int, width: int, rank: int, num_layers: int) -> None:
    layer = make("multi_cross", [(width,)], {"num_layers": num_layers, "projection_dim": rank})
    compare(layer, low_rank, draw(batch_size, (width,)))
    assert_gradcheck(layer, draw(batch_size, (width,)))


def test_float32_is_as_near_to_the_truth_as_the_plain_form() -> None:
    layer = make("multi_cross", [(429,)], {"num_layers": 6})
    assert isinstance(layer, WeightedLayer)
    layer.set_file_parameters([weight / 20 for weight in layer.file_parameters()])
    x = torch.from_numpy(draw(64, (429,))[0])
    truth = layer(x)
    single = layer.float()(x.float()).double()
    plain = x.float()
    weights = layer.file_parameters()
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        plain = x.float() * (plain @ w.t()) + b + plain
    assert (single - truth).abs().max() <= 2 * (plain.double() - truth).abs().max()


def test_first_weights_are_xavier_normal_and_biases_zero() -> None:
    for options, stds in (({}, [math.sqrt(1 / 500)]), ({"projection_dim": 100}, [math.sqrt(2 / 600)] * 2)):
        shapes = [TensorShape(1, (500,))]
        layer = build_layer("multi_cross", shapes, {"num_layers": 3, **options}, generator=generator())
        assert isinstance(layer, WeightedLayer)
        weights = layer.file_parameters()
        assert len(weights) == 3 * (len(stds) + 1)
        for index, weight in enumerate(weights):
            kernel = index % (len(stds) + 1)
            if kernel == len(stds):
                assert not weight.any()
                assert weight.shape == (1, 500)
            else:
                assert weight.std().item() == pytest.approx(stds[kernel], rel=0.1)


def test_zero_weights_make_the_identity() -> None:
    options = {"num_layers": 2, "weight_init": "zero"}
    layer = build_layer("multi_cross", [TensorShape(1, (3,))], options, generator=generator())
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), x)


def test_an_input_of_three_dimensions_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("layer multi_cross")):
        make("multi_cross", [(2, 3)], {"num_layers": 1})
