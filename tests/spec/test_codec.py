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
from terarec.spec.codec import TooDeepError, parse_json
from tests.errors import at

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
@settings(max_examples=200)
def test_any_spec_comes_back_from_json(spec):
    text = json.dumps(to_data(spec), allow_nan=False)
    assert from_data(type(spec), json.loads(text)) == spec


def test_defaults_fill_what_is_left_out():
    assert from_data(RunSpec, {"data": "d"}) == RunSpec(data="d")


def test_the_kind_tells_which_spec():
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
    assert data["model"]["tables"] == {"kind": "static", "dtype": "float32", "optimizers": {}}


D = {"name": "d", "storage": "raw", "labels": [{"name": "y"}], "dense": [], "categorical": [{"name": "c", "rows": 2}]}
MISTAKES = {
    "no object": (RunSpec, [], r"\$: got \[\], expected an object"),
    "missing": (RunSpec, {}, r"\$: field 'data' is missing, expected 'data', 'model'"),
    "unknown": (
        RunSpec,
        {"data": "d", "modle": 1},
        r"\$.modle: unknown field \(did you mean 'model'\?\), expected one of",
    ),
    "unlike any": (RunSpec, {"data": "d", "zzzz": 1}, r"\$.zzzz: unknown field, expected one of 'data'"),
    "deep": (
        RunSpec,
        {"data": "d", "training": {"epoch": 3}},
        r"\$.training.epoch: unknown field \(did you mean 'epochs'",
    ),
    "string for int": (
        RunSpec,
        {"data": "d", "training": {"epochs": "3"}},
        r"\$.training.epochs: got '3', expected an int",
    ),
    "bool for int": (RunSpec, {"data": "d", "training": {"epochs": True}}, r"epochs: got true, expected an integer"),
    "float for int": (RunSpec, {"data": "d", "training": {"epochs": 2.0}}, r"epochs: got 2.0, expected an integer"),
    "int for bool": (RunSpec, {"data": "d", "training": {"shuffle": 1}}, r"shuffle: got 1, expected true or false"),
    "int for string": (RunSpec, {"data": 7}, r"\$.data: got 7, expected a string"),
    "bool for float": (SGDSpec, {"lr": True}, r"\$.lr: got true, expected a number"),
    "string for float": (SGDSpec, {"lr": "0.1"}, r"\$.lr: got '0.1', expected a number"),
    "endless float": (SGDSpec, {"lr": 10**400}, r"\$.lr: got 1000.*, expected a number"),
    "no number": (SGDSpec, {"lr": float("nan")}, r"\$.lr: got nan, expected a number"),
    "literal": (
        RunSpec,
        {"data": "d", "training": {"precision": "fp8"}},
        r"precision: got 'fp8', expected one of 'fp32', ",
    ),
    "literal of another type": (
        RunSpec,
        {"data": "d", "training": {"precision": []}},
        r"precision: got \[\], expected one of",
    ),
    "no list": (DLRMSpec, {"top": 5}, r"\$.top: got 5, expected a list"),
    "item": (DLRMSpec, {"top": [5, "6"]}, r"\$.top\[1\]: got '6', expected an integer"),
    "no kind": (
        RunSpec,
        {"data": "d", "model": {}},
        r"\$.model.kind: missing, expected one of 'lr', 'fm', 'dnn', 'wide_deep'",
    ),
    "another kind": (
        RunSpec,
        {"data": "d", "model": {"kind": "dcm"}},
        r"\$.model.kind: got 'dcm' \(did you mean 'dcn'\?\), expected one of 'lr'",
    ),
    "kind of another type": (
        RunSpec,
        {"data": "d", "model": {"kind": []}},
        r"\$.model.kind: got \[\], expected one of",
    ),
    "union of no object": (RunSpec, {"data": "d", "model": "dlrm"}, r"\$.model: got 'dlrm', expected an object"),
    "kind of another spec": (SGDSpec, {"kind": "adam"}, r"\$.kind: unknown field, expected one of 'lr'"),
    "row-wise for dense": (
        RunSpec,
        {"data": "d", "dense_optimizer": {"kind": "rowwise_adagrad"}},
        r"dense_optimizer.kind: got",
    ),
    "inside an optional spec": (
        RunSpec,
        {"data": "d", "sparse_optimizer": {"kind": "sgd", "rows": {"mode": "lazy"}}},
        r"\$.sparse_optimizer.rows.mode: got 'lazy', expected one of 'local', 'global', 'lazy_global'",
    ),
    "item of a mapping": (
        SGDSpec,
        {"rows": {"table_lr": {"a": "1"}}},
        r"\$.rows.table_lr.a: got '1', expected a number",
    ),
    "null": (RunSpec, {"data": None}, r"\$.data: got null, expected a string"),
    "value": (
        RunSpec,
        {"data": "d", "training": {"epochs": 0}},
        r"^\$.training.epochs: got 0, expected an integer >= 1$",
    ),
    "infinite": (SGDSpec, {"lr": float("inf")}, r"^\$.lr: got inf, expected a number$"),
    "negative": (SGDSpec, {"lr": -1}, r"^\$.lr: got -1.0, expected a finite number >= 0$"),
    "kind of null": (RunSpec, {"data": "d", "model": {"kind": None}}, r"\$.model.kind: got null, expected one of"),
    "nested words": (
        DLRMSpec,
        {"width": [None, {"a": True}]},
        r"^\$.width: got \[null, {'a': true}\], expected an int",
    ),
    "layers": (
        RunSpec,
        {"data": "d", "model": {"kind": "dlrm", "bottom": [64, 8]}},
        r"^\$.model.bottom: got \[64, 8\], expected a last layer as wide as the embedding \(16\)$",
    ),
    "spec as a whole": (DatasetSpec, {**D, "categorical": []}, r"^\$: got neither dense nor categorical columns"),
    "mapping": (DatasetSpec, {**D, "splits": []}, r"\$.splits: got \[\], expected an object"),
    "in mapping": (
        DatasetSpec,
        {**D, "splits": {"train": [{"file": "a"}]}},
        r"\$.splits.train\[0\]: field 'rows' is missing",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named(case):
    spec_type, data, message = MISTAKES[case]
    with pytest.raises(ConfigError, match=message) as caught:
        from_data(spec_type, data)
    assert "\n" not in str(caught.value)


def test_the_root_has_the_name_that_the_caller_gives():
    with pytest.raises(ConfigError, check=at("run.json: $.data")):
        from_data(RunSpec, {"data": 7}, "run.json: $")


def test_whatever_is_wrong_with_the_text_is_a_value_error() -> None:
    for text in ("[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(TooDeepError, match="recursion"):
            parse_json(text)
    for text in ("[1,", b"\xff", "1" * 5000):
        with pytest.raises(ValueError, match=r".") as caught:
            parse_json(text)
        assert not isinstance(caught.value, TooDeepError)


def test_it_reads_what_json_reads_with_its_hooks() -> None:
    text = '{"a": [1, 2.5, NaN], "a": null}'
    assert parse_json(text) == json.loads(text)
    assert parse_json(text, parse_constant=str, object_pairs_hook=list) == [("a", [1, 2.5, "NaN"]), ("a", None)]
