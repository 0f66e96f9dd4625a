# SPDX-License-Identifier: Apache-2.0
"""A spec that is made is valid: each rejects what cannot be, naming field, value and what is accepted."""

import dataclasses
import math
from typing import Annotated, Literal

import pytest

from terarec.errors import ConfigError
from terarec.spec import (
    AdamSpec,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    DLRMSpec,
    DynamicTableSpec,
    DynamicTablesSpec,
    FeatureSpec,
    FTRLSpec,
    LabelColumn,
    MetadataColumn,
    MomentumSpec,
    RowOptions,
    RunSpec,
    ServingSpec,
    SGDSpec,
    ShardSpec,
    StaticTablesSpec,
    TableSpec,
    TrainingSpec,
    WideDeepSpec,
    checks,
    lru,
)
from terarec.spec.checks import FieldError
from tests.errors import at

DATASET = {
    "name": "d",
    "storage": "parquet",
    "labels": (LabelColumn(name="y"),),
    "dense": (DenseColumn(name="I1"),),
    "categorical": (CategoricalColumn(name="C1", rows=3),),
}

DYNAMIC = {"name": "d", "width": 2}

REJECTED = [
    (TableSpec, {"name": "", "rows": 1, "width": 1}, "TableSpec.name"),
    (TableSpec, {"name": "a/b", "rows": 1, "width": 1}, "TableSpec.name"),
    (TableSpec, {"name": "a\\b", "rows": 1, "width": 1}, "TableSpec.name"),
    (TableSpec, {"name": "..", "rows": 1, "width": 1}, "TableSpec.name"),
    (TableSpec, {"name": "a\nb", "rows": 1, "width": 1}, "TableSpec.name"),
    (TableSpec, {"name": "a\0", "rows": 1, "width": 1}, "TableSpec.name"),
    (TableSpec, {"name": 3, "rows": 1, "width": 1}, "TableSpec.name"),
    (TableSpec, {"name": "t", "rows": 0, "width": 1}, "TableSpec.rows"),
    (TableSpec, {"name": "t", "rows": 1.0, "width": 1}, "TableSpec.rows"),
    (TableSpec, {"name": "t", "rows": 1, "width": 1, "optimizer": ""}, "TableSpec.optimizer"),
    (
        StaticTablesSpec,
        {"optimizers": {"a*": 3}},
        "StaticTablesSpec.optimizers",
    ),
    (DynamicTablesSpec, {"optimizers": ["a"]}, "DynamicTablesSpec.optimizers"),
    (RunSpec, {"data": "d", "row_optimizers": {"default": SGDSpec()}}, "RunSpec.row_optimizers"),
    (
        RunSpec,
        {"data": "d", "row_optimizers": {"wide": "sgd"}},
        "RunSpec.row_optimizers",
    ),
    (TableSpec, {"name": "t", "rows": 1, "width": True}, "TableSpec.width"),
    (
        TableSpec,
        {"name": "t", "rows": 1, "width": 1, "initializer": "ones"},
        "TableSpec.initializer",
    ),
    (
        TableSpec,
        {"name": "t", "rows": 1, "width": 1, "init_scale": 0.0},
        "TableSpec.init_scale",
    ),
    (
        FeatureSpec,
        {"name": "f", "table": "t", "pooling": "median"},
        "FeatureSpec.pooling",
    ),
    (CategoricalColumn, {"name": "c", "rows": 5, "hotness": 0}, "CategoricalColumn.hotness"),
    (
        ShardSpec,
        {"file": "/etc/x", "rows": 1},
        "ShardSpec.file",
    ),
    (ShardSpec, {"file": "a/../../x", "rows": 1}, "ShardSpec.file"),
    (ShardSpec, {"file": "", "rows": 1}, "ShardSpec.file"),
    (ShardSpec, {"file": "a", "rows": -1}, "ShardSpec.rows"),
    (
        DLRMSpec,
        {"width": 8},
        "DLRMSpec.bottom",
    ),
    (DLRMSpec, {"top": ()}, "DLRMSpec.top"),
    (DLRMSpec, {"top": [5]}, "DLRMSpec.top"),
    (WideDeepSpec, {"dropout": 1.0}, "WideDeepSpec.dropout"),
    (SGDSpec, {"lr": -0.1}, "SGDSpec.lr"),
    (SGDSpec, {"lr": math.inf}, "SGDSpec.lr"),
    (AdamSpec, {"beta1": 1.0}, "AdamSpec.beta1"),
    (TrainingSpec, {"batch_size": 0}, "TrainingSpec.batch_size"),
    (TrainingSpec, {"eval_every": 0}, "TrainingSpec.eval_every"),
    (RunSpec, {"data": ""}, "RunSpec.data"),
    (MomentumSpec, {"momentum": 1.0}, "MomentumSpec.momentum"),
    (MomentumSpec, {"lr_in_momentum": 2}, "MomentumSpec.lr_in_momentum"),
    (AdamSpec, {"eps_hat": 1e-7}, "AdamSpec.eps_hat"),
    (FTRLSpec, {"lr": 0.0}, "FTRLSpec.lr"),
    (FTRLSpec, {"rows": RowOptions(l1=0.1)}, "FTRLSpec.rows"),
    (RowOptions, {"mode": "lazy"}, "RowOptions.mode"),
    (RowOptions, {"mode": "lazy_global", "l2": 0.1}, "RowOptions.mode"),
    (RowOptions, {"non_finite": "ignore"}, "RowOptions.non_finite"),
    (RowOptions, {"clip_norm": 0.0}, "RowOptions.clip_norm"),
    (RowOptions, {"loss_scale": 0.0}, "RowOptions.loss_scale"),
    (RowOptions, {"table_lr": {"a": -1.0}}, "RowOptions.table_lr"),
    (RowOptions, {"frozen": "item"}, "RowOptions.frozen"),
    (RowOptions, {"table_lr": 0.1}, "RowOptions.table_lr"),
    (AdamSpec, {"rows": {"clip_norm": 1.0}}, "AdamSpec.rows"),
    (
        DynamicTableSpec,
        {**DYNAMIC, "evict": lru},
        "DynamicTableSpec.evict",
    ),
    (DynamicTableSpec, {**DYNAMIC, "admit": 3}, "DynamicTableSpec.admit"),
    (
        DynamicTableSpec,
        {**DYNAMIC, "default": (1.0, "0")},
        "DynamicTableSpec.default",
    ),
    (DynamicTableSpec, {**DYNAMIC, "track_uses": "no"}, "DynamicTableSpec.track_uses"),
    (DynamicTablesSpec, {"evict": "lru", "max_rows": 9}, "DynamicTablesSpec.evict"),
    (RowOptions, {"frozen": ("a", "a")}, "RowOptions.frozen"),
    (ServingSpec, {"port": 70000}, "ServingSpec.port"),
    (DatasetSpec, {**DATASET, "labels": ()}, "DatasetSpec.labels"),
    (
        DatasetSpec,
        {**DATASET, "dense": (), "categorical": ()},
        "DatasetSpec",
    ),
    (DatasetSpec, {**DATASET, "dense": (DenseColumn(name="C1"),)}, "DatasetSpec.columns"),
    (DatasetSpec, {**DATASET, "best_auc": math.nan}, "DatasetSpec.best_auc"),
    (DatasetSpec, {**DATASET, "workflow": "../x"}, "DatasetSpec.workflow"),
    (DatasetSpec, {**DATASET, "storage": "csv"}, "DatasetSpec.storage"),
]


@pytest.mark.parametrize(("spec_type", "fields", "message"), REJECTED)
def test_rejected(spec_type, fields, message):
    with pytest.raises(ConfigError, check=at(message)) as caught:
        spec_type(**fields)
    assert "\n" not in str(caught.value)


def test_a_data_set_describes_its_splits():
    shards = (ShardSpec(file="train/a", rows=3), ShardSpec(file="train/b", rows=4))
    spec = DatasetSpec(**DATASET, splits={"train": shards, "valid": ()})
    assert spec.column_names == ("y", "I1", "C1")
    columns = (MetadataColumn(name="C1", type="string"), MetadataColumn(name="user", type="int64"))
    wider = dataclasses.replace(spec, weight="w", metadata=columns)
    assert wider.column_names == spec.column_names
    assert wider.file_columns == ("y", "I1", "C1", "w", "metadata.C1", "user")
    for changes, place in (
        ({"weight": "I1"}, ("DatasetSpec.columns",)),
        ({"weight": ""}, ("DatasetSpec.weight",)),
        ({"metadata": columns[:1] * 2}, ("DatasetSpec.metadata", "the name 'C1' occurs twice")),
        ({"metadata": columns, "storage": "raw"}, ("DatasetSpec.metadata", "got 'C1', 'user' for storage 'raw'")),
    ):
        with pytest.raises(ConfigError, check=at(*place)):
            dataclasses.replace(wider, **changes)
    with pytest.raises(ConfigError, check=at("MetadataColumn.type")):
        MetadataColumn(name="user", type="int32")
    assert spec.shards("train") == shards
    assert (spec.num_rows("train"), spec.num_rows("valid")) == (7, 0)
    with pytest.raises(ConfigError, check=at("data set 'd'")):
        spec.shards("test")


def test_the_error_of_a_field_has_its_parts():
    with pytest.raises(FieldError) as caught:
        TrainingSpec(batch_size=0)
    assert (caught.value.owner, caught.value.field) == ("TrainingSpec", "batch_size")
    assert caught.value.problem == "got 0, expected an integer >= 1"


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SGDSpec().lr = 2.0


@pytest.mark.parametrize("spec", [StaticTablesSpec, DynamicTablesSpec])
def test_the_first_pattern_that_matches_a_table_names_its_rule(spec) -> None:
    tables = spec(optimizers={"item_?": "wide", "item*": "deep"})
    names = {name: tables.table(name, rows=3, width=2).optimizer for name in ("item_a", "items", "user", "Item_a")}
    assert names == {"item_a": "wide", "items": "deep", "user": "default", "Item_a": "default"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Annotated(checks.Checked):
    size: checks.Width = 2
    share: Annotated[float, checks.number(0.5)] | None = None
    word: Literal["a", "b"] = "a"
    switch: bool = False
    either: float | Literal["auto"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _WithOtherDefaults(_Annotated):
    size: int = 3
    word: str = "b"


@pytest.mark.parametrize("of", [_Annotated, _WithOtherDefaults])
@pytest.mark.parametrize("field", ["size", "share", "word", "switch"])
def test_a_field_accepts_what_its_annotation_or_that_of_a_base_says(of: type, field: str) -> None:
    of(share=None, either=-1.0)
    of(size=1, share=0.5, word="a", switch=True)
    with pytest.raises(FieldError) as error:
        of(**{field: -1})
    assert (error.value.owner, error.value.field) == (of.__name__, field)
