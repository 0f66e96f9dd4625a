# SPDX-License-Identifier: Apache-2.0
"""Finding P2: tables in memory, of pandas, Polars and Arrow, are read as files with the same content."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from terarec.data import InMemorySource, Reader
from terarec.errors import ConfigError, FormatError, RunInterruptedError
from terarec.etl import fit, prepare
from terarec.etl.columns import Rows
from terarec.etl.ops import Categorify, Clip, FillMissing, HashBucket, ListSlice, NormalizeMinMax
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.formats.frames import as_table
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    LabelSpec,
    MetadataColumn,
    PrepareOptions,
    SourceColumn,
    SourceSpec,
    SplitByFraction,
)
from terarec.spec.checks import FieldError
from tests.errors import at

SHOPS = ["x", "", None, "y", "x", "x"]
TAGS = [["a", None], [], None, ["b"], ["a", "a"], ["b"]]
ROWS = pa.table(
    {
        "label": pa.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]),
        "price": pa.array([1.5, None, 2.0, 3.0, 0.5, 1.0]),
        "user": pa.array([2**60 + 1, None, -(2**63), 4, 4, 5], pa.int64()),
        "shop": pa.array(SHOPS),
        "tags": pa.array(TAGS, pa.list_(pa.string())),
        "time": pa.array([1, 2, 3, 4, 5, None], pa.int64()),
        "unused": pa.array(range(6)),
    }
)
COLUMNS = {"label": "number", "price": "number", "user": "integer", "shop": "text", "tags": "text", "time": "time"}


def workflow(**changes: Any) -> Workflow:
    columns = tuple(
        SourceColumn(name=name, type=kind, separator="|" if name == "tags" else None)  # type: ignore[arg-type]
        for name, kind in COLUMNS.items()
    )
    steps = [
        FillMissing(columns=("price",), value=0.0),
        FillMissing(columns=("time",), value=0),
        Clip(columns=("time",), low=0, high=3),
        NormalizeMinMax(columns=("time",)),
        HashBucket(columns=("user",), buckets=100),
        ListSlice(columns=("tags",), stop=2),
        Categorify(columns=("shop", "tags")),
    ]
    return Workflow(
        steps,
        source=SourceSpec(format="parquet", columns=columns),
        split=SplitByFraction(valid=0.2),
        labels=[LabelSpec(name="label")],
        dense=["price", "time"],
        categorical=["user", "shop", "tags"],
        name="shop",
        **changes,
    )


def pandas_frame(table: pa.Table) -> pd.DataFrame:
    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    return frame.set_index(pd.Index(range(100, 100 + len(frame)), name="shop_id"))


class OnlyArray:
    """An object with the interface of one piece alone."""

    def __init__(self, table: pa.Table) -> None:
        self._batch = table.combine_chunks().to_batches()[0]

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self._batch.__arrow_c_array__(requested_schema)  # type: ignore[no-any-return]


LISTS_BY_NUMBER = pa.DictionaryArray.from_arrays(pa.array([0] * 6, pa.int8()), pa.array([["x"]]))
FRAMES: dict[str, Callable[[pa.Table], Any]] = {
    "arrow": lambda table: table,
    "chunks": lambda table: pa.concat_tables([table.slice(0, 2), table.slice(2)]),
    "empty chunk": lambda table: table.set_column(0, "label", pa.chunked_array([[1.0, 0.0], [], [1.0, 0.0, 1.0, 0.0]])),
    "batch": lambda table: table.combine_chunks().to_batches()[0],
    "reader": lambda table: table.to_reader(),
    "array": OnlyArray,
    "pandas": pandas_frame,
    "polars": pl.from_arrow,
}


def data_files(directory: Path) -> dict[str, bytes]:
    """The files of a data set but those with its path and its times."""
    files = (path for path in directory.rglob("*") if path.is_file())
    kept = (path for path in files if not path.name.startswith(("_file_list", "report")))
    return {str(path.relative_to(directory)): path.read_bytes() for path in kept}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("frames")
    pq.write_table(ROWS, root / "rows.parquet")
    prepare(workflow(), [root / "rows.parquet"], root / "data")
    return root


@pytest.mark.parametrize("kind", FRAMES)
def test_a_table_is_prepared_as_a_file(prepared: Path, tmp_path: Path, kind: str) -> None:
    prepare(workflow(), FRAMES[kind](ROWS), tmp_path / "data")
    assert data_files(tmp_path / "data") == data_files(prepared / "data")


@pytest.mark.parametrize("kind", FRAMES)
def test_records_and_rows_of_a_table(prepared: Path, kind: str) -> None:
    fitted = Workflow.load(prepared / "data" / "workflow")
    columns = {name: ROWS[name].to_pylist() for name in fitted.record_columns}
    expected, encoded = fitted.encode(columns), fitted.encode(FRAMES[kind](ROWS))
    assert np.array_equal(encoded.dense, expected.dense)
    for keys, wanted in zip(encoded.keys, expected.keys, strict=True):
        assert np.array_equal(np.concatenate(keys, axis=None), np.concatenate(wanted, axis=None))
    rows = fitted.apply(FRAMES[kind](ROWS))
    assert isinstance(rows, Rows)
    assert np.array_equal(fitted.encode_rows(rows).dense, expected.dense)


def test_fitted_states_of_a_table(prepared: Path) -> None:
    fitted = fit(workflow(), pl.from_arrow(ROWS))
    assert fitted.dataset_spec() == Workflow.load(prepared / "data" / "workflow").dataset_spec()


VALUES = {
    "categorical": ("shop", ROWS["shop"].cast(pa.dictionary(pa.int8(), pa.string()))),
    "large_string": ("shop", ROWS["shop"].cast(pa.large_string())),
    "string_view": ("shop", ROWS["shop"].cast(pa.string_view())),
    "decimal": ("price", ROWS["price"].cast(pa.decimal128(20, 2))),
    "time zone": ("time", ROWS["time"].cast(pa.timestamp("s")).cast(pa.timestamp("ns", "Asia/Tokyo"))),
    "list view": ("tags", pa.array(TAGS, pa.list_view(pa.string()))),
    "categories of Polars": ("shop", pa.table(pl.DataFrame({"a": pl.Series(SHOPS, dtype=pl.Categorical)}))["a"]),
    "enumeration of Polars": (
        "shop",
        pa.table(pl.DataFrame({"a": pl.Series(SHOPS, dtype=pl.Enum(["y", "x", ""]))}))["a"],
    ),
    "lists of categories": (
        "tags",
        pa.table(pl.DataFrame({"a": pl.Series(TAGS, dtype=pl.List(pl.Categorical))}))["a"],
    ),
    "runs": ("shop", pc.run_end_encode(ROWS["shop"].combine_chunks())),
    "floats": ("time", ROWS["time"].cast(pa.float64())),
    "large list": ("tags", ROWS["tags"].cast(pa.large_list(pa.large_string()))),
}


@pytest.mark.parametrize("name", VALUES)
def test_other_types_of_the_same_values(prepared: Path, tmp_path: Path, name: str) -> None:
    column, values = VALUES[name]
    table = ROWS.set_column(ROWS.column_names.index(column), column, values)
    prepare(workflow(), table, tmp_path / "data")
    assert data_files(tmp_path / "data") == data_files(prepared / "data")
    fitted = Workflow.load(prepared / "data" / "workflow")
    assert np.array_equal(fitted.encode(table).dense, fitted.encode(ROWS).dense)


@pytest.mark.parametrize(
    ("sources", "where"),
    [
        (5, "sources"),
        ([ROWS], "sources"),
        ({"label": [1]}, "sources"),
        (pl.from_arrow(ROWS).lazy(), "sources"),  # type: ignore[union-attr]
        (pl.Series([1, 2]), "sources"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "sources"),
        (pd.DataFrame({"a": [1, "x", 2.5]}), "sources"),
        (pa.table([[1], [2]], names=["a", "a"]), "sources"),
        (ROWS.drop_columns("price"), "the table"),
        (ROWS.slice(0, 0), "the table"),
        (ROWS.set_column(1, "price", pa.array([{"a": 1}] * 6)), "the table, column 'price'"),
        (ROWS.set_column(3, "shop", pa.array([b"x"] * 6)), "the table, column 'shop'"),
        (ROWS.set_column(3, "shop", LISTS_BY_NUMBER), "the table, column 'shop'"),
        (ROWS.set_column(4, "tags", pa.array([[["x"]]] * 6)), "the table, column 'tags'"),
        (ROWS.set_column(4, "tags", pa.array([[{"a": "x"}]] * 6)), "the table, column 'tags'"),
        (
            ROWS.set_column(5, "time", pa.array([1, 2, 10**13] * 2, pa.timestamp("s"))),
            "the table: row 3, column 'time'",
        ),
        (ROWS.set_column(5, "time", pa.array([1, 2, 1.5] * 2)), "the table: row 3, column 'time'"),
        (ROWS.set_column(5, "time", pa.array([1, 2, 1e13] * 2)), "the table: row 3, column 'time'"),
        (ROWS.set_column(1, "price", pa.array([1, 2, 3, 4, np.inf, 6.0])), "the table: row 5, column 'price'"),
    ],
)
def test_what_is_no_table_of_the_workflow(tmp_path: Path, sources: Any, where: str) -> None:
    with pytest.raises((ConfigError, FormatError), check=at(where)):
        prepare(workflow(), sources, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_records_that_are_rejected(prepared: Path) -> None:
    fitted = Workflow.load(prepared / "data" / "workflow")
    with pytest.raises(ConfigError, check=at("column 'price', row 4")):
        fitted.encode(ROWS.set_column(1, "price", pa.array([1, 2, 3, 4, np.inf, 6.0])))
    with pytest.raises(ConfigError, check=at("column 'price'")):
        fitted.encode(ROWS.drop_columns("price"))
    with pytest.raises(ConfigError, check=at("columns")):
        fitted.encode(5)  # type: ignore[arg-type]


def test_an_index_is_left_out_and_names_become_texts() -> None:
    frame = pd.DataFrame({0: [1], "b": [2]}, index=pd.MultiIndex.from_tuples([(1, 2)], names=["i", "j"]))
    assert as_table(frame, "frame").column_names == ["0", "b"]
    # In a table that pandas has written the index is a column, as in its file.
    table = pa.Table.from_pandas(pd.DataFrame({"b": [2]}, index=pd.Index(["x"], name="user")))
    assert as_table(table, "table").column_names == ["b", "user"]
    assert as_table(pl.from_arrow(table), "table").column_names == ["b", "user"]


def test_a_killed_preparation_continues_with_the_same_table_alone(tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.phase == "write":
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, RunInterruptedError)):
        prepare(workflow(), pl.from_arrow(ROWS), tmp_path / "data", progress=stop)
    with pytest.raises(ConfigError):
        prepare(workflow(), ROWS.slice(1), tmp_path / "data")
    assert prepare(workflow(), pl.from_arrow(ROWS), tmp_path / "data").rows == 6


def test_a_cluster_takes_no_table(tmp_path: Path) -> None:
    with pytest.raises(FieldError):
        prepare(workflow(), ROWS, tmp_path / "data", PrepareOptions(engine="spark"))


def test_a_reader_of_a_table(prepared: Path) -> None:
    spec = read_dataset(prepared / "data")
    shards = pa.concat_tables(pq.read_table(path) for path in sorted((prepared / "data" / "train").glob("*.parquet")))
    (expected,) = Reader(prepared / "data", batch_size=9)
    (batch,) = Reader(InMemorySource.of_table(spec, pl.from_arrow(shards)), batch_size=9)
    assert batch.dense.equal(expected.dense)
    assert batch.sparse.keys.equal(expected.sparse.keys)
    assert batch.sparse.offsets.equal(expected.sparse.offsets)
    with pytest.raises(ConfigError, check=at("dataset")):
        Reader(shards, batch_size=9)
    with pytest.raises(FormatError, check=at("the table, column 'price'")):
        InMemorySource.of_table(spec, shards.drop_columns("price"))
    for kind in (pa.int64(), pa.decimal128(19)):  # by way of float64, as preparation rounds them
        prices = pa.array([2**60 + 2**36 + 1] * shards.num_rows, pa.int64()).cast(kind)
        rounded = shards.set_column(shards.column_names.index("price"), "price", prices)
        (made,) = Reader(InMemorySource.of_table(spec, rounded), batch_size=9)
        place = [column.name for column in spec.dense].index("price")
        assert made.dense[:, place].tolist() == [float(np.float32(np.float64(2**60 + 2**36 + 1)))] * shards.num_rows
    for value in (1e39, math.nan):  # which no preparation writes either
        prices = pa.array([*[1.0] * (shards.num_rows - 1), value])
        wrong = shards.set_column(shards.column_names.index("price"), "price", prices)
        with pytest.raises(FormatError, check=at(f"the table, row {shards.num_rows - 1}, column 'price'")):
            InMemorySource.of_table(spec, wrong)


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("listed", [False, True])
def test_keys_that_floats_hold_only_rounded_are_rejected(kind: pa.DataType, listed: bool) -> None:
    """Finding N2: two ids would be one."""
    bound = {16: 2**11, 32: 2**24, 64: 2**53}[kind.bit_width]
    column = CategoricalColumn(name="k", rows=None, hotness=2 if listed else 1)
    spec = DatasetSpec(
        name="d", storage="parquet", labels=(LabelColumn(name="y"),), dense=(), categorical=(column,), workflow=None
    )

    def table(keys: list[float]) -> pa.Table:
        array = pa.array(np.array(keys).astype(kind.to_pandas_dtype()), kind)
        if listed:
            array = pa.LargeListArray.from_arrays([0, 2, 3], array)
        return pa.table({"y": [0.0, 1.0], "k": array[: 2 if listed else None]})

    for keys in ([bound, 1, 2], [1, 2, -bound], [1.5, 2, 3]):
        wrong = table(keys if listed else keys[::2])
        with pytest.raises(
            FormatError, check=at("the table, column 'k'", f"is not an integer below 2^{int(np.log2(bound))}")
        ):
            InMemorySource.of_table(spec, wrong)
    right = [bound - 1, 1, 2] if listed else [bound - 1, 1]
    (batch,) = Reader(InMemorySource.of_table(spec, table(right)), batch_size=9)
    assert batch.sparse.keys.tolist() == right


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("k", ["007", "8"]),
        ("k", [["007"], ["8"]]),
        ("k", pa.array([7, 8], pa.timestamp("s"))),
        ("k", pa.array(["7", "8"]).dictionary_encode()),
        ("x", ["1.5", "2"]),
        ("y", ["0", "1"]),
        ("m", ["1", "2"]),
        ("t", [1, 2]),
    ],
)
def test_texts_are_no_numbers(name: str, values: list[Any] | pa.Array) -> None:
    """Finding Q: "007" in memory was the id 7, and in a file an error."""
    listed = name == "k" and isinstance(values[0], list)
    spec = DatasetSpec(
        name="d",
        storage="parquet",
        labels=(LabelColumn(name="y"),),
        dense=(DenseColumn(name="x"),),
        categorical=(CategoricalColumn(name="k", rows=None, hotness=2 if listed else 1),),
        metadata=(MetadataColumn(name="m", type="int64"), MetadataColumn(name="t", type="string")),
        workflow=None,
    )
    right = {"y": [0, 1], "x": [1, 2], "k": [[7], [8]] if listed else [7, 8], "m": [1, 2], "t": ["a", "b"]}
    InMemorySource.of_table(spec, pa.table(right))
    with pytest.raises(FormatError, check=at(f"the table, column '{name}'", "type is")):
        InMemorySource.of_table(spec, pa.table({**right, name: values}))


def test_a_query_of_polars_is_no_table(tmp_path: Path) -> None:
    """Finding Q: it was taken for a path, or for a data set."""
    query = pl.from_arrow(ROWS).lazy()  # type: ignore[union-attr]
    made = fit(workflow(), ROWS)
    for call in (
        lambda: prepare(workflow(), query, tmp_path / "data"),
        lambda: made.apply(query),
        lambda: made.encode(query),
        lambda: Reader(query, batch_size=1),  # type: ignore[arg-type]
        lambda: InMemorySource.of_table(made.dataset_spec(), query),
    ):
        with pytest.raises(ConfigError, match=r"collect\(\)"):
            call()
