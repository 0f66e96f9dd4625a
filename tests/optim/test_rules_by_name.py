# SPDX-License-Identifier: Apache-2.0
"""One row optimizer with a rule for each group of tables does what one optimizer for each group does, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import terarec
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, TrainingError
from terarec.models import GraphModel
from terarec.optim import RowOptimizer
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    DynamicTableSpec,
    FeatureSpec,
    FTRLSpec,
    GraphEmbedding,
    GraphFeature,
    GraphLabel,
    GraphLayer,
    GraphSpec,
    MomentumSpec,
    RowOptions,
    SGDSpec,
    TableSpec,
    from_data,
    to_data,
)
from tests.embedding.plain import PlainCollection, random_jagged
from tests.errors import at

# Tables "a", "b" and "e" share an arena but for their rules; so do "c" and "d".
TABLES = [
    TableSpec(name="a", rows=30, width=4),
    TableSpec(name="b", rows=20, width=4, optimizer="wide"),
    DynamicTableSpec(name="c", width=8),
    DynamicTableSpec(name="d", width=8, optimizer="wide"),
    TableSpec(name="e", rows=10, width=4),
]
FEATURES = [FeatureSpec(name=f"of_{table.name}", table=table.name) for table in TABLES]
NAMES, KEYS = [feature.name for feature in FEATURES], (30, 20, 40, 40, 10)
RULES = {
    "default": AdamSpec(lr=0.05, rows=RowOptions(clip_global_norm=0.5, table_lr={"e": 0.5})),
    "wide": FTRLSpec(lr=0.1, l1=0.01, rows=RowOptions(clip_norm=0.3)),
}


def collection(tables=TABLES) -> EmbeddingCollection:
    names = {table.name for table in tables}
    return EmbeddingCollection(tables, [feature for feature in FEATURES if feature.table in names], seed=3)


def apart() -> dict[str, EmbeddingCollection]:
    """The same tables, those of each rule in a collection of their own."""
    return {name: collection([table for table in TABLES if table.optimizer == name]) for name in RULES}


def backward(module: EmbeddingCollection, step: int, factor: float = 1.0) -> None:
    """The loss is a sum over features, so a collection of some tables gets the same gradients."""
    jagged = random_jagged(NAMES, KEYS, 8, seed=step)
    loss = (module(jagged).pooled - 1.0).square().sum() * factor
    loss.backward()


def rows_and_state(*modules: EmbeddingCollection) -> dict[str, list[torch.Tensor]]:
    found = {}
    for module in modules:
        for name, table in module.tables.items():
            keys = table.keys().sort().values
            rows = table.export(keys)
            found[name] = [keys, rows.weights.clone(), *(rows.state[key].clone() for key in sorted(rows.state))]
    return found


def assert_same(mine: dict[str, list[torch.Tensor]], theirs: dict[str, list[torch.Tensor]]) -> None:
    assert set(mine) == set(theirs)
    for name, held in mine.items():
        assert all(torch.equal(one, other) for one, other in zip(held, theirs[name], strict=True)), name


def test_tables_of_different_rules_lie_apart() -> None:
    arenas = collection().arenas
    assert [(arena.optimizer, arena.table_names) for arena in arenas] == [
        ("default", ("a", "e")),
        ("wide", ("b",)),
        ("default", ("c",)),
        ("wide", ("d",)),
    ]


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_bits_are_those_of_separate_optimizers(scheduled: bool) -> None:
    together, separate = collection(), apart()
    mine = RowOptimizer(together, RULES)
    theirs = {name: RowOptimizer(separate[name], RULES[name]) for name in RULES}
    optimizers = [mine, *theirs.values()]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 7) for each in optimizers] if scheduled else []
    for step in range(6):
        backward(together, step)
        for name in RULES:
            backward(separate[name], step)
        for each in optimizers:
            each.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same(rows_and_state(together), rows_and_state(*separate.values()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bits_of_narrow_rows_are_too(dtype: str) -> None:
    tables = [replace(table, dtype=dtype) for table in TABLES if isinstance(table, TableSpec)]
    together = collection(tables)
    mine = RowOptimizer(together, {"default": SGDSpec(lr=0.1), "wide": AdaGradSpec(lr=0.1)}, seed=5)
    separate = {name: collection([table for table in tables if table.optimizer == name]) for name in RULES}
    theirs = [
        RowOptimizer(separate["default"], SGDSpec(lr=0.1), seed=5),
        RowOptimizer(separate["wide"], AdaGradSpec(lr=0.1), seed=5),
    ]
    for step in range(4):
        for module in (together, *separate.values()):
            backward(module, step)
        for each in (mine, *theirs):
            each.step()
    assert_same(rows_and_state(together), rows_and_state(*separate.values()))


def test_equals_torch_with_a_group_for_each_rule() -> None:
    tables = [table for table in TABLES if isinstance(table, TableSpec)]
    together = collection(tables)
    plain = PlainCollection(together)
    mine = RowOptimizer(together, {"default": AdaGradSpec(lr=0.1), "wide": SGDSpec(lr=0.02)})
    weights = plain.weights
    adagrad = torch.optim.Adagrad([weights["a"], weights["e"]], lr=0.1)
    sgd = torch.optim.SGD([weights["b"]], lr=0.02)
    for step in range(4):
        backward(together, step)
        plain.zero_grad()
        (plain(random_jagged(NAMES, KEYS, 8, seed=step))[0] - 1.0).square().sum().backward()
        for each in (mine, adagrad, sgd):
            each.step()
    for name in weights:
        torch.testing.assert_close(together.table(name), weights[name].detach(), rtol=1e-5, atol=1e-6)


def test_each_rule_is_a_group_with_its_rate_and_one_rate_sets_all() -> None:
    optimizer = RowOptimizer(collection(), RULES)
    assert [(group["optimizer"], group["lr"]) for group in optimizer.param_groups] == [
        ("default", 0.05),
        ("wide", 0.1),
    ]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.05]
    optimizer.lr = 0.2
    assert {group["lr"] for group in optimizer.param_groups} == {0.2} == {optimizer.lr}
    given = RowOptimizer([{"params": collection(), "lr": 0.7}], RULES)
    assert [group["lr"] for group in given.param_groups] == [0.7, 0.7]


def test_one_rule_updates_all_tables_for_any_rule_names() -> None:
    named, plain = collection(), collection([replace(table, optimizer="default") for table in TABLES])
    for module in (named, plain):
        optimizer = RowOptimizer(module, AdamSpec(lr=0.1))
        assert len(optimizer.param_groups) == 1
        for step in range(3):
            backward(module, step)
            optimizer.step()
    assert_same(rows_and_state(named), rows_and_state(plain))


def test_a_rule_that_is_not_there_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, check=at("row optimizer", "the tables 'b': got the optimizer 'wide' (did you mean 'wider'?)")
    ):
        RowOptimizer(collection(), {"default": SGDSpec(), "wider": SGDSpec()})
    with pytest.raises(ConfigError, check=at("row optimizer", "got no rule")):
        RowOptimizer(collection(), {})
    with pytest.raises(ConfigError, check=at("row optimizer: rule 'wide'")):
        RowOptimizer(collection(), {"default": SGDSpec(), "wide": "sgd"})
    with pytest.raises(ConfigError, check=at("rows.frozen")):
        RowOptimizer(collection(), {"default": SGDSpec(), "wide": SGDSpec(rows=RowOptions(frozen=("a",)))})


@pytest.mark.parametrize("form", ["state_dict", "step_state"])
def test_training_resumes_bit_for_bit(form: str) -> None:
    def train(module: EmbeddingCollection, optimizer: RowOptimizer, steps: range) -> None:
        for step in steps:
            backward(module, step)
            optimizer.step()

    whole, first, second = collection(), collection(), collection()
    train(whole, RowOptimizer(whole, RULES), range(6))
    optimizer = RowOptimizer(first, RULES)
    train(first, optimizer, range(3))
    later = RowOptimizer(second, RULES)
    for name, table in first.tables.items():
        for chunk in table.export_chunks(100):
            second.tables[name].import_(chunk)
    if form == "state_dict":
        later.load_state_dict(optimizer.state_dict())
    else:
        later.load_step_state(json.loads(json.dumps(optimizer.step_state())))
    train(second, later, range(3, 6))
    assert_same(rows_and_state(second), rows_and_state(whole))
    assert later.step_state()["rule_steps"] == {"default": 6, "wide": 6}


def test_states_of_one_rule_are_read_and_others_rejected() -> None:
    module = collection([replace(table, optimizer="default") for table in TABLES])
    old = {"kind": "adam", "lr": 0.3, "num_steps": 4, "num_skipped": 1}
    optimizer = RowOptimizer(module, RULES)
    optimizer.load_step_state(old)
    assert optimizer.step_state() == old
    both = RowOptimizer(collection(), RULES)
    before = both.step_state()
    assert before["kind"] == {"default": "adam", "wide": "ftrl"}
    with pytest.raises(ConfigError, check=at("row optimizer", "got the state of 'adam'")):
        both.load_step_state(old)
    with pytest.raises(ConfigError, check=at("row optimizer", "got the state of default 'adam', wide 'ftrl'")):
        optimizer.load_step_state(before)
    assert both.step_state() == before


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_what_one_rule_does_not_accept_moves_no_table(policy: str) -> None:
    module = collection()
    rules = {**RULES, "wide": SGDSpec(lr=0.1, rows=RowOptions(non_finite=policy))}
    optimizer = RowOptimizer(module, rules)
    backward(module, 0)
    optimizer.step()
    before = rows_and_state(module)
    pooled = module(random_jagged(NAMES, KEYS, 8, seed=0)).pooled
    pooled.register_hook(lambda grad: grad.index_put((torch.tensor(0), torch.tensor(4)), torch.tensor(torch.inf)))
    pooled.sum().backward()
    if policy == "raise":
        with pytest.raises(TrainingError, check=at("step 2")):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.is_skipped
    assert_same(rows_and_state(module), before)
    assert optimizer.num_steps == 1


def test_tables_freeze_and_resume_as_if_nothing_had_been() -> None:
    module, other = collection(), apart()
    optimizer = RowOptimizer(module, RULES)
    theirs = {name: RowOptimizer(other[name], RULES[name]) for name in RULES}
    for step in range(9):
        optimizer.frozen = {"b", "d"} if step in (3, 4) else set()
        backward(module, step)
        optimizer.step()
        for name in RULES:
            backward(other[name], step)
            if name == "wide" and step in (3, 4):
                theirs[name].zero_grad()
            else:
                theirs[name].step()
    assert_same(rows_and_state(module), rows_and_state(*other.values()))
    assert optimizer.step_state()["rule_steps"] == {"default": 9, "wide": 7}
    optimizer.frozen = {"a"}
    before = rows_and_state(module)
    backward(module, 9)
    optimizer.step()
    after = rows_and_state(module)
    assert all(torch.equal(one, two) for one, two in zip(before["a"], after["a"], strict=True))
    assert not torch.equal(before["e"][1], after["e"][1])
    with pytest.raises(ConfigError, check=at("row optimizer: frozen")):
        optimizer.frozen = {"z"}


def test_frozen_tables_do_not_count_in_the_joint_norm() -> None:
    tables = [table for table in TABLES if isinstance(table, TableSpec)]
    module = collection(tables)
    plain = PlainCollection(module)
    optimizer = RowOptimizer(module, {"default": SGDSpec(), "wide": SGDSpec()})
    optimizer.frozen = {"a", "b"}
    backward(module, 0)
    (plain(random_jagged(NAMES, KEYS, 8, seed=0))[0] - 1.0).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    torch.testing.assert_close(norm, plain.weights["e"].grad.norm())


def test_a_weight_without_a_table_follows_the_default_rule() -> None:
    model = nn.ModuleDict({"bag": terarec.EmbeddingBag(9, 4, mode="sum"), "tables": collection()})
    optimizer = RowOptimizer(model, {"default": SGDSpec(lr=1.0), "wide": MomentumSpec(lr=0.1)})
    before = model["bag"].weight.detach().clone()
    model["bag"](torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    expected = before.clone()
    expected[1:3] -= 1.0
    torch.testing.assert_close(model["bag"].weight.detach(), expected)


def test_the_embeddings_of_a_graph_name_the_rules_of_their_tables() -> None:
    def embedding(name: str, optimizer: str) -> GraphEmbedding:
        tables = (
            TableSpec(name=f"t{name}", rows=5, width=2),
            TableSpec(name=f"u{name}", rows=5, width=2, optimizer="own"),
        )
        features = tuple(GraphFeature(name=table.name, table=table.name) for table in tables)
        return GraphEmbedding(name=name, tables=tables, features=features, output="flat", optimizer=optimizer)

    spec = GraphSpec(
        labels=(GraphLabel(name="label"),),
        embeddings=(embedding("x", "default"), embedding("y", "wide")),
        layers=(
            GraphLayer(kind="concat", bottoms=("x", "y"), tops=("both",)),
            GraphLayer(kind="inner_product", bottoms=("both",), tops=("logit",), options={"num_output": 1}),
            GraphLayer(kind="binary_cross_entropy", bottoms=("logit", "label"), tops=("loss",)),
        ),
    )
    spec = from_data(GraphSpec, to_data(spec))
    model = GraphModel(spec)
    optimizer = RowOptimizer(model, {"default": SGDSpec(lr=0.1), "wide": AdamSpec(lr=0.2), "own": SGDSpec(lr=0.3)})
    kinds = {name: table.arena.optimizer for e in ("x", "y") for name, table in model.collection(e).tables.items()}
    assert kinds == {"tx": "default", "ux": "own", "ty": "wide", "uy": "own"}
    assert {group["optimizer"]: group["lr"] for group in optimizer.param_groups} == {
        "default": 0.1,
        "own": 0.3,
        "wide": 0.2,
    }
