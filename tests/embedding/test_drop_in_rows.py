# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingBag` and `Embedding` in the hands of a `RowOptimizer`: the same training without any ``.grad``."""

import copy

import pytest
import torch
from torch import Tensor, nn

import terarec
from terarec.errors import ConfigError
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, SGDSpec
from tests.errors import at

KEYS = torch.tensor([[1, 2, 2], [0, 4, 1]])
CASES = [
    (SGDSpec(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (AdaGradSpec(lr=0.1, eps=1e-6), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6)),
]


class Model(nn.Module):
    """Three embedding modules, two of them with one weight, and a dense layer."""

    def __init__(self, library) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = library.EmbeddingBag(5, 4, mode="mean", padding_idx=2)
        self.largest = library.EmbeddingBag(5, 4, mode="max")
        self.weighted = library.EmbeddingBag(5, 4, mode="sum")
        self.words = library.Embedding(6, 4, padding_idx=0)
        self.tied = library.Embedding(6, 4)
        self.tied.weight = self.words.weight
        self.dense = nn.Linear(4, 1)

    def forward(self, keys: Tensor) -> Tensor:
        bags = self.bag(keys) + self.largest(keys) + self.weighted(keys, None, keys.float())
        return self.dense(bags + self.words(keys).sum(1) + self.tied(keys + 1).mean(1))

    def tables(self) -> list[Tensor]:
        return [self.bag.weight, self.largest.weight, self.weighted.weight, self.words.weight]


@pytest.mark.parametrize(("spec", "optimizer"), CASES, ids=["sgd", "adagrad"])
def test_equals_torch_step_after_step(spec, optimizer):
    mine, theirs = Model(terarec), Model(nn)
    theirs.load_state_dict(mine.state_dict())
    rows, of_theirs = RowOptimizer(mine, spec), optimizer(theirs.tables())
    for _ in range(4):
        for model, held in ((mine, rows), (theirs, of_theirs)):
            held.zero_grad()
            model(KEYS).square().sum().backward()
            model(KEYS + 1 - KEYS // 2).sin().sum().backward()
            held.step()
        assert all(weight.grad is None for weight in mine.tables())
        torch.testing.assert_close(mine.tables(), theirs.tables(), rtol=1e-5, atol=1e-6)


def test_training_resumes_where_it_stopped():
    spec = AdaGradSpec(lr=0.1)
    one, other = Model(terarec), Model(terarec)
    optimizers = [RowOptimizer(model, spec) for model in (one, other)]
    for step in range(3):
        if step == 2:
            other.load_state_dict(one.state_dict())
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        for model, rows in list(zip((one, other), optimizers, strict=True))[: 1 + step // 2]:
            model(KEYS).square().sum().backward()
            rows.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.tables(), other.tables(), strict=True))
    state = optimizers[0].state_dict()
    assert len(state["state"]) == 4  # the tied weight's once
    with pytest.raises(ConfigError, check=at("row optimizer", "got no state for a parameter")):
        optimizers[0].load_state_dict({**state, "state": {}})


def test_a_frozen_weight_and_evaluation_put_nothing_aside():
    model = Model(terarec)
    RowOptimizer(model, SGDSpec(lr=0.1))
    model.bag.weight.requires_grad_(False)
    model(KEYS).sum().backward()
    assert model.bag.take_gradients() == ([], 1.0)
    assert [len(gradients) for gradients in model.words.take_gradients()[0]] == [2]
    with torch.no_grad():
        model(KEYS)
    assert model.words.take_gradients() == ([[]], 1.0)


def test_a_weight_whose_rows_lie_apart_is_rejected():
    held = terarec.Embedding.from_pretrained(torch.randn(4, 10).t(), freeze=False)
    with pytest.raises(ConfigError, check=at("row optimizer", "a weight [10, 4] of strides (1, 10)")):
        RowOptimizer(held, SGDSpec())
    held(torch.tensor([1])).sum().backward()
    assert held.weight.grad is not None


@pytest.mark.parametrize("change", ["assigned", "thawed"])
def test_a_weight_that_came_after_the_optimizer_stops_it(change):
    held, other = terarec.Embedding(5, 4), terarec.Embedding(5, 4)
    other.weight.requires_grad_(change == "thawed")
    held.weight.requires_grad_(change == "assigned")
    optimizer = RowOptimizer(nn.ModuleList([held, terarec.Embedding(5, 4)]), SGDSpec())
    held.load_state_dict(other.state_dict(keep_vars=True), assign=change == "assigned")
    held.weight.requires_grad_()
    held(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, check=at("row optimizer", "a weight [5, 4] was replaced or made trainable")):
        optimizer.step()
    assert held.weight.grad is not None


def test_a_state_that_is_none_is_rejected():
    with pytest.raises(
        ConfigError, check=at("row optimizer", "got a state without param_groups, row_optimizer, state")
    ):
        RowOptimizer(terarec.Embedding(5, 4), SGDSpec()).load_state_dict({"lr": 0.1})


def test_a_copy_is_an_ordinary_module():
    model = Model(terarec)
    RowOptimizer(model, SGDSpec(lr=0.1))
    twin = copy.deepcopy(model)
    assert twin.tied.weight is twin.words.weight
    twin(KEYS).sum().backward()
    assert twin.words.weight.grad is not None
    assert model.words.take_gradients() == ([[]], 1.0)


def _train_both_uses(model: Model, rows: RowOptimizer) -> None:
    (model(KEYS).sum() + model.words.weight.sum()).backward()
    rows.step()


def test_a_gradient_from_elsewhere_is_not_lost_in_silence():
    model = Model(terarec)
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    with pytest.raises(ConfigError, check=at("row optimizer", "weight [6, 4] has a .grad")):
        _train_both_uses(model, rows)


def test_a_replaced_model_in_a_row_optimizer():
    model = terarec.replace_embeddings(Model(nn))
    before = model.bag.weight.clone()
    rows = RowOptimizer(model, SGDSpec(lr=0.1))
    model(KEYS).sum().backward()
    rows.step()
    moved = (model.bag.weight != before).any(1)
    assert moved.tolist() == [True, True, False, False, True]


def test_gradients_that_are_never_applied_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    words = terarec.Embedding(6, 4)
    RowOptimizer(words, SGDSpec(lr=0.1))
    for _ in range(101):
        words(KEYS).sum().backward()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "a weight [6, 4]: 100 gradients, 9,600 bytes, are stored without a row optimizer"
    )
