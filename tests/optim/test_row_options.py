# SPDX-License-Identifier: Apache-2.0
"""Options of `RowOptions` through a collection: modes, bounds, factors, frozen tables, bad gradients."""

import copy
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, TrainingError
from terarec.kernels.row_rules import number_names
from terarec.optim import RowOptimizer
from terarec.optim.rules import table_rules
from terarec.spec import (
    AdamSpec,
    AdamWSpec,
    FeatureSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    RowOptions,
    SGDSpec,
    SparseOptimizerSpec,
    TableSpec,
)
from tests.embedding.plain import PlainCollection, random_jagged
from tests.errors import at

TABLES = [
    TableSpec(name="a", rows=30, width=4),
    TableSpec(name="b", rows=20, width=8),
    TableSpec(name="c", rows=5, width=4),
]
FEATURES = [
    FeatureSpec(name="f0", table="a"),
    FeatureSpec(name="f1", table="b", pooling="mean"),
    FeatureSpec(name="f2", table="c", pooling="none"),
]
NAMES, ROWS = ("f0", "f1", "f2"), (30, 20, 5)
GLOBAL = RowOptions(mode="global")


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    jagged = random_jagged(NAMES, ROWS, 6, most=2, seed=seed)
    out = model(jagged)
    pooled, sequence = (
        (out.pooled, out.sequences["f2"].values) if isinstance(model, EmbeddingCollection) else (out[0], out[1]["f2"])
    )
    (factor * ((pooled - 1.0).square().sum() + sequence.sin().sum())).backward()


def after(spec: SparseOptimizerSpec, steps: int = 4, factor: float = 1.0) -> EmbeddingCollection:
    mine = EmbeddingCollection(TABLES, FEATURES, seed=2)
    optimizer = RowOptimizer(mine, spec)
    for step in range(steps):
        backward(mine, step, factor)
        optimizer.step()
    return mine


@pytest.mark.parametrize(
    ("spec", "optimizer"),
    [
        (MomentumSpec(lr=0.05, momentum=0.8, rows=GLOBAL), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8)),
        (
            NesterovSpec(lr=0.05, momentum=0.8, rows=RowOptions(mode="global", l2=0.1)),
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
        ),
        (RMSPropSpec(lr=0.05, decay=0.9, rows=GLOBAL), lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9)),
        (AdamSpec(lr=0.05, rows=GLOBAL), lambda p: torch.optim.Adam(p, lr=0.05)),
        (AdamWSpec(lr=0.05, rows=GLOBAL), lambda p: torch.optim.AdamW(p, lr=0.05)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_global_equals_torch_on_whole_tables(spec, optimizer) -> None:
    mine = EmbeddingCollection(TABLES, FEATURES, seed=2)
    plain = PlainCollection(mine)
    row_optimizer, theirs = RowOptimizer(mine, spec), optimizer(list(plain.weights.values()))
    for step in range(4):
        theirs.zero_grad()
        backward(plain, step)
        backward(mine, step)
        theirs.step()
        row_optimizer.step()
        for name in "abc":
            torch.testing.assert_close(mine.table(name), plain.weights[name].detach(), rtol=1e-4, atol=1e-5)


def test_the_global_norm_is_bounded_as_torch_does_it() -> None:
    mine = EmbeddingCollection(TABLES, FEATURES, seed=2)
    plain = PlainCollection(mine)
    row_optimizer = RowOptimizer(mine, SGDSpec(lr=0.1, rows=RowOptions(clip_global_norm=0.5, loss_scale=4.0)))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        theirs.zero_grad()
        backward(plain, step)
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
        backward(mine, step, factor=4.0)
        theirs.step()
        row_optimizer.step()
    for name in "abc":
        torch.testing.assert_close(mine.table(name), plain.weights[name].detach(), rtol=1e-4, atol=1e-5)


def test_the_loss_scale_is_taken_back() -> None:
    scaled = after(SGDSpec(lr=0.1, rows=RowOptions(loss_scale=1024.0)), factor=1024.0)
    assert all(torch.equal(scaled.table(name), after(SGDSpec(lr=0.1)).table(name)) for name in "abc")


@pytest.mark.parametrize("mode", ["local", "global", "lazy_global"])
def test_frozen_tables_stay_and_others_follow_their_factor(mode) -> None:
    options = RowOptions(mode=mode, frozen=("a",), table_lr={"b": 0.5, "c": 1.0})
    before = EmbeddingCollection(TABLES, FEATURES, seed=2)
    mine = after(AdamSpec(lr=0.1, rows=options), steps=1)
    whole = after(AdamSpec(lr=0.1, rows=RowOptions(mode=mode)), steps=1)
    assert torch.equal(mine.table("a"), before.table("a"))
    assert all(not state.any() for state in mine.tables["a"].state.values())
    torch.testing.assert_close(
        mine.table("b") - before.table("b"), 0.5 * (whole.table("b") - before.table("b")), rtol=1e-4, atol=1e-6
    )
    assert torch.equal(mine.table("c"), whole.table("c"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["pass", "raise", "skip"])
def test_gradients_that_are_not_finite(policy, bad) -> None:
    mine = EmbeddingCollection(TABLES, FEATURES, seed=2)
    optimizer = RowOptimizer(mine, AdamSpec(lr=0.1, rows=RowOptions(non_finite=policy)))
    backward(mine, 0)
    optimizer.step()
    assert not optimizer.is_skipped
    before = copy.deepcopy({name: (table.weights, table.state) for name, table in mine.tables.items()})
    jagged = random_jagged(NAMES, ROWS, 6, most=2, seed=1)
    pooled = mine(jagged).pooled
    pooled.register_hook(lambda grad: grad.index_put((torch.tensor(2), torch.tensor(7)), torch.tensor(bad)))
    pooled.sum().backward()
    if policy == "raise":
        with pytest.raises(TrainingError, check=at("step 2")):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.is_skipped == (policy == "skip")
    assert optimizer.step_state() == {
        "kind": "adam",
        "lr": 0.1,
        "num_steps": 1 + (policy == "pass"),
        "num_skipped": int(policy == "skip"),
    }
    for name, (weights, state) in before.items():
        is_same = torch.equal(mine.table(name), weights)
        is_same &= all(torch.equal(mine.tables[name].state[key], value) for key, value in state.items())
        assert is_same == (policy != "pass" or name == "c")
    backward(mine, 2)  # the gradients that were rejected are gone
    optimizer.step()
    assert not optimizer.is_skipped


@pytest.mark.parametrize("policy", ["pass", "raise", "skip"])
def test_a_joint_norm_that_is_not_finite(policy) -> None:
    """It comes from a layer, and makes the rows' gradients NaN by the factor of clipping."""
    mine = EmbeddingCollection(TABLES, FEATURES, seed=2)
    optimizer = RowOptimizer(mine, SGDSpec(rows=RowOptions(non_finite=policy)))
    before = mine.table("a").detach().clone()
    backward(mine, 0)
    layer = nn.Parameter(torch.ones(1))
    layer.grad = torch.tensor([math.nan])
    nn.utils.clip_grad_norm_([*mine.parameters(), layer], 1.0)
    if policy == "raise":
        for attempt in (optimizer.accepts, optimizer.step):
            with pytest.raises(TrainingError, check=at("step 1")):
                attempt()
    else:
        assert optimizer.accepts() == (policy == "pass")
        optimizer.step()
    assert torch.equal(mine.table("a"), before) == (policy != "pass")


def test_a_bad_gradient_of_a_sequence_is_placed() -> None:
    mine = EmbeddingCollection(
        TABLES, [FeatureSpec(name=f, table=t, pooling="none") for f, t in (("x", "a"), ("y", "c"))]
    )
    optimizer = RowOptimizer(mine, SGDSpec(rows=RowOptions(non_finite="raise")))
    jagged = random_jagged(("x", "y"), (30, 5), 6, most=3, seed=1)
    values = mine(jagged).sequences["y"].values
    values.register_hook(lambda grad: grad.index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(math.nan)))
    values.sum().backward()
    with pytest.raises(TrainingError, check=at("step 1")):
        optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "rmsprop", "nesterov"])
def test_lazy_training_resumes_where_it_stopped(kind) -> None:
    specs: dict[str, SparseOptimizerSpec] = {
        "adamw": AdamWSpec(lr=0.1, rows=RowOptions(mode="lazy_global")),
        "rmsprop": RMSPropSpec(lr=0.1, rows=RowOptions(mode="lazy_global")),
        "nesterov": NesterovSpec(lr=0.1, rows=RowOptions(mode="lazy_global")),
    }
    whole = after(specs[kind], steps=6)
    first = EmbeddingCollection(TABLES, FEATURES, seed=2)
    first_optimizer = RowOptimizer(first, specs[kind])
    for step in range(3):
        backward(first, step)
        first_optimizer.step()
    second = EmbeddingCollection(TABLES, FEATURES, seed=9)
    second_optimizer = RowOptimizer(second, specs[kind])
    second_optimizer.load_step_state(first_optimizer.step_state())
    for name, table in first.tables.items():
        for chunk in table.export_chunks(4):
            second.tables[name].import_(chunk)
    for step in range(3, 6):
        backward(second, step)
        second_optimizer.step()
    assert all(torch.equal(second.table(name), whole.table(name)) for name in "abc")


def test_options_for_a_table_that_is_not_there_are_rejected() -> None:
    for field, value in (("frozen", ("z",)), ("table_lr", {"z": 2.0})):
        with pytest.raises(ConfigError, check=at(f"rows.{field}", "got table 'z'")):
            RowOptimizer(EmbeddingCollection(TABLES, FEATURES), FTRLSpec(rows=RowOptions(**{field: value})))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_tables_train_as_wide_ones_and_resume_where_they_stopped(dtype) -> None:
    tables = [replace(table, dtype=dtype) for table in TABLES]
    spec = AdamSpec(lr=0.05)

    def trained(first: int, last: int, held: EmbeddingCollection, optimizer: RowOptimizer) -> EmbeddingCollection:
        for step in range(first, last):
            backward(held, step)
            optimizer.step()
        return held

    whole = EmbeddingCollection(tables, FEATURES, seed=2)
    trained(0, 6, whole, RowOptimizer(whole, spec, seed=7))
    first = EmbeddingCollection(tables, FEATURES, seed=2)
    first_optimizer = RowOptimizer(first, spec, seed=7)
    trained(0, 3, first, first_optimizer)
    second = EmbeddingCollection(tables, FEATURES, seed=9)
    second_optimizer = RowOptimizer(second, spec, seed=7)
    second_optimizer.load_step_state(first_optimizer.step_state())
    for name, table in first.tables.items():
        for chunk in table.export_chunks(4):
            second.tables[name].import_(chunk)
    trained(3, 6, second, second_optimizer)
    other = EmbeddingCollection(tables, FEATURES, seed=2)
    trained(0, 6, other, RowOptimizer(other, spec, seed=8))
    wide = after(spec, steps=6)
    for name in "abc":
        assert torch.equal(second.table(name), whole.table(name))
        torch.testing.assert_close(whole.table(name).float(), wide.table(name), rtol=0.1, atol=0.02)
    assert any(not torch.equal(other.table(name), whole.table(name)) for name in "abc")


@pytest.mark.parametrize("spec", get_args(SparseOptimizerSpec))
def test_flags_of_a_spec_are_not_numbers_of_its_rule(spec) -> None:
    """Triton compiles a kernel for the types of its arguments, and multiplies no flag."""
    rule = table_rules(spec())["default"].row_rule
    found = {name: type(getattr(rule, name)) for name in number_names(type(rule)) if name != "lr_in_momentum"}
    assert found == dict.fromkeys(found, float)
