# SPDX-License-Identifier: Apache-2.0
"""Every rule in every mode against the optimizer on whole tables in float64, over several steps."""

import pytest
import torch

from terarec.errors import ConfigError
from terarec.kernels.row_rules import RULE_KINDS, UPDATE_MODES
from terarec.ops.row_update import BagGradient, row_rule, row_update_, state_shapes
from tests.errors import at
from tests.ops.bags import make_layout
from tests.ops.rules import DenseReference, dense_gradient, make_gradients, make_rule, make_state
from tests.params import paired

IMPLEMENTATIONS = ["cpu", "ref"]
POOLINGS = ["sum", ("mean", "sum", "mean", "mean")]
CAUGHT_UP_EXACTLY = ["momentum", "nesterov", "rmsprop"]
STEPS = 5


def gradients_of(step, pooling="sum", width=8):
    """Repeated keys, two lookups, tables that several features share; the large table is touched in part."""
    return make_gradients(width, pooling, 9, 3, seed=10 * step)


def touch_every_row(layout):
    """A gradient with all keys of all tables."""
    keys = [torch.arange(layout.table_rows[table]) for table in layout.feature_table]
    bags = torch.tensor([0, *(part.numel() for part in keys)]).cumsum(0)
    grad = torch.randn(1, len(keys) * layout.width, generator=torch.Generator().manual_seed(99))
    return BagGradient(torch.cat(keys), bags, grad, layout)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("kind", "mode", "pooling"), paired(RULE_KINDS, ["local", "global"], POOLINGS))
def test_equals_the_dense_optimizer(kind, mode, pooling, implementation):
    rule = make_rule(kind, mode)
    weights, _ = gradients_of(0)
    state = make_state(rule, weights, fill=0.0)
    reference = DenseReference(weights, rule)
    for step in range(1, STEPS + 1):
        _, gradients = gradients_of(step, pooling)
        grad, touched = dense_gradient(weights, gradients)
        row_update_(weights, state, gradients, rule, step=step, implementation=implementation)
        reference.step(grad, touched if mode == "local" else torch.ones_like(touched))
    torch.testing.assert_close(weights.double(), reference.weights.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["local", "global"])
@pytest.mark.parametrize("kind", [kind for kind in RULE_KINDS if kind not in ("adamw", "ftrl")])
def test_coupled_l2_equals_the_dense_optimizers_weight_decay(kind, mode, implementation):
    rule = make_rule(kind, mode, l2=0.2)
    weights, _ = gradients_of(0)
    state = make_state(rule, weights, fill=0.0)
    reference = DenseReference(weights, rule)
    for step in range(1, 4):
        _, gradients = gradients_of(step)
        grad, touched = dense_gradient(weights, gradients)
        row_update_(weights, state, gradients, rule, step=step, implementation=implementation)
        reference.step(grad, touched if mode == "local" else torch.ones_like(touched))
    torch.testing.assert_close(weights.double(), reference.weights.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", CAUGHT_UP_EXACTLY)
def test_lazy_rows_catch_up_to_where_global_would_have_them(kind, implementation):
    lazy, reference = _after_lazy_steps(kind, implementation)
    torch.testing.assert_close(lazy.double(), reference.weights.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lazy_adamw_catches_up_its_decay_exactly(implementation):
    """Rows whose first gradient comes last have missed nothing but decay."""
    rule = make_rule("adamw", "lazy_global", lr=0.1, weight_decay=0.5)
    weights, gradients = gradients_of(1)
    state = make_state(rule, weights, fill=0.0)
    reference = DenseReference(weights, rule)
    zero = torch.zeros_like(reference.weights)
    for _ in range(7):
        reference.step(zero, torch.ones(weights.shape[0], dtype=torch.bool))
    grad, touched = dense_gradient(weights, gradients)
    reference.step(grad, touched)
    row_update_(weights, state, gradients, rule, step=8, implementation=implementation)
    torch.testing.assert_close(weights[touched].double(), reference.weights.detach()[touched], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_lazy_adam_comes_closer_to_global_than_local_does(kind, implementation):
    lazy, reference = _after_lazy_steps(kind, implementation)
    local, _ = _after_lazy_steps(kind, implementation, mode="local")
    exact = reference.weights.detach()
    assert (lazy - exact).norm() < 0.8 * (local - exact).norm()


def _after_lazy_steps(kind, implementation, mode="lazy_global"):
    """Weights after steps of which the last touches all rows, and the reference in which all rows always moved."""
    rule = make_rule(kind, mode)
    weights, _ = gradients_of(0)
    state = make_state(rule, weights, fill=0.0)
    reference = DenseReference(weights, rule)
    everything = touch_every_row(make_layout(8))
    for step in range(1, 12):
        gradients = [everything] if step in (1, 11) else gradients_of(step)[1]
        grad, touched = dense_gradient(weights, gradients)
        row_update_(weights, state, gradients, rule, step=step, implementation=implementation)
        reference.step(grad, torch.ones_like(touched))
    return weights, reference


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lazy_adam_follows_its_formula(implementation):
    """w <- w - lr / (1 - b1^p) c m / (sqrt(v / (1 - b2^p)) + eps) before the step, by hand for one row and column."""
    rule = make_rule("adam", "lazy_global")
    layout = make_layout(1)
    weights, state = torch.zeros(1014, 1), make_state(rule, torch.zeros(1014, 1), fill=0.0)
    one_key = torch.tensor([4]), torch.tensor([0, 1, 1, 1, 1])
    for step, value in ((3, 2.0), (9, -1.0)):
        gradient = BagGradient(*one_key, torch.tensor([[value, 0.0, 0.0, 0.0]]), layout)
        row_update_(weights, state, [gradient], rule, step=step, implementation=implementation)
    b1, b2, lr, eps = rule.beta1, rule.beta2, rule.lr, rule.eps
    m, v = (1 - b1) * 2.0, (1 - b2) * 4.0
    w = -lr / (1 - b1**3) * m / ((v / (1 - b2**3)) ** 0.5 + eps)
    c = sum(b1**j for j in range(1, 6))  # steps 4 to 8
    w -= lr / (1 - b1**3) * c * m / ((v / (1 - b2**3)) ** 0.5 + eps)
    m, v = b1**6 * m - (1 - b1), b2**6 * v + (1 - b2)
    w -= lr / (1 - b1**9) * m / ((v / (1 - b2**9)) ** 0.5 + eps)
    torch.testing.assert_close(weights[4, 0].item(), w, rtol=1e-5, atol=0.0)
    assert state[-1].nonzero().tolist() == [[4]]
    assert int(state[-1][4]) == 9


@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("kind", RULE_KINDS)
def test_the_same_bits_for_any_number_of_threads(set_threads, kind, mode):
    results = []
    for count in (1, 2, 5):
        set_threads(count)
        rule = make_rule(kind, mode)
        weights, _ = make_gradients(33, "sum", 300, 4)
        state = make_state(rule, weights)
        for step in (1, 4):
            row_update_(weights, state, make_gradients(33, "sum", 300, 4, step)[1], rule, step=step)
        results.append((weights, *state))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "ftrl"])
def test_rules_that_miss_nothing_keep_no_counters(kind):
    weights, gradients = gradients_of(1)
    moved = {}
    for mode in ("local", "lazy_global"):
        rule = make_rule(kind, mode)
        moved[mode] = weights.clone()
        row_update_(moved[mode], make_state(rule, weights), gradients, rule, step=3)
    assert torch.equal(moved["local"], moved["lazy_global"])
    assert state_shapes(kind, 3, 2, mode="lazy_global") == state_shapes(kind, 3, 2)


def test_the_states_of_a_rule():
    assert state_shapes("adamw", 5, 3, mode="lazy_global") == (
        ("exp_avg", (5, 3)),
        ("exp_avg_sq", (5, 3)),
        ("last_update", (5,)),
    )
    assert state_shapes("rowwise_adagrad", 5, 3) == (("sum", (5,)),)
    assert state_shapes("ftrl", 5, 3) == (("sum", (5, 3)), ("linear", (5, 3)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_global_moves_the_tables_that_are_looked_up_and_no_other(implementation):
    rule = make_rule("momentum", "global")
    weights, gradients = gradients_of(1)
    state = make_state(rule, weights, fill=1.0)
    held = gradients[0]
    one = BagGradient(held.keys[:0], torch.zeros(3, dtype=torch.int64), torch.zeros(2, 8), _only_second(held.layout))
    before = weights.clone()
    row_update_(weights, state, [one], rule, step=1, implementation=implementation)
    moved = (weights != before).any(dim=1).nonzero()[:, 0]
    assert moved.tolist() == list(range(1000, 1013))


def _only_second(layout):
    return type(layout)(
        table_names=layout.table_names,
        table_base=layout.table_base,
        table_rows=layout.table_rows,
        feature_names=("b",),
        feature_table=(1,),
        pooling=("sum",),
        width=layout.width,
    )


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"kind": "adadelta"}, ("RowRule.kind",)),
        ({"mode": "lazy"}, ("RowRule.mode",)),
        ({"kind": "adam", "beta1": 1.0}, ("RowRule.beta1",)),
        ({"eps": 1.0}, ("RowRule.eps of 'sgd'",)),
        ({"lr": float("nan")}, ("RowRule.lr", "got nan")),
        ({"l2": -1.0}, ("RowRule.l2",)),
        ({"clip_norm": 0.0}, ("RowRule.clip_norm",)),
        ({"kind": "ftrl", "lr": 0.0}, ("RowRule.lr", "got 0.0")),
        ({"mode": "lazy_global", "l1": 0.1}, ("RowRule",)),
    ],
)
def test_rules_that_make_no_sense_are_rejected(changes, place):
    with pytest.raises(ConfigError, check=at(*place)):
        row_rule(**{"kind": "sgd", "lr": 0.1, **changes})
