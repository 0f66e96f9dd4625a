"""The state of dense optimizers, as files hold it: made before the first step, and the optimizer's own."""

import pytest
import torch
from torch import nn

from terarec.errors import ConfigError
from terarec.optim import build_dense_optimizer, dense_states
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    SGDSpec,
)

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
def test_training_goes_on_from_states_that_were_copied(kind):
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


def test_other_optimizers_are_refused():
    with pytest.raises(ConfigError, match="got Rprop, expected what build_dense_optimizer makes"):
        dense_states(torch.optim.Rprop([nn.Parameter(torch.ones(1))]))
