# SPDX-License-Identifier: Apache-2.0
"""Frozen parts keep weights and optimizer state, and go on afterwards as if nothing had been."""

import copy

import pytest
import torch
from torch import Tensor, nn

import terarec
from terarec.batch import Jagged, one_hot
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.optim import RowOptimizer, freeze, unfreeze
from terarec.spec import AdamSpec, DynamicTableSpec, FeatureSpec, TableSpec
from tests.errors import at


class Model(nn.Module):
    """Two static tables in one collection, a dynamic one in another, a drop-in table and two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [TableSpec(name="item", rows=9, width=4), TableSpec(name="shop", rows=9, width=4)]
        self.static = EmbeddingCollection(tables, [FeatureSpec(name=t.name, table=t.name) for t in tables])
        self.grows = EmbeddingCollection(
            [DynamicTableSpec(name="user", width=4)], [FeatureSpec(name="user", table="user")]
        )
        self.words = terarec.EmbeddingBag(9, 4, mode="sum")
        self.bottom, self.top = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, keys: Tensor) -> Tensor:
        bags: Jagged = one_hot(["item", "shop", "user"], keys)
        vectors = self.static(bags).pooled.view(-1, 2, 4).sum(dim=1) + self.grows(bags).pooled
        return self.top(self.bottom(vectors + self.words(keys[0][:, None])))


def keys(step: int) -> Tensor:
    return torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(step))


def optimizers_of(model: Model) -> tuple[RowOptimizer, torch.optim.Optimizer]:
    rows = RowOptimizer(model, AdamSpec(lr=0.1))
    dense = torch.optim.AdamW([*model.bottom.parameters(), *model.top.parameters()], lr=0.1)
    return rows, dense


def train(model: Model, rows: RowOptimizer, dense: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        dense.zero_grad()
        rows.zero_grad()
        model(keys(step)).square().sum().backward()
        rows.step()
        dense.step()


def parts(model: Model, dense: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Weights and state of each part."""
    found = {}
    for collection in (model.static, model.grows):
        for name, table in collection.tables.items():
            held = table.keys().sort().values
            rows = table.export(held)
            found[name] = [held, rows.weights, *rows.state.values()]
    found["words.weight"] = [model.words.weight.detach(), *model.words._arena.state.values()]
    for name, parameter in model.named_parameters():
        if name.startswith(("bottom", "top")):
            found[name] = [parameter.detach(), *dense.state[parameter].values()]
    return copy.deepcopy(found)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["bottom.*"], ["bottom.weight", "bottom.bias"]),
        (["item"], ["item"]),
        (["static.*"], ["item", "shop"]),
        (["*.bias", "us*"], ["bottom.bias", "top.bias", "user"]),
        (["words.weight"], ["words.weight"]),
        (["*"], ["words.weight", "bottom.weight", "bottom.bias", "top.weight", "top.bias", "item", "shop", "user"]),
    ],
)
def test_what_matches_stays_and_learns_again(patterns: list[str], frozen: list[str]) -> None:
    model = Model()
    rows, dense = optimizers_of(model)
    train(model, rows, dense, range(2))
    before = parts(model, dense)
    assert freeze(model, patterns, rows=rows) == frozen
    if patterns != ["*"]:
        train(model, rows, dense, range(2, 4))
    after = parts(model, dense)
    assert {name for name in before if same(before[name], after[name])} == set(frozen)
    assert unfreeze(model, patterns, rows=rows) == frozen
    train(model, rows, dense, range(4, 6))
    last = parts(model, dense)
    assert not any(same(after[name], last[name]) for name in last)


def test_an_earlier_gradient_does_not_update_frozen_tables() -> None:
    model = Model()
    rows, dense = optimizers_of(model)
    train(model, rows, dense, range(2))
    model(keys(2)).square().sum().backward()
    before = parts(model, dense)
    freeze(model, ["item", "user", "bottom.*"], rows=rows)
    rows.step()
    dense.step()
    after = parts(model, dense)
    still = {name for name in before if same(before[name], after[name])}
    assert still == {"item", "user", "bottom.weight", "bottom.bias"}


def test_a_frozen_dynamic_collection_takes_up_no_key() -> None:
    model = Model().train()
    freeze(model, ["user"])
    model(keys(0)).sum().backward()
    assert len(model.grows.tables["user"]) == 0
    unfreeze(model, ["user"])
    model(keys(0)).sum().backward()
    assert len(model.grows.tables["user"]) == keys(0)[2].unique().numel()


def test_what_matches_nothing_and_parts_of_a_collection_without_an_optimizer_are_rejected() -> None:
    model = Model()
    with pytest.raises(
        ConfigError, check=at("freeze", "got 'itme' (did you mean 'item'?), which matches no parameter")
    ):
        freeze(model, ["bottom.*", "itme"])
    with pytest.raises(
        ConfigError, check=at("freeze", "got 'item' of the tables 'item', 'shop' without a row optimizer")
    ):
        freeze(model, ["bottom.*", "item"])
    assert all(parameter.requires_grad for parameter in model.parameters())
