"""Activations by name, and Dice's statistics."""

import pytest
import torch

from terarec.nn.activation import ACTIVATIONS, Dice, new_activation
from terarec.nn.batch_norm import BatchNorm1d
from terarec.spec import Activation
from tests.nn.formula import generator


def test_the_names_are_those_of_the_specs() -> None:
    assert tuple(ACTIVATIONS) == Activation.__args__


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_columns_stay_apart_and_gradients_flow(name: str) -> None:
    activation = new_activation(name, 5)
    x = torch.randn(20, 5, generator=generator()).requires_grad_()
    out = activation(x + 0)
    assert out.shape == x.shape
    out[:, 2].sum().backward()
    assert x.grad is not None
    assert not x.grad[:, [0, 1, 3, 4]].any()


def test_dice_in_training_takes_the_statistics_of_the_batch() -> None:
    dice = Dice(3).double()
    torch.nn.init.normal_(dice.alpha, generator=generator())
    x = torch.randn(50, 3, generator=generator(1), dtype=torch.float64) * 3 + 2
    gate = 1 / (1 + torch.exp(-(x - x.mean(0)) / (x.var(0, correction=0) + 1e-8).sqrt()))
    torch.testing.assert_close(dice(x), gate * x + (1 - gate) * dice.alpha * x)


def test_dice_in_evaluation_scores_each_sample_alone() -> None:
    dice = Dice(3)
    for seed in range(600):
        dice(torch.randn(64, 3, generator=generator(seed)) * 3 + 2)
    dice.eval()
    x = torch.randn(50, 3, generator=generator(1)) * 3 + 2
    torch.testing.assert_close(torch.cat([dice(row[None]) for row in x]), dice(x))
    gate = 1 / (1 + torch.exp(-(x - 2) / 3))
    torch.testing.assert_close(dice(x), gate * x, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_without_variance_takes_the_running_statistics(rows: int) -> None:
    norm = BatchNorm1d(3)
    norm(torch.randn(64, 3, generator=generator()))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    x = torch.randn(rows, 3, generator=generator(1))
    found = norm(x)
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())
    torch.testing.assert_close(found, norm.eval()(x))
