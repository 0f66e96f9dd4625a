# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.config.overrides import override, parse_assignments
from terarec.errors import ConfigError
from terarec.spec import (
    AdaGradSpec,
    DINSpec,
    DLRMSpec,
    DynamicTablesSpec,
    PythonModelSpec,
    RowOptions,
    RunSpec,
    SGDSpec,
    TableSpec,
    TargetHistory,
    TorchOptimizerSpec,
    TrainingSpec,
    WideDeepSpec,
    freq,
    lru,
)
from tests.errors import at
from tests.params import examples

RUN = RunSpec(data="d")


@given(
    batch_size=st.integers(1, 2**26),
    lr=st.floats(0, 1e3, allow_nan=False),
    shuffle=st.booleans(),
    top=st.lists(st.integers(1, 9999), min_size=1, max_size=5),
    joint=st.sampled_from(["-", ",", ", "]),
)
@settings(max_examples=examples(60))
def test_texts_are_read_as_the_type_of_their_field(
    batch_size: int, lr: float, shuffle: bool, top: list[int], joint: str
) -> None:
    changed = override(
        RUN,
        {
            "training.batch_size": str(batch_size),
            "training.shuffle": str(shuffle).lower(),
            "dense_optimizer.lr": repr(lr),
            "model.top": joint.join(map(str, top)),
        },
    )
    assert changed == dataclasses.replace(
        RUN,
        training=TrainingSpec(batch_size=batch_size, shuffle=shuffle),
        dense_optimizer=dataclasses.replace(RUN.dense_optimizer, lr=lr),
        model=DLRMSpec(top=tuple(top)),
    )


def test_no_change_is_the_same_spec() -> None:
    assert override(RUN, {}) == RUN


def test_a_kind_starts_from_its_defaults_and_comes_before_its_fields() -> None:
    base = override(RUN, {"sparse_optimizer.lr": "0.5"})
    changed = override(base, {"model.width": "4", "model.kind": "wide_deep", "sparse_optimizer.kind": "sgd"})
    assert changed.model == WideDeepSpec(width=4)
    assert changed.sparse_optimizer == SGDSpec()


def test_the_same_kind_keeps_the_other_fields() -> None:
    base = override(RUN, {"sparse_optimizer.lr": "0.5"})
    assert override(base, {"sparse_optimizer.kind": "adagrad"}).sparse_optimizer == AdaGradSpec(lr=0.5)


def test_an_optional_part_comes_with_its_first_field() -> None:
    path = "sparse_optimizer.rows"
    changed = override(RUN, {f"{path}.mode": "global", f"{path}.table_lr": "C1:0.5, C2:0", f"{path}.frozen": "C3,C4"})
    options = RowOptions(mode="global", table_lr={"C1": 0.5, "C2": 0.0}, frozen=("C3", "C4"))
    assert changed.sparse_optimizer == dataclasses.replace(RUN.sparse_optimizer, rows=options)


def test_none_takes_a_limit_away() -> None:
    limited = override(RUN, {"training.max_steps": "10"})
    assert limited.training.max_steps == 10
    assert override(limited, {"training.max_steps": "none"}) == RUN


def test_a_spec_that_is_not_a_run_can_be_overridden() -> None:
    assert override(TrainingSpec(), {"precision": "bf16"}) == TrainingSpec(precision="bf16")


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("training.batch_size", "many", "training.batch_size: got 'many', expected an integer"),
        ("training.batch_size", "none", "training.batch_size: got 'none', expected an integer"),
        ("training.batch_size", "0", "training.batch_size: got 0, expected an integer >= 1"),
        ("training.shuffle", "1", "training.shuffle: got '1', expected true or false"),
        ("training.precision", "fp8", "training.precision: got 'fp8', expected one of 'fp32', 'bf16'"),
        ("training.nothing", "1", "training.nothing: unknown field, expected one of 'batch_size'"),
        ("training.max_step", "1", "training.max_step: unknown field (did you mean 'max_steps'?), expected one of"),
        ("nothing", "1", "nothing: unknown field, expected one of 'data'"),
        ("training", "1", "training: got '1', expected one of its fields"),
        ("model", "dlrm", "model: got 'dlrm', expected one of its fields"),
        ("model.kind", "dcm", "model.kind: got 'dcm' (did you mean 'dcn'?), expected one of 'lr', 'fm'"),
        ("training.kind", "x", "training.kind: unknown field"),
        ("data.x", "1", "data has no fields"),
        ("model.top", "8-x", "model.top: got 'x', expected an integer"),
        ("model.top", "", "model.top: got [], expected layer widths"),
        ("model.bottom", "64-8", "a last layer as wide as the embedding (16)"),
        ("dense_optimizer.lr", "nan", "lr: got nan, expected a number"),
        ("sparse_optimizer.rows", "global", "rows: got 'global', expected one of its fields"),
        ("sparse_optimizer.rows.table_lr", "C1", "table_lr: got 'C1', expected name:value, as in a:0.5,b:0"),
        ("sparse_optimizer.rows.table_lr", "C1:x", "table_lr: got 'x', expected a number"),
        ("", "1", "unknown field"),
        ("model..width", "1", "unknown field"),
    ],
)
def test_a_wrong_override_names_its_path(path: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(RUN, {path: text})
    assert expected in str(caught.value)
    assert "Spec" not in str(caught.value)


def test_none_is_none_even_where_that_is_not_the_default() -> None:
    """Regression: "none" was taken for the name of a split."""
    assert override(RUN, {"training.eval_split": "none"}).training.eval_split is None


def test_assignments_are_split_at_the_first_equals_sign() -> None:
    assert parse_assignments(["a.b = 2", "data=x=y"]) == {"a.b": "2", "data": "x=y"}


def test_a_path_is_assigned_once() -> None:
    """A second value for a path is rejected rather than taken silently."""
    with pytest.raises(ConfigError, check=at("a.b")):
        parse_assignments(["a.b=1", "a.b = 2"])


@pytest.mark.parametrize("text", ["", "=1", " =1", "training.epochs", "--set"])
def test_a_wrong_assignment_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, check=at("assignment")):
        parse_assignments([text])


def test_parts_that_are_left_out_start_from_their_kind() -> None:
    changed = override(
        RUN,
        {
            "model.tables.kind": "dynamic",
            "model.tables.admit.count": "3",
            "model.tables.admit.kind": "freq",
            "model.tables.evict.kind": "lru",
            "model.tables.max_rows": "1000",
        },
    )
    assert changed.model == DLRMSpec(tables=DynamicTablesSpec(admit=freq(3), evict=lru(), max_rows=1000))
    assert override(changed, {"model.tables.admit": "none"}).model.tables.admit is None
    assert override(RUN, {"model.kind": "wide_deep", "model.tables.kind": "dynamic"}).model == WideDeepSpec(
        tables=DynamicTablesSpec()
    )
    narrow = override(RUN, {"model.tables.dtype": "bfloat16"}).model.tables
    assert narrow.table("t", rows=5, width=4) == TableSpec(name="t", rows=5, width=4, dtype="bfloat16")
    with pytest.raises(ConfigError, check=at("model.tables.dtype")):
        override(RUN, {"model.tables.dtype": "float64"})
    where = "model.tables.admit.count"
    with pytest.raises(ConfigError, check=at(where)):
        override(RUN, {"model.tables.kind": "dynamic", "model.tables.admit.count": "3"})
    with pytest.raises(ConfigError, check=at("model.tables.kind")):
        override(RUN, {"model.tables.kind": "dynamc"})  # A13
    with pytest.raises(ConfigError, check=at("model.tables.max_rows")):
        override(RUN, {"model.tables.kind": "dynamic", "model.tables.evict.kind": "lfu"})


@pytest.mark.parametrize(
    ("path", "in_json", "plain", "value"),
    [
        ("model.top", "[8, 4]", "8-4", (8, 4)),
        ("model.bottom", "[64,16]", "64,16", (64, 16)),
        ("training.metrics", '["auc", "logloss"]', "auc,logloss", ("auc", "logloss")),
        ("training.freeze", '["[ab]*", "c"]', "[ab]*,c", ("[ab]*", "c")),
        ("sparse_optimizer.rows.frozen", '["a,b"]', None, ("a,b",)),
        ("sparse_optimizer.rows.table_lr", '{"C1": 0.5}', "C1:0.5", {"C1": 0.5}),
    ],
)
def test_json_is_read_for_every_list(path: str, in_json: str, plain: str | None, value: object) -> None:
    """Finding P6: lists of objects alone were JSON, and no other ones."""
    for text in filter(None, (in_json, plain)):
        changed: object = override(RUN, {path: text})
        for name in path.split("."):
            changed = getattr(changed, name)
        assert changed == value


@pytest.mark.parametrize(
    ("change", "where", "example"),
    [
        ({"training.schedule.kind": "step"}, "training.schedule.step_size", "training.schedule.step_size=N"),
        ({"training.schedule.kind": "multi_step"}, "training.schedule.milestones", "milestones=N,N,..."),
        ({"dense_optimizer.kind": "torch"}, "dense_optimizer.name", "dense_optimizer.name=NAME"),
        ({"model.kind": "two_tower", "model.user": "u"}, "model.item", "model.item=NAME,NAME,..."),
        ({"model.kind": "din"}, "model.sequences", 'model.sequences=[{"target": ..., "history": ...}]'),
    ],
)
def test_a_kind_without_what_it_needs_names_the_assignment(change: dict[str, str], where: str, example: str) -> None:
    """Finding P6: the error named all fields of the kind, and no syntax."""
    with pytest.raises(ConfigError, check=at(where, example)):
        override(RUN, change)


@pytest.mark.parametrize("text", ["a:1,a:2", "a:1, a :2", '{"a": 1, "a": 2}'])
def test_a_name_twice(text: str) -> None:
    """Finding Q: the last value counted, without a word."""
    with pytest.raises(ConfigError, check=at("model.options")):
        override(RUN, {"model.kind": "python", "model.factory": "a:b", "model.options": text})


def test_lists_of_specs_and_objects_of_any_values_are_json() -> None:
    run = RunSpec(data="d")
    sequences = '[{"target": "item", "history": "hist"}, {"target": "shop", "history": "shops"}]'
    din = override(run, {"model.kind": "din", "model.sequences": sequences}).model
    pairs = (TargetHistory(target="item", history="hist"), TargetHistory(target="shop", history="shops"))
    assert din == DINSpec(sequences=pairs)
    for text in ('{"width": 8, "name": "x", "deep": [1, 2]}', "width:8,name:x,deep:[1]"):
        model = override(run, {"model.kind": "python", "model.factory": "a:b", "model.options": text}).model
        assert isinstance(model, PythonModelSpec)
        assert (model.options["width"], model.options["name"]) == (8, "x")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (
            {"model.kind": "din", "model.sequences": "item:hist"},
            "model.sequences",
        ),
        (
            {"model.kind": "din", "model.sequences": '[{"target": "a"}]'},
            "model.sequences[0]",
        ),
        ({"model.kind": "din"}, "model.sequences"),
        ({"model.top": "[8, x]"}, "model.top"),
        ({"model.top": '[8, "x"]'}, "model.top[1]"),
        ({"training.freeze": "[1]"}, "training.freeze[0]"),
        ({"training.freeze": '["a"'}, "training.freeze"),
    ],
)
def test_wrong_json_names_its_path(changes: dict[str, str], where: str) -> None:
    with pytest.raises(ConfigError, check=at(where)):
        override(RunSpec(data="d"), changes)


def test_options_of_a_class_of_torch_are_set_by_name() -> None:
    changes = {
        "dense_optimizer.kind": "torch",
        "dense_optimizer.name": "Adam",
        "dense_optimizer.options": "weight_decay:0.1,amsgrad:true",
    }
    changed = override(RunSpec(data="d"), changes)
    assert changed.dense_optimizer == TorchOptimizerSpec(name="Adam", options={"weight_decay": 0.1, "amsgrad": True})
