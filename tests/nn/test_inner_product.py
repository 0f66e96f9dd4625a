import math

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn import TensorShape, WeightedLayer, build_layer
from terarec.nn.inner_product import InnerProduct
from tests.nn.formula import Array, assert_gradcheck, compare, draw, generator, make


def formula(x: Array, w: Array, b: Array) -> Array:
    out = np.zeros((*x.shape[:-1], w.shape[1]))
    for place in np.ndindex(out.shape):
        out[place] = sum(x[place[:-1]][i] * w[i, place[-1]] for i in range(w.shape[0])) + b[place[-1]]
    return out


@pytest.mark.parametrize(("batch_size", "dims", "num_output"), [(1, (1,), 1), (3, (5,), 2), (2, (3, 5), 7)])
def test_equals_the_formula(batch_size: int, dims: tuple[int, ...], num_output: int) -> None:
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


def first_weights(scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"num_output": 400, "weight_init": scheme, "bias_init": scheme}
    layer = build_layer("inner_product", [TensorShape(1, (300,))], options, generator=generator(3))
    assert isinstance(layer, InnerProduct)
    weight, bias = layer.file_parameters()
    return weight, bias


def test_first_weights_follow_the_scheme() -> None:
    weight, bias = first_weights("default")
    assert weight.shape == (300, 400)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert bias.std().item() == pytest.approx(math.sqrt(1 / 400), rel=0.2)
    weight, bias = first_weights("uniform")
    assert 0.99 / 700 < weight.abs().max().item() <= 1 / 700
    assert 0.9 / 400 < bias.abs().max().item() <= 1 / 400
    weight, bias = first_weights("xavier_norm")
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert bias.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.2)
    weight, bias = first_weights("xavier_uniform")
    assert 0.99 * math.sqrt(6 / 700) < weight.abs().max().item() <= math.sqrt(6 / 700)
    assert 0.9 * math.sqrt(6 / 400) < bias.abs().max().item() <= math.sqrt(6 / 400)
    weight, bias = first_weights("zero")
    assert not weight.any()
    assert not bias.any()


def test_first_weights_come_from_the_generator_alone() -> None:
    first = first_weights("default")
    torch.manual_seed(8)
    torch.testing.assert_close(first, first_weights("default"), rtol=0, atol=0)


def test_file_parameters_are_taken_back_and_wrong_ones_change_nothing() -> None:
    layer = make("inner_product", [(3,)], {"num_output": 2})
    assert isinstance(layer, WeightedLayer)
    before = [weight.clone() for weight in layer.file_parameters()]
    with pytest.raises(ConfigError, match=r"shapes \[\(2, 3\), \(2,\)\], expected \[\(3, 2\), \(2,\)\]"):
        layer.set_file_parameters([torch.zeros(2, 3), torch.zeros(2)])
    torch.testing.assert_close(layer.file_parameters(), before, rtol=0, atol=0)
    wanted = [torch.arange(6.0).double().view(3, 2), torch.ones(2).double()]
    layer.set_file_parameters(wanted)
    torch.testing.assert_close(layer.file_parameters(), wanted, rtol=0, atol=0)
    torch.testing.assert_close(layer(torch.eye(3).double()), wanted[0] + 1)
