"""A spec that is made is valid: each refuses what cannot be, naming field, value and what is accepted."""

import dataclasses
import math

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
    FieldError,
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
    lru,
)

DATASET = {
    "name": "d",
    "storage": "parquet",
    "labels": (LabelColumn(name="y"),),
    "dense": (DenseColumn(name="I1"),),
    "categorical": (CategoricalColumn(name="C1", rows=3),),
}

DYNAMIC = {"name": "d", "width": 2}

REFUSED = [
    (TableSpec, {"name": "", "rows": 1, "width": 1}, "TableSpec.name: got '', expected a non-empty name"),
    (TableSpec, {"name": "a/b", "rows": 1, "width": 1}, "TableSpec.name: got 'a/b'"),
    (TableSpec, {"name": "a\\b", "rows": 1, "width": 1}, "TableSpec.name: got"),
    (TableSpec, {"name": "..", "rows": 1, "width": 1}, "TableSpec.name: got '..'"),
    (TableSpec, {"name": "a\nb", "rows": 1, "width": 1}, "TableSpec.name: got"),
    (TableSpec, {"name": "a\0", "rows": 1, "width": 1}, "TableSpec.name: got"),
    (TableSpec, {"name": 3, "rows": 1, "width": 1}, "TableSpec.name: got 3"),
    (TableSpec, {"name": "t", "rows": 0, "width": 1}, "TableSpec.rows: got 0, expected an integer >= 1"),
    (TableSpec, {"name": "t", "rows": 1.0, "width": 1}, "TableSpec.rows: got 1.0"),
    (TableSpec, {"name": "t", "rows": 1, "width": 1, "optimizer": ""}, "TableSpec.optimizer: got ''"),
    (
        StaticTablesSpec,
        {"optimizers": {"a*": 3}},
        "StaticTablesSpec.optimizers: got .*, expected a rule's name for each",
    ),
    (DynamicTablesSpec, {"optimizers": ["a"]}, "DynamicTablesSpec.optimizers: got .*, expected a rule"),
    (RunSpec, {"data": "d", "row_optimizers": {"default": SGDSpec()}}, "RunSpec.row_optimizers: got 'default', exp"),
    (
        RunSpec,
        {"data": "d", "row_optimizers": {"wide": "sgd"}},
        "RunSpec.row_optimizers: got .*, expected an opt",
    ),
    (TableSpec, {"name": "t", "rows": 1, "width": True}, "TableSpec.width: got True"),
    (
        TableSpec,
        {"name": "t", "rows": 1, "width": 1, "initializer": "ones"},
        "TableSpec.initializer: got 'ones', expected one of",
    ),
    (
        TableSpec,
        {"name": "t", "rows": 1, "width": 1, "init_scale": 0.0},
        r"TableSpec.init_scale: got 0.0, expected a finite number > 0$",
    ),
    (
        FeatureSpec,
        {"name": "f", "table": "t", "pooling": "median"},
        "FeatureSpec.pooling: got 'median' .did you mean 'mean'.., expected one of 'sum', 'mean'",
    ),
    (CategoricalColumn, {"name": "c", "rows": 5, "hotness": 0}, "CategoricalColumn.hotness: got 0"),
    (
        ShardSpec,
        {"file": "/etc/x", "rows": 1},
        "ShardSpec.file: got '/etc/x', expected a relative path inside its directory",
    ),
    (ShardSpec, {"file": "a/../../x", "rows": 1}, "ShardSpec.file: got"),
    (ShardSpec, {"file": "", "rows": 1}, "ShardSpec.file: got ''"),
    (ShardSpec, {"file": "a", "rows": -1}, "ShardSpec.rows: got -1, expected an integer >= 0"),
    (
        DLRMSpec,
        {"width": 8},
        r"DLRMSpec.bottom: got \[512, 256, 16\], expected a last layer as wide as the embedding \(8\)",
    ),
    (DLRMSpec, {"top": ()}, r"DLRMSpec.top: got \[\], expected layer widths"),
    (DLRMSpec, {"top": [5]}, r"DLRMSpec.top: got \[5\], expected a tuple of layer widths"),
    (WideDeepSpec, {"dropout": 1.0}, r"WideDeepSpec.dropout: got 1.0, expected a number from 0 to 0.95"),
    (SGDSpec, {"lr": -0.1}, "SGDSpec.lr: got -0.1"),
    (SGDSpec, {"lr": math.inf}, r"SGDSpec.lr: got inf, expected a finite number >= 0$"),
    (AdamSpec, {"beta1": 1.0}, "AdamSpec.beta1: got 1.0"),
    (TrainingSpec, {"batch_size": 0}, "TrainingSpec.batch_size: got 0"),
    (TrainingSpec, {"eval_every": 0}, "TrainingSpec.eval_every: got 0"),
    (RunSpec, {"data": ""}, "RunSpec.data: got '', expected the path of a prepared data set"),
    (MomentumSpec, {"momentum": 1.0}, r"MomentumSpec.momentum: got 1.0, expected a number from 0 to 0.9999999"),
    (MomentumSpec, {"lr_in_momentum": 2}, r"MomentumSpec.lr_in_momentum: got 2, expected one of False, True"),
    (AdamSpec, {"eps_hat": 1e-7}, r"AdamSpec.eps_hat: got 1e-07, expected one of False, True"),
    (FTRLSpec, {"lr": 0.0}, "FTRLSpec.lr: got 0.0, expected a finite number > 0"),
    (FTRLSpec, {"rows": RowOptions(l1=0.1)}, "FTRLSpec.rows: got l1 or l2 there, expected FTRL's own"),
    (RowOptions, {"mode": "lazy"}, "RowOptions.mode: got 'lazy', expected one of 'local', 'global', 'lazy_global'"),
    (RowOptions, {"mode": "lazy_global", "l2": 0.1}, "RowOptions.mode: got 'lazy_global' with l1 or l2"),
    (RowOptions, {"non_finite": "ignore"}, "RowOptions.non_finite: got 'ignore', expected one of 'pass'"),
    (RowOptions, {"clip_norm": 0.0}, "RowOptions.clip_norm: got 0.0, expected a finite number > 0"),
    (RowOptions, {"loss_scale": 0.0}, "RowOptions.loss_scale: got 0.0"),
    (RowOptions, {"table_lr": {"a": -1.0}}, "RowOptions.table_lr: got -1.0 for 'a', expected a finite number >= 0"),
    (RowOptions, {"frozen": "item"}, r"RowOptions.frozen: got 'item', expected names of tables, such as \['item'\]"),
    (RowOptions, {"table_lr": 0.1}, "RowOptions.table_lr: got 0.1, expected a factor for each table"),
    (AdamSpec, {"rows": {"clip_norm": 1.0}}, r"AdamSpec.rows: got {'clip_norm': 1.0}, expected RowOptions or None"),
    (
        DynamicTableSpec,
        {**DYNAMIC, "evict": lru},
        r"DynamicTableSpec.evict: got <function lru.*>, expected lru\(\), lfu",
    ),
    (DynamicTableSpec, {**DYNAMIC, "admit": 3}, r"DynamicTableSpec.admit: got 3, expected freq\(n\), prob"),
    (
        DynamicTableSpec,
        {**DYNAMIC, "default": (1.0, "0")},
        "DynamicTableSpec.default: .*, expected one finite number or 2",
    ),
    (DynamicTableSpec, {**DYNAMIC, "track_uses": "no"}, "DynamicTableSpec.track_uses: got 'no'"),
    (DynamicTablesSpec, {"evict": "lru", "max_rows": 9}, r"DynamicTablesSpec.evict: got 'lru', expected lru\(\)"),
    (RowOptions, {"frozen": ("a", "a")}, "RowOptions.frozen: the name 'a' occurs twice"),
    (ServingSpec, {"port": 70000}, "ServingSpec.port: got 70000, expected a TCP port"),
    (DatasetSpec, {**DATASET, "labels": ()}, "DatasetSpec.labels: got no column"),
    (
        DatasetSpec,
        {**DATASET, "dense": (), "categorical": ()},
        "DatasetSpec: got neither dense nor categorical columns",
    ),
    (DatasetSpec, {**DATASET, "dense": (DenseColumn(name="C1"),)}, "DatasetSpec.columns: the name 'C1' occurs twice"),
    (DatasetSpec, {**DATASET, "best_auc": math.nan}, "DatasetSpec.best_auc: got nan"),
    (DatasetSpec, {**DATASET, "workflow": "../x"}, "DatasetSpec.workflow: got '../x', expected a relative path"),
    (DatasetSpec, {**DATASET, "storage": "csv"}, "DatasetSpec.storage: got 'csv', expected one of 'parquet', 'raw'"),
]


@pytest.mark.parametrize(("spec_type", "fields", "message"), REFUSED)
def test_rejected(spec_type, fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        spec_type(**fields)
    assert "\n" not in str(caught.value)


def test_what_a_data_set_says_of_itself():
    shards = (ShardSpec(file="train/a", rows=3), ShardSpec(file="train/b", rows=4))
    spec = DatasetSpec(**DATASET, splits={"train": shards, "valid": ()})
    assert spec.column_names == ("y", "I1", "C1")
    columns = (MetadataColumn(name="C1", type="string"), MetadataColumn(name="user", type="int64"))
    wider = dataclasses.replace(spec, weight="w", metadata=columns)
    assert wider.column_names == spec.column_names
    assert wider.file_columns == ("y", "I1", "C1", "w", "metadata.C1", "user")
    for changes, message in (
        ({"weight": "I1"}, "columns: the name 'I1' occurs twice"),
        ({"weight": ""}, "weight: got '', expected a non-empty name"),
        ({"metadata": columns[:1] * 2}, "metadata: the name 'C1' occurs twice"),
        ({"metadata": columns, "storage": "raw"}, "metadata: got 'C1', 'user' for storage 'raw'"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(wider, **changes)
    with pytest.raises(ConfigError, match=r"type: got 'int32' \(did you mean 'int64'\?\), expected one of 'int64', "):
        MetadataColumn(name="user", type="int32")
    assert spec.shards("train") == shards
    assert (spec.num_rows("train"), spec.num_rows("valid")) == (7, 0)
    with pytest.raises(ConfigError, match=r"data set 'd' has no split 'test', expected one of 'train', 'valid'$"):
        spec.shards("test")


def test_the_error_of_a_field_tells_its_parts():
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
