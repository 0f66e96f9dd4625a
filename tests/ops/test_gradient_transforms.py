# SPDX-License-Identifier: Apache-2.0
"""Transforms of gradients before a rule: scale, bounds, regularisation, factors of the learning rate."""

import math

import pytest
import torch

from terarec.errors import ConfigError, KeyOutOfRangeError
from terarec.kernels.row_rules import RULE_KINDS
from terarec.ops.row_update import BagGradient, row_gradient_norm, row_update_
from tests.errors import at
from tests.ops.hosts import on_every_host
from tests.ops.rules import dense_gradient, make_gradients, make_rule, make_state, with_numbers

IMPLEMENTATIONS = ["cpu", "ref"]


def moved_by_sgd(implementation, width=16, lr=0.1, **changes):
    """Return the transformed gradient, which is the change of rows by SGD divided by -lr, and the plain one."""
    weights, gradients = make_gradients(width, "sum", 40, 3)
    grad, _ = dense_gradient(weights, gradients)
    before = weights.clone()
    row_update_(weights, (), gradients, make_rule("sgd", lr=lr, **changes), step=1, implementation=implementation)
    return (before - weights).double() / lr, grad, before


@pytest.mark.parametrize("width", [1, 3, 16, 37])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scale_then_bounds(implementation, width):
    transformed, grad, _ = moved_by_sgd(implementation, width, grad_scale=0.5, clip_value=0.8, clip_norm=1.5)
    expected = (0.5 * grad).clamp(-0.8, 0.8)
    expected *= (1.5 / expected.norm(dim=1, keepdim=True)).clamp(max=1.0).nan_to_num(1.0)
    torch.testing.assert_close(transformed, expected, rtol=1e-4, atol=2e-5)
    assert expected.abs().max() < grad.abs().max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_regularisation_pulls_the_touched_rows_to_zero(implementation):
    transformed, grad, weights = moved_by_sgd(implementation, l1=0.3, l2=0.7)
    touched = transformed.any(dim=1)
    expected = grad + 0.7 * weights + 0.3 * weights.sign()
    torch.testing.assert_close(transformed[touched], expected[touched], rtol=1e-4, atol=2e-5)
    assert 0 < int(touched.sum()) < weights.shape[0]


@pytest.mark.parametrize("kind", RULE_KINDS)
def test_a_scale_of_one_and_wide_bounds_change_nothing(kind):
    weights, gradients = make_gradients(17, ("mean", "sum", "mean", "mean"), 50, 4)
    results = []
    for changes in ({}, {"clip_value": 1e30}):
        rule = make_rule(kind, **changes)
        held, state = weights.clone(), make_state(rule, weights)
        row_update_(held, state, gradients, rule, step=2, implementation="cpu")
        results.append((held, *state))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("kind", RULE_KINDS)
def test_the_careful_loops_give_the_same_bits_on_every_instruction_set(kind):
    weights, gradients = make_gradients(37, "sum", 60, 3)
    rule = make_rule(kind, "global" if kind == "ftrl" else "lazy_global", clip_norm=2.0, grad_scale=0.25)

    def updated():
        held, state = weights.clone(), make_state(rule, weights)
        for step in (2, 7):
            row_update_(held, state, gradients, rule, step=step, implementation="cpu")
        return held, *state

    results = on_every_host(updated, threads=(1,))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_not_a_number_passes_every_transform(implementation):
    weights, gradients = make_gradients(16, "sum", 40, 1)
    gradients[0].grad[5, 3] = math.nan
    rule = make_rule("sgd", clip_value=1.0, l2=0.1, grad_scale=0.5)
    row_update_(weights, (), gradients, rule, step=1, implementation=implementation)
    assert weights.isnan().nonzero().tolist() == [[int(gradients[0].keys[5]), 3]]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", ["local", "global", "lazy_global"])
@pytest.mark.parametrize("kind", RULE_KINDS)
def test_factors_of_the_learning_rate(kind, mode, implementation):
    """A table with factor 0 stays, state and all; the others move as with a rule of their learning rate."""
    weights, gradients = make_gradients(8, "sum", 30, 3)
    rule = make_rule(kind, mode)
    held, state = weights.clone(), make_state(rule, weights)
    factors = torch.tensor([1.0, 0.0, 2.5])
    for step in (1, 3):
        row_update_(held, state, gradients, rule, step=step, table_lr=factors, implementation=implementation)
    untouched_state = make_state(rule, weights)
    assert torch.equal(held[1000:1013], weights[1000:1013])
    assert all(torch.equal(one[1000:1013], two[1000:1013]) for one, two in zip(state, untouched_state, strict=True))
    for rows, factor in ((slice(0, 1000), 1.0), (slice(1013, 1014), 2.5)):
        alone, own = with_numbers(rule, lr=rule.lr * factor), weights.clone()
        own_state = make_state(rule, weights)
        for step in (1, 3):
            row_update_(own, own_state, gradients, alone, step=step, implementation=implementation)
        torch.testing.assert_close(held[rows], own[rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pooling", ["sum", "none", ("mean", "sum", "mean", "mean")])
def test_the_norm_is_that_of_the_summed_gradients(implementation, pooling):
    weights, gradients = make_gradients(19, pooling, 60, 4)
    grad, _ = dense_gradient(weights, gradients)
    rule = make_rule("sgd", grad_scale=0.5)
    norm = row_gradient_norm(weights, gradients, rule, implementation=implementation)
    assert norm == pytest.approx(0.5 * float(grad.norm()), rel=1e-6)
    factors = torch.tensor([1.0, 0.0, 3.0])
    without = row_gradient_norm(weights, gradients, rule, table_lr=factors, implementation=implementation)
    grad[1000:1013] = 0
    assert without == pytest.approx(0.5 * float(grad.norm()), rel=1e-6)
    late = row_gradient_norm(weights, gradients, rule, first_row=7, implementation=implementation)
    assert late < norm
    assert row_gradient_norm(weights, [], rule, implementation=implementation) == 0.0


def test_the_norm_has_the_same_bits_for_any_number_of_threads(set_threads):
    weights, gradients = make_gradients(64, "sum", 3000, 4)
    norms = set()
    for count in (1, 2, 3, 7):
        set_threads(count)
        norms.add(row_gradient_norm(weights, gradients, make_rule("sgd"), implementation="cpu"))
    assert len(norms) == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_norm_names_a_bad_key(implementation):
    weights, gradients = make_gradients(16, "sum", 40, 1)
    gradients[1].keys[57] = -1
    with pytest.raises(KeyOutOfRangeError, check=at("feature 'b'")):
        row_gradient_norm(weights, gradients, make_rule("sgd"), implementation=implementation)


def test_factors_that_do_not_fit_are_rejected():
    weights, gradients = make_gradients(8, "sum", 4, 1)
    for factors in (torch.ones(2), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(ConfigError, check=at("table_lr", ", expected float32[3] in host memory")):
            row_update_(weights, (), gradients, make_rule("sgd"), step=1, table_lr=factors)
    layout = gradients[0].layout
    shared = type(layout)(
        table_names=("x", "y"),
        table_base=(0, 0),
        table_rows=(50, 50),
        feature_names=("f", "g"),
        feature_table=(0, 1),
        pooling=("sum", "sum"),
        width=8,
    )
    one = BagGradient(torch.tensor([1, 7]), torch.arange(3), torch.ones(1, 16), shared)
    rule = make_rule("momentum", "global")
    with pytest.raises(ConfigError, check=at("table_lr", "tables that share rows")):
        row_update_(weights, make_state(rule, weights), [one], rule, step=1, table_lr=torch.tensor([1.0, 0.5]))
    before = weights.clone()
    row_update_(weights, (), [one], make_rule("sgd"), step=1, table_lr=torch.tensor([0.0, 2.0]))
    assert (weights != before).any(dim=1).nonzero().tolist() == [[7]]
