# SPDX-License-Identifier: Apache-2.0
"""A model with dynamic tables from the command line: trained, resumed, evaluated, predicted with, inspected."""

from pathlib import Path

import pytest

from terarec.errors import NoSpaceError
from terarec.formats import read_dataset
from terarec.serve import InferenceSession
from tests.cli.conftest import Workshop, figures, rejected

SHAPE = ("--width", 4, "--bottom", "8-4", "--top", "8", "--batch-size", 128, "--tables", "dynamic")


@pytest.mark.slow
def test_a_model_of_dynamic_tables(workshop: Workshop, tmp_path: Path) -> None:
    limits = ("--set", "model.tables.max_rows=200", "--set", "model.tables.evict.kind=lru")
    trained = figures("train", "--data", workshop.data, "--out", tmp_path / "run", *SHAPE, *limits)
    resumed = figures("train", "--out", tmp_path / "run", "--resume", "--epochs", 2)
    assert resumed["steps"] == 2 * trained["steps"]
    reported = figures("inspect", tmp_path / "run")
    known = {column.name: column.rows for column in read_dataset(workshop.data).categorical}
    for table in reported["tables"]:
        assert table["kind"] == "dynamic"
        assert 0 < table["rows"] <= min(200, known[table["table"]])
        assert table["index_bytes_per_key"] > 0
        assert table["evicted"] == 0 or table["rows"] > 100
    assert any(table["evicted"] for table in reported["tables"])
    one = figures("inspect", tmp_path / "run", "--table", "C1", "--top", 3)
    values = figures("inspect", workshop.data, "--column", "C1", "--top", 10_000)["most_frequent"]
    names = {row["id"]: row["value"] for row in values}
    assert all(names[row["row"]] == row["value"] for row in one["largest"])
    evaluation = figures("evaluate", tmp_path / "run", "--data", workshop.data)
    assert evaluation["auc"] == pytest.approx(resumed["auc"])
    session = InferenceSession.open(tmp_path / "run")
    unseen = {column.name: ["ffffffff" if column.kind == "string" else 5] for column in session.inputs}
    assert 0 < session.predict(unseen)[0, 0] < 1


def test_a_table_that_gets_full_is_named(workshop: Workshop, tmp_path: Path) -> None:
    limits = ("--set", "model.tables.max_rows=5")
    typed = ["train", "--data", workshop.data, "--out", tmp_path / "run", *SHAPE, *limits]
    rejected(*typed, error=NoSpaceError, where="table 'C1'", problem="at most 5")


def test_keys_of_64_bits_are_trained_without_a_vocabulary(tmp_path: Path) -> None:
    users = [(-1) ** row * (2**62 + row % 40) for row in range(400)]
    lines = [f"{row % 40 % 2},{row % 7},{user}" for row, user in enumerate(users)]
    (tmp_path / "log.csv").write_text("\n".join(["y,x,user", *lines]))
    columns = ("--label", "y", "--dense", "x", "--keys", "user", "--valid-fraction", 0.25)
    figures("prepare", "csv", tmp_path / "log.csv", "--out", tmp_path / "data", *columns)
    train = ("train", "--data", tmp_path / "data", "--width", 4, "--bottom", "4", "--top", "4", "--batch-size", 50)
    trained = figures(*train, "--out", tmp_path / "run", "--tables", "dynamic", "--sparse-lr", 0.5, "--epochs", 8)
    assert trained["auc"] > 0.99
    (table,) = figures("inspect", tmp_path / "run")["tables"]
    assert (table["table"], table["rows"]) == ("user", 40)
    reported = figures("inspect", tmp_path / "data", "--column", "user", "--top", 3)
    assert (reported["ids_seen"], reported["cardinality"]) == (40, None)
    assert reported["most_frequent"][0]["id"] in users
    assert figures("inspect", tmp_path / "data")["embedding_rows"] == 0
    rejected(*train, "--out", tmp_path / "static", where="tables", problem="got 'static'")
    typed = ["prepare", "csv", tmp_path / "log.csv", "--out", tmp_path / "r", *columns, "--format", "raw"]
    rejected(*typed, where="--format", problem="got 'raw'")
