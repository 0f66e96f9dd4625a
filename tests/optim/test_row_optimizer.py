# SPDX-License-Identifier: Apache-2.0
"""A collection with its row optimizer equals `nn.EmbeddingBag` with `torch.optim`, step after step."""

import pytest
import torch
from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError
from terarec.optim import RowOptimizer, build_dense_optimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    FeatureSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    RowWiseAdaGradSpec,
    SGDSpec,
    SparseOptimizerSpec,
    TableSpec,
)
from tests.embedding.plain import PlainCollection, random_jagged
from tests.errors import at

SPECS = [
    SGDSpec(lr=0.02),
    AdaGradSpec(lr=0.1, initial_accumulator=0.2),
    RowWiseAdaGradSpec(lr=0.1, initial_accumulator=0.2),
    AdamSpec(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-3),  # a large eps: else gradients that cancel to noise decide
    MomentumSpec(lr=0.02, momentum=0.8),
    NesterovSpec(lr=0.02, momentum=0.8),
    RMSPropSpec(lr=0.05, decay=0.9, eps=1e-3),
    AdamWSpec(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2),
    AdamSpec(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-2, eps_hat=True),
    MomentumSpec(lr=0.02, momentum=0.8, lr_in_momentum=True),
    NesterovSpec(lr=0.02, momentum=0.8, lr_in_momentum=True),
]
# Shared tables, two widths, every pooling.
TABLES = [
    TableSpec(name="a", rows=6, width=4),
    TableSpec(name="b", rows=9, width=8),
    TableSpec(name="c", rows=5, width=4),
]
FEATURES = [
    FeatureSpec(name="f0", table="a"),
    FeatureSpec(name="f1", table="b", pooling="mean"),
    FeatureSpec(name="f2", table="a", pooling="none"),
    FeatureSpec(name="f3", table="c", pooling="mean"),
    FeatureSpec(name="f4", table="a", pooling="mean"),
]
NAMES, ROWS = ("f0", "f1", "f2", "f3", "f4"), (6, 9, 6, 5, 6)


class RowWiseAdagrad(torch.optim.Optimizer):
    """The formula of `RowWiseAdaGradSpec` on dense gradients."""

    def __init__(self, parameters: list[nn.Parameter], spec: RowWiseAdaGradSpec) -> None:
        super().__init__(parameters, {})
        self.spec = spec
        self.sums = [torch.full((p.shape[0], 1), spec.initial_accumulator) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter, total in zip(self.param_groups[0]["params"], self.sums, strict=True):
            total += parameter.grad.square().mean(dim=1, keepdim=True)
            parameter -= self.spec.lr * parameter.grad / (total.sqrt() + self.spec.eps)


class OnTouchedRows:
    """An optimizer that leaves weights and state of rows with a gradient of zero as they were."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.zero_grad = inner.zero_grad

    @torch.no_grad()
    def step(self) -> None:
        parameters = self.inner.param_groups[0]["params"]
        before = [{name: value.clone() for name, value in self._rows(p).items()} for p in parameters]
        self.inner.step()
        for p, held in zip(parameters, before, strict=True):
            untouched = ~p.grad.any(dim=1)
            for name, now in self._rows(p).items():
                now[untouched] = held[name][untouched] if name in held else 0.0

    def _rows(self, p: nn.Parameter) -> dict[str, torch.Tensor]:
        state = {name: value for name, value in self.inner.state[p].items() if getattr(value, "shape", ()) == p.shape}
        return {"weights": p.data, **state}


def torch_optimizer(spec: SparseOptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | OnTouchedRows:
    if isinstance(spec, SGDSpec):
        return torch.optim.SGD(parameters, lr=spec.lr)
    if isinstance(spec, AdaGradSpec):
        return torch.optim.Adagrad(
            parameters, lr=spec.lr, eps=spec.eps, initial_accumulator_value=spec.initial_accumulator
        )
    if isinstance(spec, RowWiseAdaGradSpec):
        return RowWiseAdagrad(parameters, spec)
    return OnTouchedRows(build_dense_optimizer(spec, parameters))


def loss_of(pooled: torch.Tensor, sequence: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (pooled - target).square().sum() + sequence.sin().sum()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
@pytest.mark.parametrize("num_backwards", [1, 3])
def test_equals_torch_step_after_step(spec: SparseOptimizerSpec, num_backwards: int) -> None:
    mine = EmbeddingCollection(TABLES, FEATURES, seed=4)
    plain = PlainCollection(mine)
    row_optimizer, theirs = RowOptimizer(mine, spec), torch_optimizer(spec, list(plain.weights.values()))
    target = torch.randn(10, mine.output_width, generator=torch.Generator().manual_seed(5))
    for step in range(6):
        theirs.zero_grad()
        for part in range(num_backwards):
            jagged = random_jagged(NAMES, ROWS, 10, seed=10 * step + part)
            out = mine(jagged)
            loss_of(out.pooled, out.sequences["f2"].values, target).backward()
            pooled, sequences = plain(jagged)
            loss_of(pooled, sequences["f2"], target).backward()
        row_optimizer.step()
        theirs.step()
        for name in "abc":
            torch.testing.assert_close(mine.table(name), plain.weights[name].detach(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_rows_without_keys_do_not_move(spec: SparseOptimizerSpec) -> None:
    mine = EmbeddingCollection(TABLES[:1], FEATURES[:1])
    before = mine.table("a").clone()
    row_optimizer = RowOptimizer(mine, spec)
    for _ in range(2):
        mine(random_jagged(["f0"], [3], 8)).pooled.sum().backward()
        row_optimizer.step()
    assert torch.equal(mine.table("a")[3:], before[3:])
    assert not torch.equal(mine.table("a")[:3], before[:3])


def test_two_backward_passes_through_one_forward_count_twice() -> None:
    mine = EmbeddingCollection(TABLES[:1], FEATURES[:1])
    plain = PlainCollection(mine)
    jagged = random_jagged(["f0"], [6], 8)
    for loss in (mine(jagged).pooled.square().sum(), plain(jagged)[0].square().sum()):
        loss.backward(retain_graph=True)
        loss.backward()
    RowOptimizer(mine, SGDSpec(lr=0.1)).step()
    grad = plain.weights["a"].grad
    assert grad is not None
    torch.testing.assert_close(mine.table("a"), plain.weights["a"].detach() - 0.1 * grad)


def test_a_step_without_gradients_does_nothing() -> None:
    mine = EmbeddingCollection(TABLES, FEATURES)
    row_optimizer = RowOptimizer(mine, AdamSpec())
    before = mine.table("a").clone()
    row_optimizer.step()
    mine(random_jagged(NAMES, ROWS, 4)).pooled.sum().backward()
    row_optimizer.zero_grad()
    row_optimizer.step()
    assert row_optimizer.num_steps == 0
    assert torch.equal(mine.table("a"), before)


def test_training_resumes_where_it_stopped() -> None:
    def train(mine: EmbeddingCollection, row_optimizer: RowOptimizer, steps: range) -> None:
        for step in steps:
            mine(random_jagged(NAMES, ROWS, 10, seed=step)).pooled.square().sum().backward()
            row_optimizer.step()

    spec = AdamSpec(lr=0.1)
    whole = EmbeddingCollection(TABLES, FEATURES)
    train(whole, RowOptimizer(whole, spec), range(6))

    first = EmbeddingCollection(TABLES, FEATURES)
    first_optimizer = RowOptimizer(first, spec)
    train(first, first_optimizer, range(3))
    second = EmbeddingCollection(TABLES, FEATURES, seed=9)
    second_optimizer = RowOptimizer(second, AdamSpec(lr=0.7))
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    for name, table in first.tables.items():
        for chunk in table.export_chunks(4):
            second.tables[name].import_(chunk)
    train(second, second_optimizer, range(3, 6))
    assert all(torch.equal(second.table(name), whole.table(name)) for name in "abc")


def test_the_learning_rate_can_be_set() -> None:
    mine = EmbeddingCollection(TABLES[:1], FEATURES[:1])
    row_optimizer = RowOptimizer(mine, SGDSpec(lr=0.1))
    row_optimizer.lr = 0.0
    before = mine.table("a").clone()
    mine(random_jagged(["f0"], [6], 8)).pooled.sum().backward()
    row_optimizer.step()
    assert torch.equal(mine.table("a"), before)
    assert row_optimizer.step_state() == {"kind": "sgd", "lr": 0.0, "num_steps": 1, "num_skipped": 0}


def test_collections_are_found_inside_models_and_counted_once() -> None:
    inner = EmbeddingCollection(TABLES[:1], FEATURES[:1])
    other = EmbeddingCollection(TABLES[1:2], FEATURES[1:2])
    model = nn.ModuleDict({"x": nn.Sequential(inner), "y": inner})
    row_optimizer = RowOptimizer([model, other], SGDSpec(lr=1.0))
    before = inner.table("a").clone()
    inner(random_jagged(["f0"], [6], 8)).pooled.sum().backward()
    row_optimizer.step()
    assert not torch.equal(inner.table("a"), before)


def test_what_cannot_be_optimized_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("row optimizer", "without embedding tables")):
        RowOptimizer(nn.Linear(2, 2), SGDSpec())
    twins = [EmbeddingCollection(TABLES[:1], FEATURES[:1]) for _ in range(2)]
    with pytest.raises(ConfigError, check=at("row optimizer", "2 tables are named 'a'")):
        RowOptimizer(twins, SGDSpec())
    with pytest.raises(ConfigError, check=at("row optimizer", "'adam'")):
        RowOptimizer(twins[0], SGDSpec()).load_step_state({"kind": "adam", "lr": 0.1, "num_steps": 3, "num_skipped": 0})


def test_an_invalid_rule_is_rejected() -> None:
    with pytest.raises(ConfigError, check=at("row optimizer", "got 'sgd'")):
        RowOptimizer(EmbeddingCollection(TABLES, FEATURES), "sgd")
