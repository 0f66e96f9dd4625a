import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn import TensorShape, WeightedLayer, build_layer
from tests.nn.formula import Array, compare, draw, generator, make


def stack(relus: list[bool], biases: list[bool]) -> Callable[..., Any]:
    def formula(x: Array, *weights: Array) -> Array:
        for index, relu in enumerate(relus):
            kernel, bias = weights[2 * index], weights[2 * index + 1]
            x = np.einsum("bi,io->bo", x, kernel) + (bias if biases[index] else 0.0)
            x = x * (x > 0) if relu else x
        return x

    return formula


@pytest.mark.parametrize("widths", [(1,), (3, 2), (2, 5, 1)])
def test_equals_the_formula(widths: tuple[int, ...]) -> None:
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
    ("kind", "options", "message"),
    [
        ("mlp", {"num_outputs": []}, r"num_outputs=\(\), expected at least one layer"),
        ("mlp", {"num_outputs": [2, 3], "activations": ["relu"]}, "expected 2 of activations"),
        ("mlp", {"num_outputs": [2], "biases": [True, True]}, "expected 1 of biases"),
        ("mlp", {"num_outputs": [2], "activations": ["tanh"]}, r"\['tanh'\], expected a list, each one of relu, none"),
        ("group_dense", {"num_outputs": [2]}, r"expected at least two layers"),
    ],
)
def test_wrong_options_are_refused(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, [(4,)], options)
