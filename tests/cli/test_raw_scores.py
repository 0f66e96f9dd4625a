# SPDX-License-Identifier: Apache-2.0
"""A finished run scores new and unlabelled raw files, and is evaluated on labelled ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from terarec.errors import FormatError
from terarec.serve import InferenceSession
from tests.cli.conftest import Workshop, figures, rejected, terarec

SMALL = ["--model", "wide_deep", "--width", 4, "--hidden", "8", "--batch-size", 64]


def people(path: Path, count: int, seed: int) -> dict[str, list[Any]]:
    """A CSV of people; returns its columns."""
    generator = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {
        "id": [f"p{number}" for number in range(count)],
        "age": [None if number % 9 == 0 else int(generator.integers(18, 90)) for number in range(count)],
        "city": [("Oslo", "Lagos", "", "東京")[int(generator.integers(4))] for _ in range(count)],
    }
    columns["bought"] = [int(generator.random() < 0.2 + 0.2 * (city == "Oslo")) for city in columns["city"]]
    write(path, columns)
    return columns


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    path.write_text("".join(",".join("" if one is None else str(one) for one in row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained as your-own-data.md says, with files for validation and test."""
    root = tmp_path_factory.mktemp("people")
    for number, name in enumerate(("train", "valid", "test")):
        people(root / f"{name}.csv", 300 if name == "train" else 80, number)
    options = ["--label", "bought", "--dense", "age", "--categorical", "city"]
    files = [root / "train.csv", "--valid", root / "valid.csv", "--test", root / "test.csv"]
    figures("prepare", "csv", *files, *options, "--out", root / "data")
    figures("train", "--data", root / "data", "--out", root / "run", *SMALL)
    return root


def scores(path: Path) -> np.ndarray:
    return pq.read_table(path)["score"].to_numpy()


def test_new_rows_score_as_prepared_and_as_served_ones(shop: Path, tmp_path: Path) -> None:
    figures("predict", shop / "run", "--data", shop / "data", "--split", "test", "--out", tmp_path / "data.parquet")
    reported = figures(
        "predict", shop / "run", shop / "test.csv", "--out", tmp_path / "raw.parquet", "--keep", "id,bought"
    )
    assert reported["rows"] == 80
    assert reported["bad_input"] == {}
    columns = people(tmp_path / "same.csv", 80, 2)
    served = InferenceSession.open(shop / "run").predict({name: columns[name] for name in ("age", "city")})
    table = pq.read_table(tmp_path / "raw.parquet")
    assert table.column_names == ["row", "id", "bought", "score"]
    assert table["row"].to_pylist() == list(range(80))
    assert table["id"].to_pylist() == columns["id"]
    assert table["score"].type == pa.float32()
    np.testing.assert_allclose(scores(tmp_path / "raw.parquet"), served[:, 0], atol=1e-6)
    np.testing.assert_allclose(scores(tmp_path / "raw.parquet"), scores(tmp_path / "data.parquet"), atol=1e-6)
    assert scores(tmp_path / "raw.parquet").std() > 1e-4


def test_kept_columns_of_a_data_set_have_their_raw_values(shop: Path, tmp_path: Path) -> None:
    """Finding P5: categorical columns were written as ids."""
    options = ["predict", shop / "run", "--data", shop / "data", "--split", "test", "--keep", "city"]
    figures(*options, "--out", tmp_path / "names.csv")
    figures(*options, "--out", tmp_path / "ids.parquet", "--ids")
    raw = [city or None for city in people(tmp_path / "same.csv", 80, 2)["city"]]
    read = csv.read_csv(tmp_path / "names.csv", convert_options=csv.ConvertOptions(strings_can_be_null=True))
    named = read["city"].to_pylist()
    assert [name for name, city in zip(named, raw, strict=True) if name not in (city, "(rare or unseen)")] == []
    assert len(set(named)) > 2
    assert pq.read_table(tmp_path / "ids.parquet")["city"].type == pa.int64()


@pytest.mark.parametrize("label", ["absent", "empty", "no number"])
def test_rows_without_labels(shop: Path, tmp_path: Path, label: str) -> None:
    columns = people(tmp_path / "new.csv", 50, 7)
    figures("predict", shop / "run", tmp_path / "new.csv", "--out", tmp_path / "known.parquet")
    columns["bought"] = [""] * 50 if label == "empty" else ["nobody knows"] * 50
    if label == "absent":
        del columns["bought"]
    write(tmp_path / "unlabelled.csv", columns)
    figures("predict", shop / "run", tmp_path / "unlabelled.csv", "--out", tmp_path / "unknown.parquet")
    np.testing.assert_array_equal(scores(tmp_path / "unknown.parquet"), scores(tmp_path / "known.parquet"))


def test_criteo_without_a_header_and_a_label(workshop: Workshop, tmp_path: Path) -> None:
    day = workshop.raw / "day_1.tsv"
    unlabelled = tmp_path / "unlabelled.tsv"
    unlabelled.write_text("".join(line.split("\t", 1)[1] + "\n" for line in day.read_text().splitlines()))
    for name, path in (("known", day), ("unknown", unlabelled)):
        figures("predict", workshop.run, path, "--out", tmp_path / f"{name}.parquet", "--keep", "C1")
    known, unknown = pq.read_table(tmp_path / "known.parquet"), pq.read_table(tmp_path / "unknown.parquet")
    assert known.equals(unknown)
    fields = [line.split("\t") for line in day.read_text().splitlines()]
    assert [value or "" for value in known["C1"].to_pylist()] == [line[14] for line in fields]
    # The last quarter of all rows was the split "valid".
    figures("predict", workshop.run, "--data", workshop.data, "--out", tmp_path / "data.parquet")
    np.testing.assert_allclose(scores(tmp_path / "known.parquet")[-500:], scores(tmp_path / "data.parquet"), atol=1e-6)


def test_files_without_a_header_may_lack_weights_and_metadata(tmp_path: Path) -> None:
    lines = [f"{row % 2},u{row % 4},{row / 8},{row}" for row in range(60)]
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "bare.csv").write_text("\n".join(line.split(",")[1] for line in lines) + "\n")
    (tmp_path / "unlabelled.csv").write_text("\n".join(line.split(",", 1)[1] for line in lines) + "\n")
    columns = ["--label", "y", "--categorical", "user", "--weight", "w", "--metadata", "place,user"]
    figures("prepare", "csv", tmp_path / "all.csv", "--out", tmp_path / "data", "--names", "y,user,w,place", *columns)
    shape = ["--model", "wide_deep", "--width", 2, "--hidden", 4, "--batch-size", 20, "--epochs", 1]
    figures("train", *shape, "--data", tmp_path / "data", "--out", tmp_path / "run")
    for name in ("all", "bare", "unlabelled"):
        figures("predict", tmp_path / "run", tmp_path / f"{name}.csv", "--out", tmp_path / f"{name}.parquet")
        np.testing.assert_array_equal(scores(tmp_path / f"{name}.parquet"), scores(tmp_path / "all.parquet"))
    out = tmp_path / "kept.parquet"
    figures("predict", tmp_path / "run", tmp_path / "unlabelled.csv", "--out", out, "--keep", "place,w")
    assert pq.read_table(out)["place"].to_pylist() == [str(row) for row in range(60)]


def test_the_end_of_the_name_tells_the_format(shop: Path, tmp_path: Path) -> None:
    """A name that ends in .csv is that of CSV."""
    data = ["--data", shop / "data", "--split", "test"]
    for source in ([shop / "test.csv"], data):
        tables = {}
        for suffix in ("parquet", "csv", "jsonl"):
            out = tmp_path / f"{len(source)}.{suffix}"
            figures("predict", shop / "run", *source, "--out", out)
            if suffix == "parquet":
                tables[suffix] = scores(out)
            elif suffix == "csv":
                tables[suffix] = csv.read_csv(out)["score"].to_numpy().astype(np.float32)
            else:
                lines = [json.loads(line) for line in out.read_text().splitlines()]
                tables[suffix] = np.array([line["score"] for line in lines], dtype=np.float32)
        np.testing.assert_array_equal(tables["csv"], tables["parquet"])
        np.testing.assert_array_equal(tables["jsonl"], tables["parquet"])
        typed = ["predict", shop / "run", *source, "--out", tmp_path / "scores.xlsx"]
        rejected(*typed, where="--out", problem=f"got {tmp_path / 'scores.xlsx'}")


@pytest.mark.parametrize("place", ["run", "data", "data/workflow"])
def test_labelled_new_rows_are_prepared_and_evaluated(shop: Path, tmp_path: Path, place: str) -> None:
    """--split test overrides the split that the workflow was fitted with."""
    new = tmp_path / "new.csv"
    people(new, 60, 9)
    rejected("prepare", shop / place, new, "--out", tmp_path / "new", where="--split")
    reported = figures("prepare", shop / place, new, "--split", "test", "--out", tmp_path / "new")
    assert reported["splits"] == {"test": 60}
    found = figures("evaluate", shop / "run", "--data", tmp_path / "new", "--split", "test")
    assert found["rows"] == 60
    figures("predict", shop / "run", "--data", tmp_path / "new", "--split", "test", "--out", tmp_path / "data.parquet")
    figures("predict", shop / "run", new, "--out", tmp_path / "raw.parquet")
    np.testing.assert_allclose(scores(tmp_path / "raw.parquet"), scores(tmp_path / "data.parquet"), atol=1e-6)


def test_ids_of_a_refitted_workflow_are_rejected(shop: Path, tmp_path: Path) -> None:
    options = ["--label", "bought", "--dense", "age", "--categorical", "city"]
    figures("prepare", "csv", shop / "valid.csv", shop / "test.csv", *options, "--out", tmp_path / "other")
    typed = ["evaluate", shop / "run", "--data", tmp_path / "other", "--split", "train"]
    rejected(*typed, where="data set 'other'", problem="00-categorify-city.parquet")
    path = tmp_path / "new" / "workflow" / "workflow.json"
    figures("prepare", shop / "data", shop / "test.csv", "--split", "test", "--out", tmp_path / "new")
    content = json.loads(path.read_text())
    content["workflow"]["steps"][0] |= {"columns": content["workflow"]["steps"][0]["columns"][::-1], "version": 2}
    path.write_text(json.dumps(content))
    typed = ["evaluate", shop / "run", "--data", tmp_path / "new", "--split", "test"]
    rejected(*typed, where="data set 'data'", problem="workflow.json")


def test_rows_that_cannot_be_read(shop: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text("age,city\n20,Oslo\nold,Oslo\n30,Lagos\n")
    out = tmp_path / "scores.csv"
    rejected("predict", shop / "run", new, "--out", out, error=FormatError, where=f"{new}: line 3, column 'age'")
    assert not list(tmp_path.glob("scores*"))
    reported = figures("predict", shop / "run", new, "--out", out, "--bad-input", "skip")
    assert reported["rows"] == 2
    assert sum(reported["bad_input"].values()) == 1
    assert [line.split(",")[0] for line in out.read_text().splitlines()] == ['"row"', "0", "2"]
    ended = terarec("predict", shop / "run", new, "--out", tmp_path / "again.csv", "--bad-input", "skip")
    assert f"{new}: line 3" in ended.out


@pytest.mark.parametrize(
    ("arguments", "where", "problem"),
    [
        ([], "RAW, --data", "got neither"),
        (["NEW", "--data", "DATA"], "RAW, --data", "got both"),
        (["NEW", "--split", "test"], "--split", "raw files"),
        (["--data", "DATA", "--keep", "id"], "--keep", "no column 'id'"),
        (["NEW", "--keep", "row"], "--keep", "got 'row'"),
        (["NEW", "--keep", "city,city"], "--keep", "got 'city'"),
        (["NEW", "--keep", "nosuch"], "NEW", "no column 'nosuch'"),
        (["NEW", "--bad-input", "ignore"], "--bad-input", "got 'ignore'"),
    ],
)
def test_rejections(shop: Path, tmp_path: Path, arguments: list[str], where: str, problem: str) -> None:
    places = {"NEW": str(shop / "test.csv"), "DATA": str(shop / "data")}
    words = [places.get(word, word) for word in arguments]
    predict = ["predict", shop / "run", *words, "--out", tmp_path / "out.csv"]
    rejected(*predict, where=places.get(where, where), problem=problem)
    assert not list(tmp_path.iterdir())
