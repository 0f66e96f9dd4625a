# SPDX-License-Identifier: Apache-2.0
"""Served records are encoded as rows of files, whatever holds them; values that they may not hold are reported."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.ops import (
    Bucketize,
    Clip,
    Cross,
    Explode,
    FillMissing,
    GivenIds,
    HashBucket,
    KeepRows,
    ListSlice,
    LogOp,
    Operator,
    Rename,
    SplitText,
)
from terarec.etl.workflow import Workflow
from terarec.spec import LabelSpec, SourceColumn, SourceSpec
from terarec.spec.dataset import MISSING_KEY
from tests.errors import at
from tests.etl.column_values import block_of
from tests.params import examples

SOURCE = SourceSpec(
    format="delimited",
    columns=(
        SourceColumn(name="user", type="integer"),
        SourceColumn(name="time", type="time", format="%Y-%m-%d %H:%M"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="cost", type="number"),
        SourceColumn(name="brand", type="text"),
        SourceColumn(name="model", type="hex32"),
        SourceColumn(name="tags", type="text", separator=" "),
        SourceColumn(name="clicks", type="integer"),
    ),
)
STEPS = [
    Bucketize(columns=("price",), boundaries=(1.0, 5.0), outputs=("band",)),
    FillMissing(columns=("cost", "price"), value=0.5),
    Rename(names={"price": "euros"}),
    Clip(columns=("cost", "euros"), high=100.0),
    LogOp(columns=("cost", "euros"), shift=2.0),
    Cross(columns=("brand", "model"), output="kind"),
    HashBucket(columns=("kind", "model", "brand"), buckets=1000, outputs=("kind", "model_id", "brand_id")),
    Clip(columns=("time",), low=0, outputs=("since",)),
    ListSlice(columns=("tags",), stop=2),
    HashBucket(columns=("tags",), buckets=1000),
]
RAW: dict[str, list[Any]] = {
    "user": [7, None, 2**62],
    "time": ["2024-02-29 13:05", 60, None],
    "price": [0.5, None, 500],
    "cost": [None, -1.5, 1e300],
    "brand": ["a", "", "\u00fc"],
    "model": ["fF", None, "0000000a"],
    "tags": [["a", "\u00fc", "x"], None, "a b c"],
}


def workflow(*steps: Operator, **results: Any) -> Workflow:
    fields = {"labels": [LabelSpec(name="clicks")], **results}
    return Workflow(steps or STEPS, source=SOURCE, **fields)


def shop() -> Workflow:
    return workflow(
        dense=["euros", "cost"], categorical=["band", "kind", "model_id", "brand_id", "tags"], keys=["user"]
    )


SHOP = shop()


def test_records_get_what_rows_got() -> None:
    encoded = shop().encode({name: values for name, values in RAW.items() if name != "time"})
    rows = block_of(
        user=("integer", RAW["user"]),
        price=("number", RAW["price"]),
        cost=("number", RAW["cost"]),
        brand=("text", RAW["brand"]),
        model=("hex32", [255, None, 10]),
        tags=("text", [["a", "\u00fc", "x"], [], ["a", "b", "c"]]),
        clicks=("integer", [0, 1, 0]),
        time=("integer", [0, 0, 0]),
    )
    expected = shop().encode_rows(shop().apply(rows))
    np.testing.assert_array_equal(encoded.dense, expected.dense)
    for found, wanted in zip(encoded.keys, expected.keys, strict=True):
        np.testing.assert_array_equal(np.concatenate(found, axis=None), np.concatenate(wanted, axis=None))
    assert encoded.dense.dtype == np.float32
    assert np.asarray(encoded.keys[-1]).tolist() == [7, MISSING_KEY, 2**62]


@pytest.mark.parametrize(
    ("steps", "results", "read", "raw"),
    [
        (STEPS, {}, ("euros",), {"price"}),
        (STEPS, {}, ("kind", "tags", "cost"), {"brand", "model", "tags", "cost"}),
        (STEPS, {}, ("user", "brand_id"), {"user", "brand"}),
        (
            [
                FillMissing(columns=("cost", "price"), value=0.5, indicator=True),
                GivenIds(columns=("user", "clicks"), rows=(2, 9), outputs=("a", "b")),
            ],
            {"dense": ["price", "cost_missing"], "categorical": ["a", "b"]},
            ("b", "cost_missing"),
            {"cost", "clicks"},
        ),
    ],
    ids=["a renamed number", "a cross and a list", "a key and a hash", "ids and what was missing"],
)
def test_a_reader_of_some_columns_needs_their_raw_ones_alone(
    steps: list[Operator], results: dict[str, Any], read: tuple[str, ...], raw: set[str]
) -> None:
    """Steps of several columns make those that are read; the others are zeros and empty lists."""
    whole = workflow(*steps, **results) if results else shop()
    values = {**RAW, "tags": [["a", "x"], None, ["b"]], "clicks": [3, 0, 8], "user": [1, 0, 1], "cost": [None, 2.0, 4]}
    every = whole.encode({name: values[name] for name in whole.record_columns})
    part = whole.reading(read)
    assert set(part.record_columns) == raw
    given = {name: values[name] for name in raw}
    dataset = whole.dataset_spec()
    for encoded in (part.encode(given), part.encode(pa.table(given))):
        for place, column in enumerate(dataset.dense):
            wanted = every.dense[:, place] if column.name in read else np.zeros(3)
            np.testing.assert_array_equal(encoded.dense[:, place], wanted)
        for column, found, wanted in zip(dataset.categorical, encoded.keys, every.keys, strict=True):
            if column.name in read:
                np.testing.assert_array_equal(np.concatenate(found, axis=None), np.concatenate(wanted, axis=None))
            else:
                # Lists are their values and their offsets.
                assert np.concatenate(found, axis=None).tolist() == [0] * (3 if column.hotness == 1 else 4)


def same(encoded: Any, other: Any) -> None:
    np.testing.assert_array_equal(encoded.dense, other.dense)
    for found, wanted in zip(encoded.keys, other.keys, strict=True):
        np.testing.assert_array_equal(np.concatenate(found, axis=None), np.concatenate(wanted, axis=None))


def test_lists_arrays_and_arrow_of_any_size_give_the_same() -> None:
    made = shop()
    raw = {name: values for name, values in RAW.items() if name != "time"}
    raw["tags"] = [["a", "\u00fc", "x"], None, ["a", None]]
    for copies in (1, 100):  # Arrow arrays of a few rows are taken as lists
        many = {name: values * copies for name, values in raw.items()}
        arrow = {name: pa.array(values) for name, values in many.items()}
        from_lists = made.encode(many)
        same(made.encode(arrow), from_lists)
        same(made.encode({**many, "price": np.array(many["price"], dtype=np.float64)}), from_lists)
        rows = len(many["user"])
        singles = [made.encode({name: [values[row]] for name, values in many.items()}) for row in range(min(rows, 3))]
        np.testing.assert_array_equal(np.concatenate([single.dense for single in singles]), from_lists.dense[:3])


def test_integers_of_records_equal_those_of_blocks() -> None:
    made = workflow(
        HashBucket(columns=("user",), outputs=("user_hash",), buckets=10),
        FillMissing(columns=("user", "clicks"), value=-1),
        Clip(columns=("user",), low=-5, high=2**60),
        LogOp(columns=("user", "clicks"), shift=9.0),
        dense=["user", "clicks"],
        categorical=["user_hash"],
        labels=[LabelSpec(name="price")],
    )
    users = [None, 3, -7, 2**53 + 1, 2**63 - 1, 1 - 2**63]
    raw = {"user": users, "clicks": [1, 2, 3, None, 5, 6]}
    rows = block_of(user=("integer", users), clicks=("integer", raw["clicks"]), price=("number", [0.0] * 6))
    expected = made.encode_rows(made.apply(rows)).dense
    np.testing.assert_array_equal(made.encode(raw).dense, expected)
    np.testing.assert_array_equal(made.encode({name: pa.array(values) for name, values in raw.items()}).dense, expected)
    for wrong in (1.5, True, 2**63):
        with pytest.raises(ConfigError, check=at("column 'user', row 1")):
            made.encode({"user": [1, wrong], "clicks": [1, 2]})
    as_tables_hold_them = {"user": users, "clicks": np.array([1, 2, 3, np.nan, 5, 6])}  # only their number matters
    np.testing.assert_array_equal(made.encode(as_tables_hold_them).dense, expected)


RECORDS = st.fixed_dictionaries(
    {
        "user": st.none() | st.integers(-(2**63), 2**63 - 1),
        "price": st.none() | st.floats(-1.5, 1e9) | st.sampled_from([1.0, 5.0, float("nan")]),
        "cost": st.none() | st.floats(-1.9, 1e300) | st.integers(0, 3),
        "brand": st.none() | st.sampled_from(["", "a", "\u00fc"]) | st.text(st.characters(codec="utf-8"), max_size=3),
        "model": st.none() | st.sampled_from(["", "0", "ffffffff"]) | st.from_regex("[0-9a-fA-F]{1,8}", fullmatch=True),
        "tags": st.none() | st.lists(st.none() | st.sampled_from(["a", "b", ""]), max_size=4),
    }
)


@given(st.lists(RECORDS, min_size=1, max_size=4))
@settings(max_examples=examples(60))
def test_records_in_lists_equal_a_block_of_them(records: list[dict[str, Any]]) -> None:
    columns: dict[str, Any] = {name: [record[name] for record in records] for name in records[0]}
    expected = SHOP.encode(columns)
    many = {name: pa.array(values * 129) for name, values in columns.items()}  # so many arrays go as a block
    same(SHOP.encode(many), SHOP.encode({name: values * 129 for name, values in columns.items()}))
    for row in range(len(records)):
        single = SHOP.encode({name: values[row : row + 1] for name, values in columns.items()})
        np.testing.assert_array_equal(single.dense[0], expected.dense[row])


def test_a_number_that_a_step_rejects_is_reported_though_a_later_step_would_fill_it() -> None:
    made = workflow(LogOp(columns=("price",), shift=0.0), FillMissing(columns=("price",), value=0.0), dense=["price"])
    with pytest.raises(ConfigError, check=at("column 'price', row 1", "got -1.0")):
        made.encode({"price": [1.0, -1.0]})


def test_no_records_at_all() -> None:
    encoded = shop().encode({name: [] for name in RAW if name != "time"})
    assert encoded.dense.shape == (0, 2)
    assert [len(keys[0] if isinstance(keys, tuple) else keys) for keys in encoded.keys] == [0] * 6


def test_times_are_read_as_files_spell_them() -> None:
    made = workflow(Clip(columns=("time",), low=0), dense=["time"])
    dense = made.encode({"time": ["2024-02-29 13:05", 60, "1969-12-31 23:59"]}).dense
    assert dense[:, 0].tolist() == [float(np.float32(1709211900)), 60.0, 0.0]
    with pytest.raises(ConfigError, check=at("column 'time', row 0")):
        made.encode({"time": ["29.2.2024"]})


def test_a_record_needs_only_the_columns_that_are_read() -> None:
    made = workflow(dense=["euros"], categorical=["band"])
    assert made.record_columns == dict.fromkeys(("price", "cost"), ColumnType("number"))  # both are filled by one step
    encoded = made.encode({"price": [1.0], "cost": [2.0], "clicks": [1], "brand": ["x"]})
    assert encoded.keys[0].tolist() == [2]  # type: ignore[union-attr]


def test_a_record_is_one_item_of_an_exploded_list_and_is_kept() -> None:
    made = workflow(
        KeepRows(column="brand", values=("shop",)),
        Explode(columns=("tags",)),
        SplitText(columns=("tags",), separator="-", outputs=("item", "clicked"), types=("text", "integer")),
        HashBucket(columns=("item",), buckets=1000),
        labels=[LabelSpec(name="clicked")],
        categorical=["item"],
    )
    assert made.record_columns == {"tags": ColumnType("text")}
    for records in ({"tags": ["a", "\u00fc-1", None]}, pa.table({"tags": ["a", "\u00fc-1", None]})):
        assert made.encode(records).keys[0].tolist() == [717, 149, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("column", ["tags", "views"])
def test_a_table_has_one_item_of_an_exploded_list(column: str) -> None:
    """Its texts were cut into lists, and its integers no lists."""
    views = SourceColumn(name="views", type="integer", separator=" ")
    source = replace(SOURCE, columns=(*SOURCE.columns, views))
    steps = [Explode(columns=(column,)), HashBucket(columns=(column,), buckets=1000)]
    made = Workflow(steps, source=source, labels=[LabelSpec(name="clicks")], categorical=[column])
    values = {column: ["a b", None, "a"] if column == "tags" else [3, None, 5]}
    ids: list[int] = made.encode(values).keys[0].tolist()  # type: ignore[union-attr]
    assert (len(ids), ids[1]) == (3, 0)
    assert made.encode(pa.table(values)).keys[0].tolist() == ids  # type: ignore[union-attr]


@pytest.mark.parametrize("form", [list, np.array, pa.array, lambda values: pa.array(values * 50)])
def test_only_the_lowest_integer_is_missing(form: Callable[[list[int]], Any]) -> None:
    """Its neighbours are the same float64."""
    made = workflow(Bucketize(columns=("clicks",), boundaries=(0.0,), outputs=("band",)), categorical=["band"])
    values = form([-(2**63) + 1, -(2**63), 2**62])
    for records in ({"clicks": values}, pa.table({"clicks": pa.array(values)})):
        assert made.encode(records).keys[0].tolist()[:3] == [1, 0, 2]  # type: ignore[union-attr]


def test_dense_integers_are_rounded_as_in_records() -> None:
    """By way of float64: directly this one becomes another float32."""
    made, value = workflow(Clip(columns=("cost",), low=0), dense=["user"]), 1152921573326323713
    rows = block_of(user=("integer", [value]), cost=("number", [0.0]), clicks=("integer", [1]))
    prepared = made.encode_rows(made.apply(rows)).dense
    assert prepared.tolist() == made.encode({"user": [value]}).dense.tolist() == [[float(np.float32(float(value)))]]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"price": [1.0, "x", 2.0]}, ("column 'price', row 1",)),
        ({"cost": [1.0, True, 2.0]}, ("column 'cost', row 1", "got True")),
        ({"cost": [1.0, float("inf"), 2.0]}, ("column 'cost', row 1", "got inf")),
        ({"cost": [-2.0, 0.0, 0.0]}, ("column 'cost', row 0",)),
        ({"brand": ["a", 3, "b"]}, ("column 'brand', row 1", "got 3")),
        ({"brand": ["a", "\ud800", "b"]}, ("column 'brand', row 1", "got '\\ud800'")),
        ({"model": ["a", "xyz", "b"]}, ("column 'model', row 1",)),
        ({"user": [1, 1.5, 2]}, ("column 'user', row 1", "got 1.5")),
        ({"user": [1, 2**63, 2]}, ("column 'user', row 1", "got 9223372036854775808")),
        ({"user": pa.array([1.5] * 200)}, ("column 'price'", "holds 3 values")),
        ({"tags": [["a"], 5, None]}, ("column 'tags', row 1", "got 5")),
        ({"tags": [["a"], ["b", 5], None]}, ("column 'tags', row 1", "got 5")),
        ({"price": [1.0, 2.0]}, ("column 'price'", "holds 2 values")),
        ({"colour": ["red"] * 3}, ("column 'colour'",)),
    ],
)
def test_bad_records_are_reported_with_column_and_row(change: dict[str, Any], place: tuple[str, ...]) -> None:
    raw = {name: values for name, values in RAW.items() if name != "time"}
    with pytest.raises(ConfigError, check=at(*place)):
        shop().encode({**raw, **change})


def test_a_missing_column_is_reported() -> None:
    with pytest.raises(ConfigError, check=at("column 'user'")):
        shop().encode({"price": [1.0]})


def test_a_missing_number_without_a_step_that_fills_it_is_reported() -> None:
    with pytest.raises(ConfigError, check=at("column 'price', row 1", "got nan")):
        workflow(Clip(columns=("cost",), low=0), dense=["price"]).encode({"price": [1.0, None]})
