# SPDX-License-Identifier: Apache-2.0
"""Sample weights and metadata on their way from raw logs to a data set."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import ConfigError, FormatError
from terarec.etl import prepare
from terarec.etl.ops import Categorify, Explode, History, KeepRows, Normalize, Rename
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import LabelSpec, MetadataColumn, PrepareOptions, SourceColumn, SourceSpec, SplitByHash, WorkflowSpec
from tests.errors import at
from tests.etl.engine.contents import contents
from tests.etl.engine.test_prepare import equal, read_split

SOURCE = SourceSpec(
    format="delimited",
    header=True,
    trim=True,
    columns=(
        SourceColumn(name="bought", type="integer"),
        SourceColumn(name="user", type="text"),
        SourceColumn(name="item", type="integer"),
        SourceColumn(name="price", type="number"),
        SourceColumn(name="day", type="time", format="%Y-%m-%d"),
        SourceColumn(name="w", type="number"),
    ),
)
SPEC = WorkflowSpec(
    name="shop",
    source=SOURCE,
    steps=(
        KeepRows(column="day", at_most=6.0 * 86_400),
        History(columns=("item",), outputs=("past",), group="user", order="day", max_length=3),
        Categorify(columns=("user", "past", "item")),
        Normalize(columns=("price",)),
        Rename(names={"price": "cost"}),
    ),
    labels=(LabelSpec(name="bought"),),
    dense=("cost",),
    categorical=("user", "item", "past"),
    weight="w",
    metadata=("user", "price", "day", "item"),
)
DAY = 86_400


def rows_of_log(count: int = 300) -> list[dict[str, object]]:
    """What the log holds; None where a value is missing. The weight of a row tells it from all others."""
    return [
        {
            "bought": row % 2,
            "user": None if row % 11 == 0 else f"\u00fc{row % 7}",
            "item": None if row % 13 == 0 else row % 5 - 2**60 * (row % 5 == 4),
            "price": row / 8,
            "day": row % 9 * DAY,
            "w": row / 4,
        }
        for row in range(count)
    ]


def write_log(path: Path, rows: list[dict[str, object]]) -> Path:
    lines = [",".join(rows[0])]
    for row in rows:
        day = np.datetime64(int(str(row["day"])), "s").astype("datetime64[D]")
        lines.append(",".join("" if value is None else str(value) for value in {**row, "day": day}.values()))
    path.write_text("\n".join(lines) + "\n")
    return path


def comma(spec: WorkflowSpec) -> WorkflowSpec:
    return dataclasses.replace(spec, source=dataclasses.replace(spec.source, delimiter=","))


@pytest.mark.parametrize("shuffle", [False, True])
def test_values_reach_the_data_set_as_they_were_read_beside_their_rows(tmp_path: Path, shuffle: bool) -> None:
    rows = rows_of_log()
    log = write_log(tmp_path / "log.csv", rows)
    spec = dataclasses.replace(comma(SPEC), split=SplitByHash(valid=0.3, seed=3))
    options = PrepareOptions(shuffle=shuffle, rows_per_shard=64, threads=2)
    report = prepare(Workflow.of(spec), [log], tmp_path / "out", options)
    made = read_dataset(tmp_path / "out")
    assert made.weight == "w"
    assert made.metadata == tuple(
        MetadataColumn(name=name, type=kind)  # type: ignore[arg-type]
        for name, kind in (("user", "string"), ("price", "float64"), ("day", "int64"), ("item", "int64"))
    )
    shard = pq.read_schema(tmp_path / "out" / made.splits["train"][0].file)
    assert shard.names[-5:] == ["w", "metadata.user", "price", "day", "metadata.item"]
    expected = {row["w"]: row for row in rows if row["day"] <= 6 * DAY}
    seen: list[float] = []
    for split in ("train", "valid"):
        block = read_split(tmp_path / "out", split)
        assert block.weight is not None
        assert (block.weight.tolist() == sorted(block.weight.tolist())) is not (shuffle and split == "train")
        found = zip(*(array.to_pylist() for array in block.metadata), strict=True)
        for weight, label, values in zip(block.weight.tolist(), block.label[:, 0], found, strict=True):
            row = expected[weight]
            assert values == (row["user"], row["price"], row["day"], row["item"])
            assert label == row["bought"]
            seen.append(weight)
    assert sorted(seen) == sorted(expected)
    roles = [(column.name, column.role) for column in report.columns]
    assert roles[-5:] == [("w", "weight"), *((name, "metadata") for name in SPEC.metadata)]


def test_what_models_read_does_not_depend_on_weights_and_metadata(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", rows_of_log())
    bare = dataclasses.replace(comma(SPEC), weight=None, metadata=())
    for name, spec in (("with", comma(SPEC)), ("bare", bare)):
        prepare(Workflow.of(spec), [log], tmp_path / name, PrepareOptions(threads=1))
    one, other = (read_split(tmp_path / name, "train") for name in ("with", "bare"))
    equal(one, other)
    fitted = [Workflow.load(tmp_path / name / "workflow") for name in ("with", "bare")]
    assert fitted[0].record_columns == fitted[1].record_columns
    assert not {"w", "day"} & set(fitted[0].record_columns)
    states = [contents(tmp_path / name / "workflow" / "states") for name in ("with", "bare")]
    assert states[0] == states[1]


def test_items_of_an_exploded_row_share_its_weight_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    shown = ({"u": f"u{row}", "shown": [row, row + 1], "y": [0, 1], "w": row} for row in range(5))
    path.write_text("".join(json.dumps(row) + "\n" for row in shown))
    spec = WorkflowSpec(
        name="shown",
        source=SourceSpec(
            format="json_lines",
            columns=(
                SourceColumn(name="u", type="text"),
                SourceColumn(name="shown", type="integer", separator=" "),
                SourceColumn(name="y", type="integer", separator=" "),
                SourceColumn(name="w", type="integer"),
            ),
        ),
        steps=(Explode(columns=("shown", "y")),),
        labels=(LabelSpec(name="y"),),
        keys=("shown",),
        weight="w",
        metadata=("u",),
    )
    prepare(Workflow.of(spec), [path], tmp_path / "out", PrepareOptions(threads=1))
    block = read_split(tmp_path / "out", "train")
    assert block.metadata[0].to_pylist() == [f"u{row // 2}" for row in range(10)]
    assert block.weight is not None
    assert block.weight.tolist() == [row // 2 for row in range(10)]


@pytest.mark.parametrize("bad", ["-1", "-1e-30", "inf", "nan", "", "1e39"])
def test_weights_that_are_none_are_reported_with_their_line(tmp_path: Path, bad: str) -> None:
    log = write_log(tmp_path / "log.csv", rows_of_log(20))
    lines = log.read_text().splitlines()
    lines[6] = ",".join([*lines[6].split(",")[:-1], bad])
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(FormatError, check=at(f"{log}: line 7, column 'w'")):
        prepare(Workflow.of(comma(SPEC)), [log], tmp_path / "out", PrepareOptions(threads=1))
    skipping = PrepareOptions(threads=1, bad_input="skip")
    report = prepare(Workflow.of(comma(SPEC)), [log], tmp_path / "out", skipping)
    assert sum(report.bad_input.counts.values()) == 1
    assert report.rows == 20 - 4 - 1  # days that are left out, and the bad line


def test_a_weight_may_be_made_by_a_step_that_learns(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", rows_of_log(20))
    spec = dataclasses.replace(comma(SPEC), weight="cost", dense=())
    with pytest.raises(FormatError, check=at(f"{log}: line 2, column 'cost'", "got -1.5113")):
        prepare(Workflow.of(spec), [log], tmp_path / "out", PrepareOptions(threads=1))


STORAGES = {
    "raw": ("metadata", "got 'raw', which holds no metadata ('user', 'price', 'day', 'item')"),
    "norm": ("weight", "got 'norm', which holds no weights ('w')"),
    "hugectr_parquet": ("metadata", "got 'hugectr_parquet', which holds no metadata"),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_storages_that_cannot_hold_them(tmp_path: Path, storage: str) -> None:
    log = write_log(tmp_path / "log.csv", rows_of_log(20))
    kept, problem = STORAGES[storage]
    spec = comma(SPEC)
    spec = dataclasses.replace(spec, metadata=()) if kept == "weight" else dataclasses.replace(spec, weight=None)
    with pytest.raises(ConfigError, check=at("storage", problem)):
        prepare(Workflow.of(spec), [log], tmp_path / "out", PrepareOptions(storage=storage))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_raw_shards_hold_weights(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", rows_of_log(20))
    spec = dataclasses.replace(comma(SPEC), metadata=(), categorical=("user", "item"))
    prepare(Workflow.of(spec), [log], tmp_path / "out", PrepareOptions(storage="raw", threads=1))
    block = read_split(tmp_path / "out", "train")
    assert block.weight is not None
    assert block.weight.tolist() == [row["w"] for row in rows_of_log(20) if row["day"] <= 6 * DAY]


def test_parquet_sources_of_other_types(tmp_path: Path) -> None:
    user, number = pa.array(["a", None]).dictionary_encode(), pa.array([3, None], pa.int32())
    table = pa.table({"y": [0, 1], "user": user, "n": number, "w": [1, 2]})
    pq.write_table(table, tmp_path / "log.parquet")
    types = {"y": "number", "user": "text", "n": "integer", "w": "integer"}
    spec = WorkflowSpec(
        name="table",
        source=SourceSpec(
            format="parquet",
            columns=tuple(SourceColumn(name=name, type=kind) for name, kind in types.items()),  # type: ignore[arg-type]
        ),
        labels=(LabelSpec(name="y"),),
        keys=("n",),
        weight="w",
        metadata=("user", "n", "y"),
    )
    prepare(Workflow.of(spec), [tmp_path / "log.parquet"], tmp_path / "out", PrepareOptions(threads=1))
    block = read_split(tmp_path / "out", "train")
    assert [array.to_pylist() for array in block.metadata] == [["a", None], [3, None], [0.0, 1.0]]
