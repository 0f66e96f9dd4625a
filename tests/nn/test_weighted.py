# SPDX-License-Identifier: Apache-2.0
"""Weight multiply, batch and layer normalization, GRU."""

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn import TensorShape, build_layer
from terarec.nn.layer import WeightedLayer
from terarec.nn.normalization import BatchNorm
from tests.errors import at
from tests.nn.formula import Array, compare, draw, generator, make


@pytest.mark.parametrize(("columns", "length"), [(1, 1), (3, 2), (2, 7)])
def test_weight_multiply_makes_vectors_of_numbers(columns: int, length: int) -> None:
    def formula(x: Array, w: Array) -> Array:
        out = np.zeros((len(x), columns * length))
        for b, s in np.ndindex(x.shape):
            out[b, s * length : (s + 1) * length] = x[b, s] * w[s]
        return out

    layer = make("weight_multiply", [(columns,)], {"weight_dims": [columns, length]})
    compare(layer, formula, draw(3, (columns,)))


def first_of(kind: str, dims: tuple[int, ...], **options: object) -> list[torch.Tensor]:
    layer = build_layer(kind, [TensorShape(1, dims)], options, generator=generator())
    assert isinstance(layer, WeightedLayer)
    return layer.file_parameters()


def test_first_weights_of_weight_multiply() -> None:
    (weight,) = first_of("weight_multiply", (13,), weight_dims=[13, 64])
    assert 0.98 * (6 / 845) ** 0.5 < weight.abs().max().item() <= (6 / 845) ** 0.5
    (weight,) = first_of("weight_multiply", (13,), weight_dims=[13, 64], weight_init="uniform")
    assert 0.98 / 845 < weight.abs().max().item() <= 1 / 845


@pytest.mark.parametrize(("batch_size", "width"), [(2, 1), (3, 5), (7, 2)])
def test_batch_norm_while_training(batch_size: int, width: int) -> None:
    def formula(x: Array, gamma: Array, beta: Array) -> Array:
        mean = x.sum(0) / len(x)
        var = ((x - mean) ** 2).sum(0) / len(x)
        return gamma * (x - mean) / np.sqrt(var + 0.01) + beta

    layer = make("batch_norm", [(width,)], {"eps": 0.01})
    compare(layer, formula, draw(batch_size, (width,)))


def test_batch_norm_moves_its_statistics_and_evaluates_with_them() -> None:
    layer = make("batch_norm", [(3,)], {"factor": 0.25, "eps": 0.01})
    assert isinstance(layer, BatchNorm)
    mean, var = np.zeros(3), np.ones(3)
    for seed in range(4):
        (x,) = draw(5, (3,), seed=seed)
        layer(torch.from_numpy(x))
        mean = 0.75 * mean + 0.25 * x.mean(0)
        var = 0.75 * var + 0.25 * x.var(0, ddof=1)
    np.testing.assert_allclose(layer.running_mean.numpy(), mean)
    np.testing.assert_allclose(layer.running_var.numpy(), var)
    layer.eval()
    compare(layer, lambda x, gamma, beta: gamma * (x - mean) / np.sqrt(var + 0.01) + beta, draw(1, (3,)))
    np.testing.assert_allclose(layer.running_mean.numpy(), mean)


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_norm_of_a_batch_without_variance_takes_the_running_statistics(rows: int) -> None:
    """The last batch of an epoch may have one row."""
    layer = make("batch_norm", [(3,)])
    layer(torch.from_numpy(draw(5, (3,))[0]))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.from_numpy(draw(rows, (3,), seed=1)[0])
    found = layer(x)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    torch.testing.assert_close(found, layer.eval()(x))


def test_batch_norm_takes_the_last_batch_alone_by_default() -> None:
    layer = make("batch_norm", [(3,)])
    assert isinstance(layer, BatchNorm)
    (x,) = draw(5, (3,))
    layer(torch.from_numpy(x))
    np.testing.assert_allclose(layer.running_mean.numpy(), x.mean(0))
    assert {"running_mean", "running_var"} <= set(layer.state_dict())


@pytest.mark.parametrize(("batch_size", "dims"), [(1, (2,)), (3, (5,)), (2, (3, 4)), (2, (2, 3, 2))])
def test_layer_norm_equals_the_formula(batch_size: int, dims: tuple[int, ...]) -> None:
    def formula(x: Array, gamma: Array, beta: Array) -> Array:
        out = np.zeros_like(x)
        for place in np.ndindex(x.shape[:-1]):
            row = x[place]
            mean = sum(row) / len(row)
            var = sum((value - mean) ** 2 for value in row) / len(row)
            out[place] = gamma * (row - mean) / np.sqrt(var + 0.01) + beta
        return out

    compare(make("layer_norm", [dims], {"eps": 0.01}), formula, draw(batch_size, dims))


@pytest.mark.parametrize("kind", ["batch_norm", "layer_norm"])
def test_norms_start_at_one_and_zero_or_at_zero_on_request(kind: str) -> None:
    gamma, beta = first_of(kind, (3,), gamma_init="xavier_norm", beta_init="uniform")
    assert gamma.tolist() == [1, 1, 1]
    assert beta.tolist() == [0, 0, 0]
    gamma, _ = first_of(kind, (3,), gamma_init="zero")
    assert gamma.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("batch_size", "steps", "width", "hidden"), [(1, 1, 1, 1), (2, 3, 2, 4), (3, 2, 5, 2)])
def test_gru_equals_the_formula(batch_size: int, steps: int, width: int, hidden: int) -> None:
    def sigmoid(x: Array) -> Array:
        return 1 / (1 + np.exp(-x))

    def formula(x: Array, w: Array, r: Array, b: Array) -> Array:
        state = np.zeros((batch_size, hidden))
        out = []
        for step in range(steps):
            now = x[step * batch_size : (step + 1) * batch_size]
            from_x = (np.einsum("bi,hi->bh", now, w) + b).reshape(batch_size, 3, hidden)
            from_state = np.einsum("bi,hi->bh", state, r).reshape(batch_size, 3, hidden)
            reset = sigmoid(from_x[:, 0] + from_state[:, 0])
            update = sigmoid(from_x[:, 1] + from_state[:, 1])
            new = np.tanh(from_x[:, 2] + reset * from_state[:, 2])
            state = (1 - update) * new + update * state
            out.append(state)
        return np.concatenate(out)

    options = {"num_output": hidden, "sequence_length": steps, "vector_size": width}
    layer = make("gru", [(width,)], options, rows=steps)
    compare(layer, formula, draw(batch_size * steps, (width,)))


def test_gru_learns_one_bias_and_draws_from_the_generator() -> None:
    options = {"num_output": 16, "sequence_length": 2, "vector_size": 3}
    weights = first_of("gru", (6,), **options)
    assert [tuple(weight.shape) for weight in weights] == [(48, 3), (48, 16), (48,)]
    assert 0.9 * (6 / 19) ** 0.5 < weights[0].abs().max().item() <= (6 / 19) ** 0.5
    torch.manual_seed(3)
    for first, second in zip(weights, first_of("gru", (6,), **options), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("kind", "dims", "options", "place"),
    [
        ("weight_multiply", (3,), {"weight_dims": [2, 4]}, ("layer weight_multiply", "weight_dims=(2, 4)")),
        (
            "weight_multiply",
            (3,),
            {"weight_dims": [3]},
            ("layer weight_multiply", "expected a list of 2, each an integer >= 1"),
        ),
        ("batch_norm", (3, 2), {}, ("layer batch_norm", "expected one input of two dimensions")),
        ("batch_norm", (3,), {"gamma_init": "one"}, ("layer batch_norm", "gamma_init is 'one'")),
        ("gru", (3,), {"num_output": 2, "sequence_length": 2, "vector_size": 2}, ("layer gru",)),
    ],
)
def test_wrong_shapes_and_options_are_rejected(
    kind: str, dims: tuple[int, ...], options: dict[str, object], place: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        make(kind, [dims], options)
