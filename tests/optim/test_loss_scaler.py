# SPDX-License-Identifier: Apache-2.0
"""Scaled losses: the steps are those of unscaled ones, for layers and rows together, as torch does them on its own."""

import json

import pytest
import torch
from torch import Tensor, nn

from terarec.batch import Jagged
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, TrainingError
from terarec.optim import LossScaler, RowOptimizer
from terarec.spec import AdamSpec, FeatureSpec, RowOptions, SGDSpec, TableSpec
from tests.errors import at

ROWS, WIDTH = 9, 4


class Model(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = TableSpec(name="t", rows=ROWS, width=WIDTH)
        self.tables = EmbeddingCollection([table], [FeatureSpec(name="t", table="t")])
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, keys: Tensor) -> Tensor:
        bags = Jagged(names=("t",), keys=keys, offsets=torch.arange(keys.numel() + 1))
        return self.layer(self.tables(bags).pooled)


class Twin(nn.Module):
    """A model of equal weights on `nn.Embedding` with dense gradients."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(model.tables.table("t").detach().clone(), freeze=False, sparse=False)
        self.layer = nn.Linear(WIDTH, 1)
        self.layer.load_state_dict(model.layer.state_dict())

    def forward(self, keys: Tensor) -> Tensor:
        return self.layer(self.table(keys))


def loss_of(model: nn.Module, step: int) -> Tensor:
    keys = torch.randint(ROWS, (6,), generator=torch.Generator().manual_seed(step))
    return (model(keys) - 3.0).square().sum()


def optimizers_of(model: Model, order: int = 0) -> list[torch.optim.Optimizer]:
    rows = RowOptimizer(model, AdamSpec(lr=0.1, rows=RowOptions(mode="global")))
    both = [torch.optim.Adam(model.parameters(), lr=0.1), rows]
    return both if order == 0 else both[::-1]


def train_step(model: Model, optimizers: list[torch.optim.Optimizer], scaler: LossScaler, step: int, **how) -> bool:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(model, step) * how.get("factor", 1.0)
    scaler.scale(loss).backward()
    if "clip" in how:
        scaler.unscale_(optimizers)
        nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
    stepped = scaler.step(optimizers)
    scaler.update()
    return stepped


def weights(model: Model) -> list[Tensor]:
    return [model.tables.table("t").detach().clone(), *(p.detach().clone() for p in model.layer.parameters())]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("scale", [{"scale": 1024.0}, {"scale": 1000.0}, {"scale": 1024.0, "dynamic": True}])
def test_scaled_clipped_steps_are_those_of_torch_on_dense_tables(scale, order: int, clip: float | None) -> None:
    model = Model()
    twin = Twin(model)
    optimizers, scaler = optimizers_of(model, order), LossScaler(**scale)
    theirs = torch.optim.Adam(twin.parameters(), lr=0.1)
    for step in range(5):
        theirs.zero_grad()
        loss_of(twin, step).backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(twin.parameters(), clip) > clip
        theirs.step()
        assert train_step(model, optimizers, scaler, step, **({} if clip is None else {"clip": clip}))
    torch.testing.assert_close(model.tables.table("t"), twin.table.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.layer.weight, twin.layer.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 7.0, 1024.0])
def test_a_static_scale_gives_the_bits_of_the_option_of_rows_and_of_a_division(scale: float) -> None:
    model, plain = Model(), Model()
    scaler = LossScaler(scale)
    mine = [torch.optim.Adam(model.layer.parameters(), lr=0.1), RowOptimizer(model, SGDSpec(lr=0.1))]
    dense = torch.optim.Adam(plain.layer.parameters(), lr=0.1)
    rows = RowOptimizer(plain, SGDSpec(lr=0.1, rows=RowOptions(loss_scale=scale)))
    for step in range(3):
        train_step(model, mine, scaler, step)
        dense.zero_grad()
        (loss_of(plain, step) * scale).backward()
        rows.step()
        torch._foreach_div_([p.grad for p in plain.layer.parameters()], scale)
        dense.step()
    assert all(torch.equal(one, other) for one, other in zip(weights(model), weights(plain), strict=True))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("where", ["rows", "layer"])
def test_a_dynamic_scale_skips_both_sides_and_falls(where: str, order: int) -> None:
    model = Model()
    optimizers, scaler = optimizers_of(model, order), LossScaler(1024.0, dynamic=True, growth_interval=2)
    assert train_step(model, optimizers, scaler, 0)
    before = weights(model)
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    if where == "layer":
        model.layer.weight.grad[0, 0] = torch.inf
    else:
        (gradient,) = model.tables.pending.gradients()[0]
        gradient.grad[0, 0] = torch.inf
    assert not scaler.step(optimizers)
    scaler.update()
    assert all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))
    assert scaler.current == 512.0
    assert [train_step(model, optimizers, scaler, step) for step in (2, 3)] == [True, True]
    assert scaler.current == 1024.0


def test_layers_skip_a_step_that_the_row_optimizer_skips() -> None:
    model = Model()
    rows = RowOptimizer(model, SGDSpec(rows=RowOptions(non_finite="skip")))
    optimizers, scaler = [torch.optim.SGD(model.layer.parameters(), lr=0.1), rows], LossScaler()
    before = weights(model)
    assert not train_step(model, optimizers, scaler, 0, factor=float("inf"))
    assert all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))


@pytest.mark.parametrize(("non_finite", "order"), [("skip", 0), ("skip", 1), ("raise", 1)])
def test_no_row_optimizer_steps_where_one_of_them_finds_a_bad_gradient(non_finite: str, order: int) -> None:
    models = Model(), Model()
    before = [weights(model) for model in models]
    options = RowOptions(non_finite=non_finite)
    rows = [RowOptimizer(model, SGDSpec(rows=options)) for model in models]
    sum(loss_of(model, 0) * factor for model, factor in zip(models, (float("nan"), 1.0), strict=True)).backward()
    scaler, optimizers = LossScaler(), rows if order == 0 else rows[::-1]
    if non_finite == "raise":
        with pytest.raises(TrainingError):
            scaler.step(optimizers)
    else:
        assert not scaler.step(optimizers)
        assert [one.num_skipped for one in rows] == [1, 0]
    for model, expected in zip(models, before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected, weights(model), strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_state_goes_through_json(dynamic: bool) -> None:
    model = Model()
    optimizers, scaler = optimizers_of(model), LossScaler(64.0, dynamic=dynamic, growth_interval=3)
    for step in range(2):
        train_step(model, optimizers, scaler, step)
    later = LossScaler(2.0, dynamic=dynamic)
    later.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for held in (scaler, later):
        train_step(model, optimizers, held, 3)
    assert later.current == scaler.current == (128.0 if dynamic else 64.0)
    with pytest.raises(ConfigError, check=at("loss scale", "got a state with")):
        LossScaler(dynamic=not dynamic).load_state_dict(scaler.state_dict())


def test_steps_without_any_gradient_change_nothing() -> None:
    model = Model()
    optimizers, scaler = optimizers_of(model), LossScaler(64.0, dynamic=True, growth_interval=1)
    scaler.scale(torch.ones(()))
    before = weights(model)
    assert scaler.step(optimizers)
    scaler.update()
    assert scaler.current == 64.0
    assert all(torch.equal(one, other) for one, other in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("bad", [{"scale": 0.0}, {"scale": float("inf")}, {"dynamic": True, "growth": 1.0}])
def test_bad_numbers_are_rejected(bad) -> None:
    with pytest.raises(ConfigError, check=at("loss scale")):
        LossScaler(**bad)
