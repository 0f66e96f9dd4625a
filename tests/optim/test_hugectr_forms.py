# SPDX-License-Identifier: Apache-2.0
"""Dense optimizers in HugeCTR's forms against their formulas in float64, under a falling rate."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from terarec.errors import ConfigError
from terarec.optim import build_dense_optimizer
from terarec.spec import AdaGradSpec, AdamSpec, FTRLSpec, MomentumSpec, NesterovSpec, SGDSpec
from tests.errors import at


def sgd(w, s, g, lr, t):
    w -= lr * g


def momentum(w, s, g, lr, t):
    s["v"] = 0.8 * s["v"] - lr * g
    w += s["v"]


def nesterov(w, s, g, lr, t):
    old = s["v"]
    s["v"] = 0.8 * old - lr * g
    w += -0.8 * old + 1.8 * s["v"]


def adagrad(w, s, g, lr, t):
    s["v"] = s["v"] + g * g
    w -= lr * g / (np.sqrt(s["v"]) + 1e-3)


def adam(w, s, g, lr, t):
    s["m"] = 0.8 * s["m"] + 0.2 * g
    s["v"] = 0.9 * s["v"] + 0.1 * g * g
    w -= lr * math.sqrt(1 - 0.9**t) / (1 - 0.8**t) * s["m"] / (np.sqrt(s["v"]) + 0.05)


def ftrl(w, s, g, lr, t):
    before = s["v"]
    s["v"] = before + g * g
    delta = float(np.finfo(np.float32).eps)
    s["m"] = s["m"] + g + (np.sqrt(before + delta) - np.sqrt(s["v"] + delta)) * w / lr
    shrunk = np.sign(s["m"]) * 0.3 - s["m"]
    moved = shrunk / (np.sqrt(s["v"] + delta) / lr + 0.2 + 0.7 / lr)
    w[...] = np.where(np.abs(s["m"]) <= 0.3, 0.0, moved)


FORMS = {
    "sgd": (SGDSpec(), sgd),
    "momentum": (MomentumSpec(momentum=0.8, lr_in_momentum=True), momentum),
    "nesterov": (NesterovSpec(momentum=0.8, lr_in_momentum=True), nesterov),
    "adagrad": (AdaGradSpec(eps=1e-3), adagrad),
    "adam": (AdamSpec(beta1=0.8, beta2=0.9, eps=0.05, eps_hat=True), adam),
    "ftrl": (FTRLSpec(beta=0.7, l1=0.3, l2=0.2), ftrl),
}


def step(optimizer, weights, number):
    rate = 0.3 / number
    for group in optimizer.param_groups:
        group["lr"] = rate
    generator = torch.Generator().manual_seed(number)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    optimizer.step()
    return rate


@pytest.mark.parametrize("kind", FORMS)
def test_a_falling_rate_follows_the_formula(kind):
    spec, formula = FORMS[kind]
    weights = [nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(5))]
    wide = [weight.detach().double().numpy().copy() for weight in weights]
    states = [{"m": np.zeros(held.shape), "v": np.zeros(held.shape)} for held in wide]
    optimizer = build_dense_optimizer(spec, weights)
    for number in range(1, 8):
        rate = step(optimizer, weights, number)
        for weight, held, state in zip(weights, wide, states, strict=True):
            formula(held, state, weight.grad.double().numpy(), rate, number)
    for weight, held in zip(weights, wide, strict=True):
        np.testing.assert_allclose(weight.detach().numpy(), held, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", FORMS)
def test_training_resumes_where_it_stopped(kind):
    spec, _ = FORMS[kind]
    whole = [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.zeros(3))]
    optimizer = build_dense_optimizer(spec, whole)
    for number in range(1, 4):
        step(optimizer, whole, number)
    second = copy.deepcopy(whole)
    restored = build_dense_optimizer(spec, second)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(4, 7):
        step(optimizer, whole, number)
        step(restored, second, number)
    assert all(torch.equal(one, two) for one, two in zip(whole, second, strict=True))


@pytest.mark.parametrize("kind", FORMS)
def test_a_parameter_without_a_gradient_stays(kind):
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = build_dense_optimizer(FORMS[kind][0], weights)
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(weights[1], torch.ones(2))
    assert not torch.equal(weights[0], torch.ones(2))


@pytest.mark.parametrize("kind", ["momentum", "ftrl", "adam"])
def test_a_closure_is_called_with_gradients(kind):
    weight = nn.Parameter(torch.ones(2))
    optimizer = build_dense_optimizer(FORMS[kind][0], [weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert not torch.equal(weight, torch.ones(2))


def test_ftrl_divides_by_its_rate():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = build_dense_optimizer(FTRLSpec(), [weight])
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(ConfigError, check=at("FTRL")):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2))
