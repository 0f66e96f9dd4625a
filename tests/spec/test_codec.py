# SPDX-License-Identifier: Apache-2.0
"""Specs <-> JSON: any spec comes back, and every mistake is named with its JSON path and what is accepted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    DatasetSpec,
    DLRMSpec,
    FeatureSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    RowOptions,
    RowWiseAdaGradSpec,
    RunSpec,
    ServingSpec,
    SGDSpec,
    TableSpec,
    TrainingSpec,
    WideDeepSpec,
    from_data,
    to_data,
)
from terarec.spec.codec import RepeatedFieldError, TooDeepError, parse_json
from tests.errors import at
from tests.params import examples

sizes = st.integers(1, 4096)
rates = st.floats(0.0, 10.0)
widths = st.lists(sizes, min_size=1, max_size=4).map(tuple)
models = st.one_of(
    st.tuples(widths, widths).map(lambda pair: DLRMSpec(width=pair[0][-1], bottom=pair[0], top=pair[1])),
    st.builds(WideDeepSpec, width=sizes, hidden=widths, dropout=st.floats(0, 0.9)),
)
bounds = st.none() | st.floats(0.1, 10.0)
options = st.none() | st.builds(
    RowOptions,
    mode=st.sampled_from(["local", "global", "lazy_global"]),
    clip_value=bounds,
    clip_norm=bounds,
    clip_global_norm=bounds,
    loss_scale=st.floats(0.1, 1e6),
    table_lr=st.dictionaries(st.text(min_size=1), rates, max_size=3),
    frozen=st.lists(st.text(min_size=1), unique=True, max_size=3).map(tuple),
    non_finite=st.sampled_from(["pass", "raise", "skip"]),
)
row_only = st.builds(RowWiseAdaGradSpec, lr=rates, rows=options)
optimizers = st.one_of(
    st.builds(FTRLSpec, l1=rates, l2=rates, beta=rates, rows=options),
    st.builds(MomentumSpec, lr=rates, momentum=st.floats(0, 0.99), lr_in_momentum=st.booleans(), rows=options),
    st.builds(NesterovSpec, lr=rates, lr_in_momentum=st.booleans(), rows=options),
    st.builds(RMSPropSpec, lr=rates, decay=st.floats(0, 0.99), rows=options),
    st.builds(AdamWSpec, lr=rates, weight_decay=rates, rows=options),
    st.builds(SGDSpec, lr=rates),
    st.builds(AdaGradSpec, lr=rates, eps=rates, initial_accumulator=rates),
    st.builds(AdamSpec, lr=rates, beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.99), eps_hat=st.booleans()),
)
trainings = st.builds(
    TrainingSpec,
    batch_size=sizes,
    max_steps=st.none() | sizes,
    shuffle=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16"]),
)
runs = st.builds(
    RunSpec,
    data=st.text(min_size=1),
    model=models,
    dense_optimizer=optimizers,
    sparse_optimizer=optimizers | row_only,
    row_optimizers=st.dictionaries(st.sampled_from(["wide", "deep"]), optimizers | row_only),
    training=trainings,
)
specs = st.one_of(
    runs,
    models,
    optimizers,
    row_only,
    st.builds(TableSpec, name=st.just("t"), rows=sizes, width=sizes, init_scale=st.none() | st.floats(0.1, 2)),
    st.builds(FeatureSpec, name=st.just("f"), table=st.just("t"), pooling=st.sampled_from(["sum", "mean", "none"])),
    st.builds(ServingSpec, port=st.integers(0, 65535)),
)


@given(spec=specs)
@settings(max_examples=examples(200))
def test_any_spec_comes_back_from_json(spec):
    text = json.dumps(to_data(spec), allow_nan=False)
    assert from_data(type(spec), json.loads(text)) == spec


def test_defaults_fill_what_is_left_out():
    assert from_data(RunSpec, {"data": "d"}) == RunSpec(data="d")


def test_the_kind_selects_the_spec():
    run = from_data(
        RunSpec, {"data": "d", "model": {"kind": "wide_deep"}, "sparse_optimizer": {"kind": "sgd", "lr": 1}}
    )
    assert run.model == WideDeepSpec()
    assert run.sparse_optimizer == SGDSpec(lr=1.0)
    assert isinstance(run.sparse_optimizer.lr, float)


def test_none_is_left_out():
    data = to_data(RunSpec(data="d"))
    assert "max_steps" not in data["training"]
    assert "rows" not in data["sparse_optimizer"]
    assert data["model"]["tables"] == {"kind": "static", "dtype": "float32", "optimizers": {}, "shared": {}}


D = {"name": "d", "storage": "raw", "labels": [{"name": "y"}], "dense": [], "categorical": [{"name": "c", "rows": 2}]}
MISTAKES = {
    "no object": (RunSpec, [], ("$", "got []")),
    "missing": (RunSpec, {}, ("$", "field 'data' is missing")),
    "unknown": (
        RunSpec,
        {"data": "d", "modle": 1},
        ("$.modle",),
    ),
    "unlike any": (RunSpec, {"data": "d", "zzzz": 1}, ("$.zzzz",)),
    "deep": (
        RunSpec,
        {"data": "d", "training": {"epoch": 3}},
        ("$.training.epoch",),
    ),
    "string for int": (
        RunSpec,
        {"data": "d", "training": {"epochs": "3"}},
        ("$.training.epochs", "got '3'"),
    ),
    "bool for int": (RunSpec, {"data": "d", "training": {"epochs": True}}, ("$.training.epochs", "got true")),
    "float for int": (RunSpec, {"data": "d", "training": {"epochs": 2.0}}, ("$.training.epochs", "got 2.0")),
    "int for bool": (RunSpec, {"data": "d", "training": {"shuffle": 1}}, ("$.training.shuffle",)),
    "int for string": (RunSpec, {"data": 7}, ("$.data", "got 7")),
    "bool for float": (SGDSpec, {"lr": True}, ("$.lr", "got true")),
    "string for float": (SGDSpec, {"lr": "0.1"}, ("$.lr", "got '0.1'")),
    "endless float": (
        SGDSpec,
        {"lr": 10**400},
        ("$.lr", "got 100000000000000000000000000000000000000000000000000000000..."),
    ),
    "float past the largest": (SGDSpec, {"lr": 2**1024 - 1}, ("$.lr", "got 17976931")),
    "text of half a character": (RunSpec, {"data": "a\ud800"}, ("$.data", "a string of Unicode")),
    "key of half a character": (SGDSpec, {"rows": {"table_lr": {"\ud800": 1.0}}}, ("$.rows.table_lr",)),
    "no number": (SGDSpec, {"lr": float("nan")}, ("$.lr", "got nan")),
    "literal": (
        RunSpec,
        {"data": "d", "training": {"precision": "fp8"}},
        ("$.training.precision", "got 'fp8'"),
    ),
    "literal of another type": (
        RunSpec,
        {"data": "d", "training": {"precision": []}},
        ("$.training.precision", "got []"),
    ),
    "no list": (DLRMSpec, {"top": 5}, ("$.top",)),
    "item": (DLRMSpec, {"top": [5, "6"]}, ("$.top[1]",)),
    "no kind": (
        RunSpec,
        {"data": "d", "model": {}},
        ("$.model.kind", "missing"),
    ),
    "another kind": (
        RunSpec,
        {"data": "d", "model": {"kind": "dcm"}},
        ("$.model.kind", "got 'dcm' (did you mean 'dcn'?)"),
    ),
    "kind of another type": (
        RunSpec,
        {"data": "d", "model": {"kind": []}},
        ("$.model.kind", "got []"),
    ),
    "union of no object": (RunSpec, {"data": "d", "model": "dlrm"}, ("$.model",)),
    "kind of another spec": (SGDSpec, {"kind": "adam"}, ("$.kind",)),
    "row-wise for dense": (
        RunSpec,
        {"data": "d", "dense_optimizer": {"kind": "rowwise_adagrad"}},
        ("$.dense_optimizer.kind",),
    ),
    "inside an optional spec": (
        RunSpec,
        {"data": "d", "sparse_optimizer": {"kind": "sgd", "rows": {"mode": "lazy"}}},
        ("$.sparse_optimizer.rows.mode",),
    ),
    "item of a mapping": (
        SGDSpec,
        {"rows": {"table_lr": {"a": "1"}}},
        ("$.rows.table_lr.a",),
    ),
    "null": (RunSpec, {"data": None}, ("$.data", "got null")),
    "value": (
        RunSpec,
        {"data": "d", "training": {"epochs": 0}},
        ("$.training.epochs", "got 0"),
    ),
    "infinite": (SGDSpec, {"lr": float("inf")}, ("$.lr", "got inf")),
    "negative": (SGDSpec, {"lr": -1}, ("$.lr", "got -1.0")),
    "kind of null": (RunSpec, {"data": "d", "model": {"kind": None}}, ("$.model.kind", "got null")),
    "nested words": (
        DLRMSpec,
        {"width": [None, {"a": True}]},
        ("$.width",),
    ),
    "layers": (
        RunSpec,
        {"data": "d", "model": {"kind": "dlrm", "bottom": [64, 8]}},
        ("$.model.bottom",),
    ),
    "spec as a whole": (DatasetSpec, {**D, "categorical": []}, ("$", "got neither dense nor categorical columns")),
    "mapping": (DatasetSpec, {**D, "splits": []}, ("$.splits",)),
    "in mapping": (
        DatasetSpec,
        {**D, "splits": {"train": [{"file": "a"}]}},
        ("$.splits.train[0]",),
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case):
    spec_type, data, place = MISTAKES[case]
    with pytest.raises(ConfigError, check=at(*place)) as caught:
        from_data(spec_type, data)
    assert "\n" not in str(caught.value)


def test_the_root_has_the_name_that_the_caller_gives():
    with pytest.raises(ConfigError, check=at("run.json: $.data")):
        from_data(RunSpec, {"data": 7}, "run.json: $")


def test_any_error_in_the_text_is_a_value_error() -> None:
    for text in ("[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(TooDeepError):
            parse_json(text)
    for text in ("[1,", b"\xff", "1" * 5000):
        with pytest.raises(ValueError, match=r".") as caught:
            parse_json(text)
        assert not isinstance(caught.value, TooDeepError)


def test_it_reads_what_json_reads_with_its_hooks() -> None:
    text = '{"a": [1, 2.5, NaN], "a": null}'
    distinct = text.replace('"a": null', '"b": null')
    assert str(parse_json(distinct)) == str(json.loads(distinct))
    assert parse_json(text, parse_constant=str, object_pairs_hook=list) == [("a", [1, 2.5, "NaN"]), ("a", None)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_json_in_another_encoding_is_rejected(encoding):
    """Finding Q15: UTF-16 was read in some files."""
    with pytest.raises(ValueError, match=r"."):
        parse_json('{"a": "\u00e9"}'.encode(encoding))
    assert parse_json('{"a": "\u00e9"}'.encode("utf-8-sig")) == {"a": "\u00e9"}


def test_a_field_that_occurs_twice_is_rejected():
    """Finding Q15: the last one counted."""
    with pytest.raises(RepeatedFieldError, match="'b' occurs twice"):
        parse_json('{"a": 1, "c": [{"b": 1, "b": 1}]}')
