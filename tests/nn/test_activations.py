# SPDX-License-Identifier: Apache-2.0
"""Activations by name, and Dice's statistics."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from terarec.errors import ConfigError
from terarec.nn import MLP
from terarec.nn.activations import ACTIVATIONS, Dice, dropout, new_activation, relu_dropout
from terarec.nn.normalization import BatchNorm1d
from terarec.spec import Activation
from tests.errors import at
from tests.nn.formula import draw, generator, make


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


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.1, 0.9, 0.999999])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (64, 2, 515)])
def test_elements_are_zeroed_or_scaled_and_so_are_gradients(rate: float, shape: tuple[int, ...]) -> None:
    layer = make("dropout", [shape[1:]], {"rate": rate})
    x = torch.from_numpy(draw(shape[0], shape[1:])[0]).requires_grad_()
    torch.manual_seed(4)
    out = layer(x)
    kept = out != 0
    units = 256 if (rate * 256).is_integer() else 65536
    scale = units / (units - min(round(rate * units), units - 1))
    torch.testing.assert_close(out, torch.where(kept, x * scale, 0.0))
    spread = 5 * np.sqrt(rate * (1 - rate) / kept.numel()) + 2e-5
    assert abs(kept.double().mean().item() - (1 - rate)) <= max(spread, 1 / kept.numel())
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.where(kept, weight * scale, 0.0))


def test_neighbours_are_independent() -> None:
    torch.manual_seed(1)
    kept = (make("dropout", [(4096,)], {"rate": 0.5})(torch.ones(64, 4096)) != 0).double() - 0.5
    for lag in (1, 2, 3, 4, 7, 8, 64):
        assert abs((kept[:, lag:] * kept[:, :-lag]).mean().item()) < 0.25 * 5 / np.sqrt(kept[:, lag:].numel())


def test_the_draw_depends_on_the_seed_and_not_on_the_threads(set_threads: Callable[[int], None]) -> None:
    layer, x = make("dropout", [(999,)], {"rate": 0.3}), torch.ones(101, 999)
    outs = []
    for count, seed in ((1, 0), (3, 0), (1, 1)):
        set_threads(count)
        torch.manual_seed(seed)
        outs.append(layer(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_it_acts_while_training_only_and_not_at_rate_zero() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(make("dropout", [(3,)]).eval()(x), x)
    assert torch.equal(make("dropout", [(3,)], {"rate": 0.0})(x), x)
    assert make("dropout", [(3,)])(x.bfloat16()).dtype == torch.bfloat16
    assert make("dropout", [(3,)])(x[:0]).shape == (0, 3)


def test_compiled_code_drops_too() -> None:
    mlp = torch.compile(MLP(4, (64, 64), generator=torch.Generator(), dropout=0.5), backend="eager")
    x = torch.randn(8, 4)
    assert not torch.equal(mlp(x), mlp(x))


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan"), "half"])
def test_a_wrong_rate_is_rejected(rate: object) -> None:
    with pytest.raises(ConfigError, check=at("layer dropout")):
        make("dropout", [(3,)], {"rate": rate})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.5, 0.2])
def test_of_the_positive_part_drops_what_dropout_of_a_relu_does(rate: float, dtype: torch.dtype) -> None:
    inputs = [torch.randn(61, 67, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_() for _ in "12"]
    outs = []
    for x, drop in zip(inputs, (relu_dropout, lambda x, rate: dropout(x.relu(), rate)), strict=True):
        torch.manual_seed(5)
        outs.append(drop(x, rate))
        (outs[-1] * torch.arange(67, dtype=dtype)).sum().backward()
    assert torch.equal(*outs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert 0 < int(outs[0].count_nonzero()) < outs[0].numel() / 2
    assert outs[0].dtype == dtype


def test_an_mlp_drops_the_positive_part() -> None:
    mlp = MLP(5, (64, 64), generator=torch.Generator().manual_seed(0), relus=(True, True), dropout=0.25)
    x = torch.randn(7, 5)
    torch.manual_seed(2)
    got = mlp(x)
    torch.manual_seed(2)
    for layer in mlp.layers:
        x = dropout(layer(x).relu(), 0.25)
    assert torch.equal(got, x)
