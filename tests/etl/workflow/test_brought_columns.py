# SPDX-License-Identifier: Apache-2.0
"""Columns that a record brings along because a step makes them of other rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from terarec.errors import ConfigError
from terarec.etl.columns import flat, list_offsets, numpy_values
from terarec.etl.ops import (
    Bucketize,
    Cross,
    DifferenceLag,
    FillMissing,
    GivenIds,
    HashBucket,
    History,
    ListSlice,
    Operator,
)
from terarec.etl.workflow import Workflow
from terarec.serve.session import InputColumn, input_columns
from terarec.spec import LabelSpec, SourceColumn, SourceSpec
from tests.errors import at

SOURCE = SourceSpec(
    format="parquet",
    columns=(
        SourceColumn(name="user", type="text"),
        SourceColumn(name="item", type="text"),
        SourceColumn(name="shop", type="integer"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="time", type="time", format="%Y-%m-%d"),
        SourceColumn(name="bought", type="number"),
    ),
)
LOG = pa.table(
    {
        "user": ["u", "u", "v", "u"],
        "item": ["a", "b", "a", None],
        "shop": [3, 1, 2, 0],
        "price": [1.0, 20.0, 3.0, 4.0],
        "time": ["2024-01-01", "2024-01-02", "2024-01-02", "2024-01-03"],
        "bought": [0.0, 1.0, 0.0, 1.0],
    }
)
PAST: dict[str, Any] = {"group": "user", "order": "time", "max_length": 2}
IDS: list[Any] = [
    HashBucket(columns=("item",), outputs=("item_id",), buckets=9),
    Bucketize(columns=("price",), outputs=("band",), boundaries=(2.0, 10.0)),
    GivenIds(columns=("shop",), rows=(4,)),
    History(columns=("item_id", "user", "band", "shop"), outputs=("items", "users", "bands", "shops"), **PAST),
    HashBucket(columns=("users",), buckets=5),
    ListSlice(columns=("bands",), start=-1),
]


def workflow(steps: list[Any], **fields: Any) -> Workflow:
    return Workflow(steps, source=SOURCE, labels=[LabelSpec(name="bought")], **fields)


def lists(array: pa.Array) -> list[list[int]]:
    values, offsets = numpy_values(flat(array)), list_offsets(array)
    assert offsets is not None
    return [part.tolist() for part in np.split(values, offsets[1:-1])]


def test_a_history_of_ids_is_served() -> None:
    """Finding Q: a history of ids was trained on, and its first record raised KeyError 'id'."""
    made = workflow(IDS, categorical=["item_id", "items", "users", "bands", "shops"])
    assert list(made.record_columns) == ["item", "items", "users", "bands", "shops"]
    assert InputColumn(name="bands", kind="integer", hotness=2) in input_columns(made)
    histories = made.apply(LOG, upto=4).columns
    records = {
        "item": LOG["item"].to_pylist(),
        "users": histories["users"].to_pylist(),
        **{name: lists(histories[name]) for name in ("items", "bands", "shops")},
    }
    wanted = made.encode_rows(made.apply(LOG))
    for encoded in (made.encode(records), made.encode(pa.table(records)), made.encode(pa.table(records).to_pandas())):
        for keys, others in zip(encoded.keys, wanted.keys, strict=True):
            for part, other in zip(*(k if isinstance(k, tuple) else (k,) for k in (keys, others)), strict=True):
                np.testing.assert_array_equal(part, other)


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize(("ids", "problem"), [([10], "got 10"), ([-1], "got -1"), ([1, None], "got None")])
def test_ids_that_no_table_has_are_refused(ids: list[Any], problem: str, is_narrow: bool, is_table: bool) -> None:
    """Finding Q: of a history, also where some of its columns are not read."""
    records = {"items": [[3], ids], **({} if is_narrow else {"shops": [[1], [2]]})}
    made = workflow(IDS, categorical=["items", "shops"])
    made = made.reading(["items"]) if is_narrow else made
    with pytest.raises(ConfigError, check=at("column 'items', row 1", problem)):
        made.encode(pa.table(records) if is_table else records)


def test_outputs_under_names_of_the_source_are_no_columns_of_files() -> None:
    """Finding Q: a list and a difference were read as the text and the time that files have under their names."""
    made = workflow(
        [
            History(columns=("item",), **PAST),
            DifferenceLag(columns=("time",), group="user", order="time"),
            FillMissing(columns=("time",), value=-1),
            HashBucket(columns=("item",), buckets=9),
        ],
        dense=["time"],
        categorical=["item"],
    )
    columns = (InputColumn(name="time", kind="integer"), InputColumn(name="item", kind="string", hotness=2))
    assert input_columns(made) == columns
    assert made.record_sources == {}
    records = {"time": [86400, None], "item": [["a", "b"], []]}
    for raw in (records, pa.table(records)):
        encoded = made.encode(raw)
        assert encoded.dense.tolist() == [[86400.0], [-1.0]]
        assert [part.tolist() for part in encoded.keys[0]] == [[4, 7], [0, 2, 2]]  # type: ignore[union-attr]


@pytest.mark.parametrize("by", [Cross(columns=("item", "user"), output="x"), History(columns=("user",), **PAST)])
def test_a_record_has_one_column_of_a_name(by: Operator) -> None:
    """Finding Q: a step wrote over what the record had brought, or the type of one column stood for the other's.

    It was refused where the trained model was to be served, and not where the workflow was made.
    """
    earlier = replace(by, outputs=("x",)) if isinstance(by, History) else by
    steps = [
        earlier,
        HashBucket(columns=("x",), outputs=("ids",), buckets=9),
        History(columns=("item",), outputs=("x",), **PAST),
        HashBucket(columns=("x",), buckets=9),
    ]
    with pytest.raises(ConfigError, check=at("column 'x'", "other names")):
        workflow(steps, categorical=["ids", "x"])
    assert set(workflow(steps, categorical=["x"]).record_columns) == {"x"}
