# SPDX-License-Identifier: Apache-2.0

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from terarec.errors import ConfigError
from terarec.nn import MLP, TensorShape, build_layer
from terarec.nn.dense import InnerProduct
from terarec.nn.layer import WeightedLayer
from tests.errors import at
from tests.nn.formula import Array, assert_gradcheck, compare, draw, generator, make


def formula(x: Array, w: Array, b: Array) -> Array:
    out = np.zeros((*x.shape[:-1], w.shape[1]))
    for place in np.ndindex(out.shape):
        out[place] = sum(x[place[:-1]][i] * w[i, place[-1]] for i in range(w.shape[0])) + b[place[-1]]
    return out


@pytest.mark.parametrize(("batch_size", "dims", "num_output"), [(1, (1,), 1), (3, (5,), 2), (2, (3, 5), 7)])
def test_inner_product_equals_the_formula(batch_size: int, dims: tuple[int, ...], num_output: int) -> None:
    layer = make("inner_product", [dims], {"num_output": num_output})
    inputs = draw(batch_size, dims)
    compare(layer, formula, inputs)
    assert_gradcheck(layer, inputs)


@pytest.mark.parametrize("activation", ["relu", "none"])
def test_fused_adds_its_activation(activation: str) -> None:
    layer = make("fused_inner_product", [(4,)], {"num_output": 3, "activation": activation})

    def fused(x: Array, w: Array, b: Array) -> Array:
        out = formula(x, w, b)
        return np.where(out > 0, out, 0.0) if activation == "relu" else out

    compare(layer, fused, draw(5, (4,)))


def initial_weights(scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"num_output": 400, "weight_init": scheme, "bias_init": scheme}
    layer = build_layer("inner_product", [TensorShape(1, (300,))], options, generator=generator(3))
    assert isinstance(layer, InnerProduct)
    weight, bias = layer.file_parameters()
    return weight, bias


def test_first_weights_follow_the_scheme() -> None:
    weight, bias = initial_weights("default")
    assert weight.shape == (300, 400)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert bias.std().item() == pytest.approx(math.sqrt(1 / 400), rel=0.2)
    weight, bias = initial_weights("uniform")
    assert 0.99 / 700 < weight.abs().max().item() <= 1 / 700
    assert 0.9 / 400 < bias.abs().max().item() <= 1 / 400
    weight, bias = initial_weights("xavier_norm")
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert bias.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.2)
    weight, bias = initial_weights("xavier_uniform")
    assert 0.99 * math.sqrt(6 / 700) < weight.abs().max().item() <= math.sqrt(6 / 700)
    assert 0.9 * math.sqrt(6 / 400) < bias.abs().max().item() <= math.sqrt(6 / 400)
    weight, bias = initial_weights("zero")
    assert not weight.any()
    assert not bias.any()


def test_inner_product_first_weights_come_from_the_generator_alone() -> None:
    first = initial_weights("default")
    torch.manual_seed(8)
    torch.testing.assert_close(first, initial_weights("default"), rtol=0, atol=0)


def test_file_parameters_are_taken_back_and_wrong_ones_change_nothing() -> None:
    layer = make("inner_product", [(3,)], {"num_output": 2})
    assert isinstance(layer, WeightedLayer)
    before = [weight.clone() for weight in layer.file_parameters()]
    with pytest.raises(ConfigError, check=at("layer inner_product")):
        layer.set_file_parameters([torch.zeros(2, 3), torch.zeros(2)])
    torch.testing.assert_close(layer.file_parameters(), before, rtol=0, atol=0)
    wanted = [torch.arange(6.0).double().view(3, 2), torch.ones(2).double()]
    layer.set_file_parameters(wanted)
    torch.testing.assert_close(layer.file_parameters(), wanted, rtol=0, atol=0)
    torch.testing.assert_close(layer(torch.eye(3).double()), wanted[0] + 1)


@pytest.mark.parametrize("relu_last", [False, True])
def test_equals_linear_layers_with_relu_between(relu_last: bool) -> None:
    mlp = MLP(5, (7, 3, 2), generator=generator(), relus=(True, True, relu_last))
    x = torch.randn(11, 5)
    expected = x
    for index, layer in enumerate(mlp.layers):
        assert isinstance(layer, nn.Linear)
        expected = expected @ layer.weight.T + layer.bias
        if index < 2 or relu_last:
            expected = expected.clamp(min=0)
    torch.testing.assert_close(mlp(x), expected)


def test_gradients_equal_those_of_plain_layers() -> None:
    mlp = MLP(5, (7, 3), generator=generator())
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for mine, theirs in zip(mlp.parameters(), plain.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    x = torch.randn(4, 5, requires_grad=True)
    got = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    torch.testing.assert_close(got, expected)


def test_mlp_first_weights_come_from_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = MLP(300, (400,), generator=generator(7))
    torch.manual_seed(2)
    second = MLP(300, (400,), generator=generator(7))
    assert torch.equal(first.layers[0].weight, second.layers[0].weight)
    assert first.layers[0].weight.std().item() == pytest.approx((2 / 700) ** 0.5, rel=0.02)
    assert not torch.equal(first.layers[0].weight, MLP(300, (400,), generator=generator(8)).layers[0].weight)


def test_dropout_acts_while_training_only() -> None:
    mlp = MLP(4, (64, 1), generator=generator(), dropout=0.5)
    x = torch.randn(8, 4)
    assert not torch.equal(mlp(x), mlp(x))
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))


def stack(relus: list[bool], biases: list[bool]) -> Callable[..., Any]:
    def formula(x: Array, *weights: Array) -> Array:
        for index, relu in enumerate(relus):
            kernel, bias = weights[2 * index], weights[2 * index + 1]
            x = np.einsum("bi,io->bo", x, kernel) + (bias if biases[index] else 0.0)
            x = x * (x > 0) if relu else x
        return x

    return formula


@pytest.mark.parametrize("widths", [(1,), (3, 2), (2, 5, 1)])
def test_mlp_layer_equals_the_formula(widths: tuple[int, ...]) -> None:
    count = len(widths)
    compare(make("mlp", [(4,)], {"num_outputs": widths}), stack([True] * count, [True] * count), draw(3, (4,)))
    relus = [index != count - 1 for index in range(count)]
    options = {"num_outputs": widths, "activations": ["relu"] * (count - 1) + ["none"]}
    compare(make("mlp", [(4,)], options), stack(relus, [True] * count), draw(3, (4,)))
    grouped = {"num_outputs": widths, "last_activation": "none"}
    if count >= 2:
        compare(make("group_dense", [(4,)], grouped), stack(relus, [True] * count), draw(3, (4,)))


def test_layers_without_bias_still_have_one_in_the_file() -> None:
    options = {"num_outputs": [3, 2], "biases": [False, True]}
    layer = make("mlp", [(4,)], options)
    assert isinstance(layer, WeightedLayer)
    assert [tuple(weight.shape) for weight in layer.file_parameters()] == [(4, 3), (3,), (3, 2), (2,)]
    assert len(list(layer.parameters())) == 3
    x = torch.from_numpy(draw(3, (4,))[0])
    kernel, _, last_kernel, last_bias = layer.file_parameters()
    torch.testing.assert_close(layer(x), ((x @ kernel).relu() @ last_kernel + last_bias).relu())
    unused = torch.arange(3.0).double()
    layer.set_file_parameters([kernel, unused, last_kernel, last_bias])
    torch.testing.assert_close(layer.file_parameters()[1], unused)
    torch.testing.assert_close(layer(x), ((x @ kernel).relu() @ last_kernel + last_bias).relu())


def test_a_second_input_is_not_read() -> None:
    layer = make("mlp", [(4,), (4,)], {"num_outputs": [2]})
    x, scratch = (torch.from_numpy(array) for array in draw(3, (4,), (4,)))
    torch.testing.assert_close(layer(x, scratch), layer(x, scratch * 0))


@pytest.mark.parametrize(("scheme", "limits"), [("default", (0.05, 0.05)), ("uniform", (0.05, 0.05))])
def test_first_weights_are_uniform_within_the_root_of_the_fan_in(scheme: str, limits: tuple[float, float]) -> None:
    options = {"num_outputs": [300], "weight_init": scheme, "bias_init": scheme}
    layer = build_layer("mlp", [TensorShape(1, (400,))], options, generator=generator())
    assert isinstance(layer, WeightedLayer)
    for weight, limit in zip(layer.file_parameters(), limits, strict=True):
        assert 0.95 * limit < weight.abs().max().item() <= limit


def test_xavier_means_the_average_fan_for_weights_and_the_output_for_biases() -> None:
    options = {"num_outputs": [300], "weight_init": "xavier_norm", "bias_init": "xavier_uniform"}
    layer = build_layer("mlp", [TensorShape(1, (400,))], options, generator=generator())
    assert isinstance(layer, WeightedLayer)
    weight, bias = layer.file_parameters()
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert 0.95 * math.sqrt(3 / 300) < bias.abs().max().item() <= math.sqrt(3 / 300)


@pytest.mark.parametrize(
    ("kind", "options", "place"),
    [
        ("mlp", {"num_outputs": []}, ("layer mlp", "num_outputs=()")),
        ("mlp", {"num_outputs": [2, 3], "activations": ["relu"]}, ("layer mlp", "expected 2 of activations")),
        ("mlp", {"num_outputs": [2], "biases": [True, True]}, ("layer mlp", "expected 1 of biases")),
        ("mlp", {"num_outputs": [2], "activations": ["tanh"]}, ("layer mlp", "['tanh']")),
        ("group_dense", {"num_outputs": [2]}, ("layer group_dense",)),
    ],
)
def test_wrong_options_are_rejected(kind: str, options: dict[str, object], place: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        make(kind, [(4,)], options)
