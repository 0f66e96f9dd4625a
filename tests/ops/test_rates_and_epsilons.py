# SPDX-License-Identifier: Apache-2.0
"""Rules with the rate in the momentum and with epsilon hat, against their formulas in float64 under a falling rate."""

import dataclasses
import math

import pytest
import torch

from terarec.errors import ConfigError
from terarec.ops.row_update import row_rule, row_update_
from tests.errors import at
from tests.ops.rules import dense_gradient, make_gradients, make_rule, make_state

IMPLEMENTATIONS = ["cpu", "ref"]
FORMS = {
    "momentum": {"beta1": 0.8, "lr_in_momentum": True},
    "nesterov": {"beta1": 0.8, "lr_in_momentum": True},
    "adam": {"eps": 0.0, "eps_hat": 0.05, "beta1": 0.8, "beta2": 0.9},
}
STEPS = 9


def rate(step):
    return 0.2 / step


def gradients_of(step):
    """Repeated keys, two lookups; the large table is touched in part, at the last step nothing is left out."""
    return make_gradients(8, "sum", 9, 3, seed=10 * step)


class WholeTables:
    """The formulas of HugeCTR's dense optimizers, on matrices of float64."""

    def __init__(self, weights, rule):
        self.weights, self.rule = weights.double(), rule
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)

    def step(self, g, lr, t, moves):
        mu = b1 = self.rule.beta1
        w, a, v = self.weights, self.first, self.second
        if self.rule.kind == "momentum":
            new = w + (mu * a - lr * g), mu * a - lr * g, v
        elif self.rule.kind == "nesterov":
            ahead = mu * a - lr * g
            new = w - mu * a + (1 + mu) * ahead, ahead, v
        else:
            b2 = self.rule.beta2
            m, v = b1 * a + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            alpha = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
            new = w - alpha * m / (v.sqrt() + self.rule.eps_hat), m, v
        for held, value in zip((self.weights, self.first, self.second), new, strict=True):
            held[moves] = value[moves]


def with_rate(rule, step):
    return dataclasses.replace(rule, lr=rate(step))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["local", "global"])
@pytest.mark.parametrize("kind", FORMS)
def test_a_falling_rate_follows_the_formula(kind, mode, implementation):
    rule = make_rule(kind, mode, **FORMS[kind])
    weights, _ = gradients_of(0)
    state = make_state(rule, weights, fill=0.0)
    whole = WholeTables(weights, rule)
    for step in range(1, STEPS + 1):
        _, gradients = gradients_of(step)
        grad, touched = dense_gradient(weights, gradients)
        row_update_(weights, state, gradients, with_rate(rule, step), step=step, implementation=implementation)
        whole.step(grad, rate(step), step, touched if mode == "local" else torch.ones_like(touched))
    torch.testing.assert_close(weights.double(), whole.weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[0].double(), whole.first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["momentum", "nesterov"])
def test_lazy_movements_are_exact_though_the_rate_falls(kind, implementation):
    """Movements that are missed have the rates of the steps that they came from, which the state holds."""
    rule = make_rule(kind, "lazy_global", **FORMS[kind])
    weights, _ = gradients_of(0)
    state = make_state(rule, weights, fill=0.0)
    whole = WholeTables(weights, rule)
    touched_last = None
    for step in range(1, STEPS + 1):
        _, gradients = gradients_of(step)
        grad, touched_last = dense_gradient(weights, gradients)
        row_update_(weights, state, gradients, with_rate(rule, step), step=step, implementation=implementation)
        whole.step(grad, rate(step), step, torch.ones_like(touched_last))
    torch.testing.assert_close(weights[touched_last].double(), whole.weights[touched_last], rtol=1e-4, atol=1e-5)


class LazyGlobalAdam:
    """HugeCTR's LazyGlobal: a row's movement of step p is made, with those that it missed, at its next hit."""

    def __init__(self, weights, rule):
        self.weights, self.rule = weights.double(), rule
        self.m, self.v = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.previous = torch.ones(weights.shape[0], 1, dtype=torch.float64)

    def step(self, g, t, hit):
        lr, b1, b2 = self.rule.lr, self.rule.beta1, self.rule.beta2
        p, missed = self.previous, t - self.previous
        rates = lr / (1 - b1) * (1 - b2**p).sqrt() / (1 - b1**p) * (1 - b1**missed)
        moved = self.weights - rates * self.m / (self.v.sqrt() + self.rule.eps_hat)
        new = moved, b1**missed * self.m + (1 - b1) * g, b2**missed * self.v + (1 - b2) * g * g, torch.full_like(p, t)
        for held, value in zip((self.weights, self.m, self.v, self.previous), new, strict=True):
            held[hit] = value[hit]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lazy_adam_with_epsilon_hat_is_hugectrs_once_its_pending_movements_are_made(implementation):
    rule = make_rule("adam", "lazy_global", lr=0.1, **FORMS["adam"])
    weights, _ = gradients_of(0)
    state = make_state(rule, weights, fill=0.0)
    theirs = LazyGlobalAdam(weights, rule)
    pending = torch.zeros(weights.shape[0], dtype=torch.bool)
    for step in range(1, STEPS + 1):
        _, gradients = gradients_of(step)
        grad, hit = dense_gradient(weights, gradients)
        row_update_(weights, state, gradients, rule, step=step, implementation=implementation)
        theirs.step(grad, step, hit)
        pending |= hit
    for moment, expected in zip(state[:2], (theirs.m, theirs.v), strict=True):
        torch.testing.assert_close(moment.double(), expected, rtol=1e-4, atol=1e-6)
    now = (state[-1] == STEPS) & pending  # rows whose last movement is the only one that is pending there
    assert 0 < int(now.sum()) < int(pending.sum())
    theirs.step(torch.zeros_like(theirs.weights), STEPS + 1, now)
    torch.testing.assert_close(weights[now].double(), theirs.weights[now], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tables_factor_multiplies_movements(implementation):
    rule = make_rule("momentum", lr=0.1, **FORMS["momentum"])
    before, gradients = gradients_of(1)
    moved = []
    for factors in (None, torch.full((3,), 0.5)):
        weights = before.clone()
        state = make_state(rule, weights, fill=0.0)
        for step in (1, 2):
            row_update_(weights, state, gradients, rule, step=step, table_lr=factors, implementation=implementation)
        moved.append(weights - before)
    torch.testing.assert_close(moved[1], 0.5 * moved[0], rtol=1e-4, atol=1e-6)


def test_a_momentum_is_requested():
    with pytest.raises(ConfigError, check=at("RowRule.lr_in_momentum of 'adam'")):
        row_rule("adam", lr=0.1, lr_in_momentum=True)
    with pytest.raises(ConfigError, check=at("RowRule.eps_hat")):
        row_rule("adam", lr=0.1, eps_hat=-1.0)
