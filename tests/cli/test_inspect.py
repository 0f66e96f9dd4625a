# SPDX-License-Identifier: Apache-2.0

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.errors import DataNotFoundError
from terarec.etl import prepare
from terarec.etl.ops import Categorify
from terarec.etl.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import LabelSpec, SourceColumn, SourceSpec
from tests.cli.conftest import Workshop, figures, rejected, terarec
from tests.formats.samples import METADATA, make_block, make_spec, write_split
from tests.train.planted import make_planted


def keys_of(workshop: Workshop, column: str) -> np.ndarray:
    shards = read_dataset(workshop.data).shards("train")
    return np.concatenate([pq.read_table(workshop.data / s.file, columns=[column])[column].to_numpy() for s in shards])


def test_a_data_set(workshop: Workshop) -> None:
    reported = figures("inspect", workshop.data)
    spec = read_dataset(workshop.data)
    assert reported["what"] == "dataset"
    assert reported["embedding_rows"] == sum(column.rows for column in spec.categorical)
    assert {split["split"]: split["rows"] for split in reported["splits"]} == {s: spec.num_rows(s) for s in spec.splits}
    assert [column["column"] for column in reported["columns"]] == list(spec.column_names)
    assert reported["bytes"] == sum(
        (workshop.data / s.file).stat().st_size for n in spec.splits for s in spec.shards(n)
    )
    by_name = {column["column"]: column for column in reported["columns"]}
    keys = keys_of(workshop, "C3")
    assert reported["sampled_rows"] == len(keys)  # a small data set has one row group
    assert by_name["C3"]["missing_share"] == pytest.approx((keys == 0).mean())
    assert by_name["C3"]["rare_share"] == pytest.approx((keys == 1).mean())


@pytest.mark.parametrize("column", ["C1", "C26"])
def test_the_most_frequent_values_of_a_column(workshop: Workshop, column: str) -> None:
    reported = figures("inspect", workshop.data, "--column", column, "--top", 5)
    ids, counts = np.unique(keys_of(workshop, column), return_counts=True)
    assert reported["ids_seen"] == len(ids)
    assert [row["count"] for row in reported["most_frequent"]] == sorted(counts.tolist(), reverse=True)[:5]
    vocabulary = pq.read_table(workshop.data / "workflow" / "states" / f"02-categorify-{column}.parquet")
    raw = [line.split("\t") for path in sorted(workshop.raw.glob("*.tsv")) for line in path.read_text().splitlines()]
    values = {fields[13 + int(column[1:])] for fields in raw}
    for row in reported["most_frequent"]:
        assert counts[ids == row["id"]] == row["count"]
        if row["id"] >= 2:
            assert row["value"] in values
            assert row["count"] == vocabulary["count"][row["id"] - 2].as_py()
        else:
            assert row["value"] == ["(missing)", "(rare or unseen)"][row["id"]]


def test_weights_and_metadata(tmp_path: Path) -> None:
    spec = make_spec(hotness=(1,), weight="w", metadata=METADATA)
    block = make_block(spec, 40)
    notes = pa.array([None if row % 5 == 0 else f"n{row % 3}" for row in range(40)], pa.large_string())
    block = dataclasses.replace(block, metadata=(*block.metadata[:2], notes))
    write_split(tmp_path, spec, block, rows_per_group=7)
    reported = figures("inspect", tmp_path)
    assert [(column["column"], column["role"]) for column in reported["columns"][-4:]] == [
        ("w", "weight"),
        *((column.name, "metadata") for column in METADATA),
    ]
    reported = figures("inspect", tmp_path, "--column", "w")
    assert (reported["minimum"], reported["maximum"], reported["mean"]) == (0, 39 / 4, pytest.approx(39 / 8))
    reported = figures("inspect", tmp_path, "--column", "note", "--top", 2)
    counts = Counter(note for note in notes.to_pylist() if note is not None)
    assert (reported["rows"], reported["missing_share"], reported["values_seen"]) == (40, 8 / 40, 3)
    expected = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:2]
    assert [(row["value"], row["count"], row["share"]) for row in reported["most_frequent"]] == [
        (value, count, count / 40) for value, count in expected
    ]
    rejected("inspect", tmp_path, "--column", "x", where="data set 'tiny'", problem="no column 'x'")


def test_empty_lists_and_their_mean_length(tmp_path: Path) -> None:
    """Finding N12: inspect told nothing of lists."""
    make_planted(tmp_path, train=400, valid=20, rows_per_group=400)
    table = pq.read_table(tmp_path / "train" / "part-00000.parquet", columns=["tags", "item"])
    lengths = np.array([len(items) for items in table["tags"].to_pylist()])
    by_name = {column["column"]: column for column in figures("inspect", tmp_path)["columns"]}
    found = by_name["tags"]
    assert 0 < found["empty_share"] == pytest.approx((lengths == 0).mean())
    assert found["mean_length"] == pytest.approx(lengths.mean())
    assert (by_name["item"]["empty_share"], by_name["item"]["mean_length"]) == (None, None)


@pytest.mark.parametrize(("given", "missing"), [(None, None), (False, 0.25)])
def test_the_missing_ids_of_data_without_a_workflow(tmp_path: Path, given: bool | None, missing: float | None) -> None:
    spec = make_spec(hotness=(1,))
    spec = dataclasses.replace(spec, categorical=(dataclasses.replace(spec.categorical[0], given=given),))
    block = dataclasses.replace(make_block(spec, 40), keys=(np.arange(40) % 4,))
    write_split(tmp_path, spec, block, rows_per_group=40)
    (column,) = (one for one in figures("inspect", tmp_path)["columns"] if one["column"] == "C0")
    assert (column["missing_share"], column["rare_share"]) == (missing, None)
    assert figures("inspect", tmp_path, "--column", "C0")["missing_share"] == missing


def test_the_deviation_of_large_numbers_that_differ_little(tmp_path: Path) -> None:
    spec = make_spec(hotness=(1,), weight="w")
    weights = (1e9 + 64 * (np.arange(40) % 3)).astype(np.float32)
    write_split(tmp_path, spec, dataclasses.replace(make_block(spec, 40), weight=weights), rows_per_group=7)
    reported = figures("inspect", tmp_path, "--column", "w")
    exact = weights.astype(np.float64)
    assert (reported["mean"], reported["deviation"]) == (
        pytest.approx(exact.mean()),
        pytest.approx(exact.std(), rel=1e-9),
    )


def test_the_numbers_of_a_column(workshop: Workshop) -> None:
    reported = figures("inspect", workshop.raw_format, "--column", "label", "--split", "valid")
    assert (reported["minimum"], reported["maximum"], reported["rows"]) == (0, 1, 1000)
    assert 0 < reported["mean"] < 1
    assert reported["deviation"] == pytest.approx(np.sqrt(reported["mean"] * (1 - reported["mean"])))


def test_a_run_and_its_checkpoint(workshop: Workshop) -> None:
    run = figures("inspect", workshop.run)
    checkpoint = figures("inspect", run["checkpoint"])
    assert (run["what"], run["model"], checkpoint["what"]) == ("run", "dlrm", "checkpoint")
    assert run["tables"] == checkpoint["tables"]
    columns = {column.name: column.rows for column in read_dataset(workshop.data).categorical}
    assert {table["table"]: table["rows"] for table in run["tables"]} == columns
    assert {table["width"] for table in run["tables"]} == {4}
    assert {table["state"] for table in run["tables"]} == {"sum"}
    assert all(table["norm_min"] <= table["norm_mean"] <= table["norm_max"] for table in run["tables"])
    assert run["embedding_parameters"] == 4 * run["embedding_rows"]
    assert run["dense_parameters"] == sum(row["parameters"] for row in run["dense"])
    assert {row["part"]: row["parameters"] for row in run["parts"]} == {
        part: sum(row["parameters"] for row in run["dense"] if row["parameter"].startswith(part))
        for part in ("bottom", "top")
    }
    assert (run["objective"], checkpoint["objective"]) == ("binary", None)


def test_a_table(workshop: Workshop) -> None:
    run = figures("inspect", workshop.run)
    of_run = next(table for table in run["tables"] if table["table"] == "C1")
    reported = figures("inspect", workshop.run, "--table", "C1", "--top", 4)
    assert figures("inspect", run["checkpoint"], "--table", "C1", "--top", 4)["largest"] == reported["largest"]
    norms = [row["norm"] for row in reported["largest"]]
    assert norms == sorted(norms, reverse=True)
    assert norms[0] == reported["norms"][-1]["norm"] == of_run["norm_max"]
    assert reported["norms"][0]["norm"] == of_run["norm_min"]
    values = figures("inspect", workshop.data, "--column", "C1", "--top", 10_000)["most_frequent"]
    known = {row["id"]: row["value"] for row in values}
    assert all(known.get(row["row"], row["value"]) == row["value"] for row in reported["largest"])


def test_rows_of_a_table_are_those_of_the_column_of_its_name(tmp_path: Path) -> None:
    """Those of another one, whose name it continues by a dot, were shown."""
    (tmp_path / "log.csv").write_text("click,user,user.age\n" + "1,ann,old\n0,bob,new\n" * 8)
    workflow = Workflow(
        [Categorify(columns=("user", "user.age"))],
        source=SourceSpec(
            format="delimited",
            delimiter=",",
            header=True,
            columns=(SourceColumn(name="click", type="number"), *map(text_column, ("user", "user.age"))),
        ),
        labels=[LabelSpec(name="click")],
        categorical=["user", "user.age"],
    )
    prepare(workflow, [tmp_path / "log.csv"], tmp_path / "data")
    short = ("--set", "training.max_steps=1", "--set", "training.eval_split=none")
    figures("train", "--model", "deepfm", "--data", tmp_path / "data", "--out", tmp_path / "run", *short)
    for table, values in (("user", {"ann", "bob"}), ("user.age", {"old", "new"})):
        shown = figures("inspect", tmp_path / "run", "--table", table)["largest"]
        assert values <= {row["value"] for row in shown}


def text_column(name: str) -> SourceColumn:
    return SourceColumn(name=name, type="text")


def test_people_see_the_same(workshop: Workshop) -> None:
    out = terarec("inspect", workshop.data, "--column", "C1", "--top", 3).out
    assert figures("inspect", workshop.data, "--column", "C1", "--top", 1)["most_frequent"][0]["value"] in out
    assert "C26" in terarec("inspect", workshop.run).out


def test_options_without_a_meaning_are_rejected(workshop: Workshop, tmp_path: Path) -> None:
    """They were ignored."""
    rejected("inspect", workshop.data, "--split", "train", where="--split", problem="without --column")
    rejected("inspect", workshop.run, "--split", "train", where="--split", problem="for a model")
    export = ("--export-table", "C1", "--out", tmp_path / "rows.parquet")
    rejected("inspect", workshop.run, *export, "--table", "C1", where="--table", problem="with --export-table")
    (tmp_path / "graph.json").write_text("{}")
    rejected("inspect", tmp_path / "graph.json", "--table", "C1", where="--table", problem="for a graph")


def test_wrong_questions_are_reported(workshop: Workshop, tmp_path: Path) -> None:
    rejected("inspect", workshop.data, "--column", "C99", where="data set 'criteo'", problem="no column 'C99'")
    checkpoint = workshop.run / "checkpoints" / "step-00000012"
    rejected("inspect", workshop.run, "--table", "C99", where=checkpoint, problem="no table 'C99'")
    rejected("inspect", workshop.data, "--table", "C1", where="--table")
    rejected("inspect", workshop.run, "--column", "C1", where="--column")
    typed = ["inspect", workshop.data, "--column", "C1", "--split", "test"]
    rejected(*typed, where="data set 'criteo'", problem="no split 'test'")
    rejected("inspect", tmp_path / "none", error=DataNotFoundError, where=tmp_path / "none")
    rejected("inspect", tmp_path, error=DataNotFoundError, where=tmp_path)
    (tmp_path / "file").write_text("")
    rejected("inspect", tmp_path / "file", error=DataNotFoundError, where=tmp_path / "file")


def test_a_table_is_exported_to_parquet(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    reported = figures("inspect", workshop.run, "--export-table", "C1", "--out", out)
    found = pq.read_table(out)
    (described,) = [table for table in figures("inspect", workshop.run)["tables"] if table["table"] == "C1"]
    assert (reported["rows"], found.num_rows) == (described["rows"], described["rows"])
    assert sorted(found["key"].to_pylist()) == list(range(described["rows"]))
    vectors = np.stack(found["vector"].to_numpy())
    assert vectors.shape == (described["rows"], described["width"])
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1)
    assert norms.max() == pytest.approx(described["norm_max"], rel=1e-6)
    assert set(found.column_names) == {"key", "vector", *described["state"].split()}
    rejected("inspect", workshop.run, "--export-table", "C1", "--out", out, where="--out", problem=f"{out} exists")
    rejected("inspect", workshop.run, "--export-table", "C1", where="--export-table", problem="--out")
    rejected(
        "inspect", workshop.run, "--export-table", "C1", "--out", out, "--to", "csv", where="--to", problem="got 'csv'"
    )
    typed = ["inspect", workshop.data, "--export-table", "C1", "--out", out]
    rejected(*typed, where="--export-table", problem=f"{workshop.data}")
    missing = tmp_path / "missing.parquet"
    rejected("inspect", workshop.run, "--export-table", "C99", "--out", missing, where="table", problem="'C99'")
    assert not missing.exists()
