# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn import Loss, Regularizer, TensorShape, build_layer
from terarec.nn.losses import logistic_loss
from tests.errors import at
from tests.nn.formula import Array, generator


def make_loss(kind: str, logit: int, label: int, **options: object) -> Loss:
    shapes = [TensorShape(1, (logit,)), TensorShape(1, (label,))]
    layer = build_layer(kind, shapes, options, generator=generator())
    assert isinstance(layer, Loss)
    return layer


def check(loss: Loss, logits: Array, labels: Array, value: float, gradient: Array, prediction: Array) -> None:
    x = torch.from_numpy(logits).float().requires_grad_()
    y = torch.from_numpy(labels).float()
    got = loss(x, y)
    assert got.shape == ()
    assert got.item() == pytest.approx(value, rel=1e-5)
    got.backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), gradient, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(loss.predict(x.detach()).numpy(), prediction, rtol=1e-5)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_binary_cross_entropy(batch_size: int) -> None:
    source = np.random.default_rng(batch_size)
    x, y = source.normal(size=(batch_size, 1)), source.integers(0, 2, size=(batch_size, 1)).astype(float)
    value = float(np.mean([math.log(1 + math.exp(a)) - a * b for a, b in zip(x[:, 0], y[:, 0], strict=True)]))
    check(make_loss("binary_cross_entropy", 1, 1), x, y, value, (sigmoid(x) - y) / batch_size, sigmoid(x))


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_cross_entropy_takes_its_class_from_the_label(batch_size: int) -> None:
    source = np.random.default_rng(batch_size)
    x, y = source.normal(size=(batch_size, 2)), source.random((batch_size, 1))
    probabilities = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    one_hot = np.array([[0.0, 1.0] if label >= 0.5 else [1.0, 0.0] for label in y[:, 0]])
    value = float(-np.log((probabilities * one_hot).sum(1)).mean())
    gradient = (probabilities - one_hot) / batch_size
    check(make_loss("cross_entropy", 2, 1), x, y, value, gradient, probabilities)
    # Finding M6: a label of both classes, whose second number says the same.
    check(make_loss("cross_entropy", 2, 2), x, np.hstack([1 - y, y]), value, gradient, probabilities)


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_multi_cross_entropy_weighs_labels_and_skips_unknown_ones(batch_size: int) -> None:
    source = np.random.default_rng(batch_size)
    x, y = source.normal(size=(batch_size, 3)), source.integers(-1, 2, size=(batch_size, 3)).astype(float)
    weights = [0.5, 2.0, 3.0]
    value, gradient = 0.0, np.zeros_like(x)
    for b in range(batch_size):
        for j in range(3):
            if y[b, j] >= -0.5:
                value += weights[j] * (math.log(1 + math.exp(x[b, j])) - x[b, j] * y[b, j])
                gradient[b, j] = weights[j] * (1 / (1 + math.exp(-x[b, j])) - y[b, j])
    size = 3 * batch_size
    loss = make_loss("multi_cross_entropy", 3, 3, target_weights=weights)
    check(loss, x, y, value / size, gradient / size, sigmoid(x))


def test_extreme_logits_stay_finite() -> None:
    x, y = torch.tensor([[200.0], [-200.0]]), torch.tensor([[0.0], [1.0]])
    assert make_loss("binary_cross_entropy", 1, 1)(x, y).item() == pytest.approx(200.0)
    both = torch.tensor([[200.0, -200.0], [-200.0, 200.0]])
    assert make_loss("cross_entropy", 2, 1)(both, torch.tensor([[1.0], [0.0]])).item() == pytest.approx(400.0)


def test_half_precision_logits_give_a_float32_loss() -> None:
    for kind, width in (("binary_cross_entropy", 1), ("cross_entropy", 2)):
        loss = make_loss(kind, width, 1)
        logit = torch.randn(4, width).bfloat16()
        assert loss(logit, torch.ones(4, 1)).dtype == torch.float32
        assert loss.predict(logit).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "logit", "label", "options", "place"),
    [
        ("binary_cross_entropy", 2, 2, {}, ("layer binary_cross_entropy", "inputs [B, 2], [B, 2]")),
        ("binary_cross_entropy", 1, 2, {}, ("layer binary_cross_entropy", "expected a logit")),
        ("cross_entropy", 1, 1, {}, ("layer cross_entropy",)),
        (
            "multi_cross_entropy",
            2,
            3,
            {"target_weights": [1.0, 1.0]},
            ("layer multi_cross_entropy", "expected logits [B, d]"),
        ),
        ("multi_cross_entropy", 2, 2, {"target_weights": [1.0]}, ("layer multi_cross_entropy", "expected 2 weights")),
        ("binary_cross_entropy", 1, 1, {"regularizer": "l3"}, ("layer binary_cross_entropy", "regularizer is 'l3'")),
    ],
)
def test_wrong_shapes_and_options_are_rejected(
    kind: str, logit: int, label: int, options: dict[str, object], place: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, check=at(*place)):
        make_loss(kind, logit, label, **options)


def test_the_penalty_belongs_to_the_loss() -> None:
    assert make_loss("binary_cross_entropy", 1, 1).regularizer is None
    loss = make_loss("binary_cross_entropy", 1, 1, regularizer="l2", strength=0.3)
    assert loss.regularizer == Regularizer("l2", 0.3)


@pytest.mark.parametrize("kind", ["l1", "l2"])
def test_penalties_equal_their_formulas(kind: str) -> None:
    arrays = [np.array([[1.0, -2.0], [0.0, 3.0]]), np.array([-4.0])]
    weights = [torch.from_numpy(array).requires_grad_() for array in arrays]
    penalty = Regularizer("l1" if kind == "l1" else "l2", 0.5).penalty(weights, 10)
    penalty.backward()
    for array, weight in zip(arrays, weights, strict=True):
        assert weight.grad is not None
        wanted = 0.5 / 10 * (np.sign(array) if kind == "l1" else array)
        np.testing.assert_allclose(weight.grad.numpy(), wanted)
    total = sum(np.abs(a).sum() if kind == "l1" else (a * a).sum() / 2 for a in arrays)
    assert penalty.item() == pytest.approx(0.5 / 10 * total)
    assert Regularizer("l1", 0.5).penalty([], 10).item() == 0.0


def test_logistic_loss_is_the_mean_cross_entropy() -> None:
    logits, labels = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [0.0]])
    expected = (math.log(2) + math.log(1 + math.exp(2.0))) / 2
    assert logistic_loss(logits, labels).item() == pytest.approx(expected, rel=1e-6)


def test_large_logits_stay_finite_and_bfloat16_is_computed_in_float32() -> None:
    loss = logistic_loss(torch.tensor([[300.0], [-300.0]]).bfloat16(), torch.tensor([[1.0], [0.0]]))
    assert loss.dtype == torch.float32
    assert loss.item() == 0.0
