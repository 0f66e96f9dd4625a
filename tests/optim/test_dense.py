# SPDX-License-Identifier: Apache-2.0
"""The state of dense optimizers, as files hold it: made before the first step, and the optimizer's own."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from terarec.errors import ConfigError
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.optim.dense import dense_states
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    RowOptions,
    RowWiseAdaGradSpec,
    RunSpec,
    SGDSpec,
    TorchOptimizerSpec,
    from_data,
    to_data,
)
from terarec.spec.checks import FieldError
from tests.errors import at

PLAIN = {
    "sgd": (SGDSpec(lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2, foreach=False)),
    "adagrad": (
        AdaGradSpec(lr=0.2, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-10, initial_accumulator_value=0.1, foreach=False),
    ),
    "momentum": (
        MomentumSpec(lr=0.2, momentum=0.7),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.7, foreach=False),
    ),
    "nesterov": (
        NesterovSpec(lr=0.2, momentum=0.7),
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.7, nesterov=True, foreach=False),
    ),
    "nesterov without momentum": (
        NesterovSpec(lr=0.2, momentum=0.0),
        lambda p: torch.optim.SGD(p, lr=0.2, foreach=False),
    ),
    "rmsprop": (
        RMSPropSpec(lr=0.2, decay=0.7, eps=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=0.2, alpha=0.7, eps=1e-3, foreach=False),
    ),
    "adamw": (
        AdamWSpec(lr=0.2, beta1=0.7, beta2=0.8, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.2, betas=(0.7, 0.8), weight_decay=0.3, foreach=False),
    ),
    "adam": (
        AdamSpec(lr=0.2, beta1=0.7, beta2=0.8),
        lambda p: torch.optim.Adam(p, lr=0.2, betas=(0.7, 0.8), foreach=False),
    ),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_follows_the_plain_optimizer(kind: str) -> None:
    spec, make = PLAIN[kind]
    weights = [nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    twins = [nn.Parameter(weight.detach().clone()) for weight in weights]
    mine, plain = build_dense_optimizer(spec, weights), make(twins)
    for _ in range(4):
        for weight, twin in zip(weights, twins, strict=True):
            weight.grad = torch.randn(5, 3)
            twin.grad = weight.grad.clone()
        mine.step()
        plain.step()
    torch.testing.assert_close(weights, twins)


@pytest.mark.parametrize(
    ("name", "options"),
    [("NAdam", {"betas": [0.8, 0.9], "weight_decay": 0.1}), ("Adagrad", {"lr_decay": 0.1}), ("SGD", {"momentum": 0.9})],
)
def test_any_class_of_torch_is_found_by_its_name(name: str, options: dict) -> None:
    spec = TorchOptimizerSpec(name=name, lr=0.2, options=options)
    spec = from_data(RunSpec, json.loads(json.dumps(to_data(RunSpec(data="d", dense_optimizer=spec))))).dense_optimizer
    weight = nn.Parameter(torch.randn(5, 3))
    twin = nn.Parameter(weight.detach().clone())
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    mine = build_dense_optimizer(spec, [weight, nn.Parameter(torch.empty(0))])
    theirs = getattr(torch.optim, name)([twin], lr=0.2, **given)
    assert type(mine) is type(theirs)
    for _ in range(3):
        weight.grad = torch.randn(5, 3)
        twin.grad = weight.grad.clone()
        mine.step()
        theirs.step()
    assert torch.equal(weight, twin)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (TorchOptimizerSpec(name="AdmaW"), "got 'AdmaW' (did you mean 'AdamW'?)"),
        (TorchOptimizerSpec(name="LBFGS"), "got 'LBFGS', which calls the model itself"),
        (TorchOptimizerSpec(name="Optimizer"), "got 'Optimizer'"),
        (
            TorchOptimizerSpec(name="Adam", options={"wd": 1}),
            "torch.optim.Adam rejects {'wd': 1}: Adam.__init__() got an unexpected keyword argument 'wd'",
        ),
        (
            TorchOptimizerSpec(name="Adam", options={"betas": [2, 3]}),
            "torch.optim.Adam rejects {'betas': [2, 3]}: Invalid beta parameter at index 0: 2",
        ),
    ],
)
def test_what_torch_does_not_have_is_one_line(spec: TorchOptimizerSpec, problem: str) -> None:
    with pytest.raises(ConfigError, check=at("dense optimizer", problem)) as caught:
        build_dense_optimizer(spec, [nn.Parameter(torch.zeros(2))])
    assert "\n" not in str(caught.value)


def test_options_of_a_class_do_not_repeat_the_rate() -> None:
    with pytest.raises(FieldError, check=at("TorchOptimizerSpec.options")):
        TorchOptimizerSpec(name="Adam", options={"lr": 0.1})
    with pytest.raises(ConfigError, check=at("row optimizer")):
        RowOptimizer(nn.Linear(2, 2), TorchOptimizerSpec(name="Adam"))  # type: ignore[arg-type]


def test_a_rule_for_tables_only_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("dense optimizer", "got RowWiseAdaGradSpec")):
        build_dense_optimizer(RowWiseAdaGradSpec(), [nn.Parameter(torch.zeros(2))])  # type: ignore[arg-type]


def test_options_for_rows_are_rejected() -> None:
    with pytest.raises(ConfigError, check=at("dense optimizer", "got options for rows")):
        build_dense_optimizer(SGDSpec(rows=RowOptions()), [nn.Parameter(torch.zeros(2))])


SPECS = {
    "sgd": (SGDSpec(), ()),
    "momentum": (MomentumSpec(), ("momentum_buffer",)),
    "nesterov": (NesterovSpec(), ("momentum_buffer",)),
    "no momentum": (MomentumSpec(momentum=0.0), ()),
    "momentum of movements": (MomentumSpec(lr_in_momentum=True), ("momentum",)),
    "adagrad": (AdaGradSpec(initial_accumulator=0.1), ("sum",)),
    "rmsprop": (RMSPropSpec(), ("square_avg",)),
    "adam": (AdamSpec(), ("exp_avg", "exp_avg_sq")),
    "epsilon hat": (AdamSpec(eps_hat=True), ("exp_avg", "exp_avg_sq")),
    "adamw": (AdamWSpec(), ("exp_avg", "exp_avg_sq")),
    "ftrl": (FTRLSpec(initial_accumulator=0.1), ("sum", "linear")),
}


def make(spec):
    weights = [nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)), nn.Parameter(torch.ones(3))]
    return weights, build_dense_optimizer(spec, weights)


def train(weights, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("kind", SPECS)
def test_a_state_made_before_the_first_step_changes_nothing(kind):
    spec, names = SPECS[kind]
    weights, optimizer = make(spec)
    states = dense_states(optimizer)
    assert tuple(states) == names
    assert all([held.shape for held in tensors] == [weight.shape for weight in weights] for tensors in states.values())
    twins, plain = make(spec)
    train(weights, optimizer, range(3))
    train(twins, plain, range(3))
    assert all(torch.equal(one, two) for one, two in zip(weights, twins, strict=True))
    expected = dense_states(plain)
    assert all(torch.equal(one, two) for name in names for one, two in zip(states[name], expected[name], strict=True))
    assert all(held.any() for tensors in states.values() for held in tensors)


@pytest.mark.parametrize("kind", ["momentum", "momentum of movements", "adagrad", "ftrl"])
def test_training_resumes_from_states_that_were_copied(kind):
    """Without a count of steps, weights and states are all that there is."""
    spec, _ = SPECS[kind]
    weights, optimizer = make(spec)
    train(weights, optimizer, range(3))
    others, other = make(spec)
    for mine, theirs in zip(dense_states(optimizer).values(), dense_states(other).values(), strict=True):
        for source, target in zip(mine, theirs, strict=True):
            target.copy_(source)
    for source, target in zip(weights, others, strict=True):
        target.data.copy_(source)
    train(weights, optimizer, range(3, 6))
    train(others, other, range(3, 6))
    assert all(torch.equal(one, two) for one, two in zip(weights, others, strict=True))


def test_other_optimizers_are_rejected():
    with pytest.raises(ConfigError, check=at("dense_states")):
        dense_states(torch.optim.Rprop([nn.Parameter(torch.ones(1))]))
