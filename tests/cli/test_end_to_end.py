# SPDX-License-Identifier: Apache-2.0

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from terarec.formats import read_dataset
from tests.cli.conftest import Workshop, figures, rejected, terarec


def test_generate_reports_its_files(workshop: Workshop) -> None:
    reported = workshop.generated
    assert (reported["rows"], reported["days"], reported["seed"]) == (2000, 2, 7)
    assert 0.6 < reported["best_auc"] < 1
    assert reported["rows_per_second"] > 0
    assert sum(len(path.read_text().splitlines()) for path in workshop.raw.glob("*.tsv")) == 2000
    assert 0 < reported["positives"] < 2000


def test_prepare_reports_its_files(workshop: Workshop) -> None:
    reported = workshop.prepared
    assert reported["rows"] == 2000
    assert reported["rows_per_second"] > 0
    assert reported["peak_memory_bytes"] > 0
    spec = read_dataset(workshop.data)
    assert spec.storage == "parquet"
    assert sum(spec.num_rows(split) for split in spec.splits) == 2000


def test_the_last_day_becomes_the_valid_split(workshop: Workshop) -> None:
    spec = read_dataset(workshop.raw_format)
    assert spec.storage == "raw"
    assert (spec.num_rows("train"), spec.num_rows("valid")) == (1000, 1000)


def test_the_last_file_or_the_last_tenth_is_for_validation_by_default(workshop: Workshop, tmp_path: Path) -> None:
    days = [workshop.raw / "day_0.tsv", workshop.raw / "day_1.tsv"]
    reported = [
        figures("prepare", "criteo", *raw, "--out", tmp_path / str(len(raw)), "--rows-per-shard", 200)["splits"]
        for raw in (days, days[:1])
    ]
    assert reported == [{"train": 1000, "valid": 1000}, {"train": 900, "valid": 100}]
    assert len(read_dataset(tmp_path / "1").shards("train")) == 5


def test_train_leaves_a_whole_run(workshop: Workshop) -> None:
    reported = workshop.trained
    assert reported["model"] == "dlrm"
    assert 0 < reported["auc"] <= 1
    assert reported["highest_auc"] >= reported["auc"]
    assert reported["samples_per_second"] > 0
    assert Path(reported["checkpoint"]).is_dir()
    assert Path(reported["report"]).read_text().startswith("<!doctype html>")
    logged = [json.loads(line) for line in (workshop.run / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in point for point in logged)


def test_evaluate_finds_what_training_found(workshop: Workshop) -> None:
    reported = figures("evaluate", workshop.run, "--data", workshop.data)
    assert reported["auc"] == pytest.approx(workshop.trained["auc"], abs=1e-9)
    assert reported["logloss"] == pytest.approx(workshop.trained["logloss"], abs=1e-6)
    assert reported["rows"] == read_dataset(workshop.data).num_rows("valid")
    assert reported["split"] == "valid"


def test_predict_writes_a_score_per_sample_in_input_order(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "scores.parquet"
    reported = figures("predict", workshop.run, "--data", workshop.data, "--out", out, "--split", "train")
    scores = pq.read_table(out)
    spec = read_dataset(workshop.data)
    shards = [pq.read_table(workshop.data / shard.file, columns=["label"]) for shard in spec.shards("train")]
    labels = np.concatenate([shard["label"].to_numpy() for shard in shards])
    assert reported["rows"] == scores.num_rows == spec.num_rows("train")
    assert np.array_equal(scores["label"].to_numpy(), labels)
    assert scores["score"].to_numpy().min() > 0
    assert scores["score"].to_numpy().max() < 1
    assert [path.name for path in tmp_path.iterdir()] == ["scores.parquet"]


def test_a_run_description_trains_and_resumes(workshop: Workshop, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    model = {"kind": "wide_deep", "width": 4, "hidden": [8]}
    described = {"data": str(workshop.raw_format), "model": model, "training": {"batch_size": 250, "epochs": 2}}
    config.write_text(json.dumps(described))
    whole = figures("train", config, "--out", tmp_path / "whole")
    half = figures("train", config, "--out", tmp_path / "halves", "--set", "training.max_steps=3")
    assert (half["steps"], half["samples"]) == (3, 750)
    rejected("train", config, "--out", tmp_path / "halves", where=tmp_path / "halves", problem="--resume")
    resumed = figures("train", config, "--out", tmp_path / "halves", "--resume")
    assert resumed["steps"] == whole["steps"] == 8
    assert (resumed["auc"], resumed["logloss"], resumed["loss"]) == (whole["auc"], whole["logloss"], whole["loss"])


def test_readable_output_goes_to_stdout_without_json(workshop: Workshop) -> None:
    ended = terarec("evaluate", workshop.run, "--data", workshop.data)
    assert ended.code == 0
    assert ended.err == ""
    assert f"{figures('evaluate', workshop.run, '--data', workshop.data)['auc']:.5f}" in ended.out


def test_weights_and_ids_from_a_csv_to_its_scores(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    lines = [f"{row % 3},u{row % 5},{row // 9 % 4},{row % 2},{row / 10}" for row in range(200)]
    path.write_text("\n".join(["shop,user,hour,bought,w", *lines]) + "\n")
    columns = ["--label", "bought", "--ids", "shop", "--categorical", "user", "--dense", "hour"]
    sample_columns = ["--weight", "w", "--metadata", "user,shop"]
    figures("prepare", "csv", path, "--out", tmp_path / "data", *columns, *sample_columns)
    spec = read_dataset(tmp_path / "data")
    assert (spec.weight, [column.type for column in spec.metadata]) == ("w", ["string", "int64"])
    shape = ["--model", "wide_deep", "--width", 2, "--hidden", 4, "--batch-size", 50, "--epochs", 1]
    figures("train", *shape, "--data", tmp_path / "data", "--out", tmp_path / "run")
    reported = figures("inspect", tmp_path / "data")
    assert [column["role"] for column in reported["columns"]][-3:] == ["weight", "metadata", "metadata"]
    # Of the run's own workflow, for the rows of a later day; other metadata are in the place of those of the training.
    later = ["--split", "test", "--metadata", "hour,user", "--out", tmp_path / "later"]
    figures("prepare", tmp_path / "run", path, *later)
    scoring = ["predict", tmp_path / "run", "--data", tmp_path / "later", "--split", "test", "--out"]
    scoring.append(tmp_path / "scores.parquet")
    figures(*scoring, "--keep", "user, w,hour,shop")
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert scores.column_names == ["user", "w", "hour", "shop", "score", "bought"]
    assert scores["user"].to_pylist() == [f"u{row % 5}" for row in range(200)]
    assert scores["hour"].to_pylist() == [row // 9 % 4 for row in range(200)]
    # The values behind the ids, as later rows hold no metadata of this name.
    assert scores["shop"].to_pylist() == [str(row % 3) for row in range(200)]
    rejected(*scoring, "--force", "--keep", "usr", where="--keep", problem="did you mean 'user'?")
    taken = ["prepare", "csv", path, "--out", tmp_path / "x", *columns, "--weight", "hour"]
    rejected(*taken, where="--weight", problem="'hour'")


def test_a_csv_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    lines = [
        f"{20 + i % 50},{['red', 'green', '?'][i % 3]},{100 + i % 7},{'yes' if i % 3 == 0 else 'no'}"
        for i in range(400)
    ]
    path.write_text("\n".join(["age,colour,shop,bought", *lines]) + "\n")
    shutil.copy(path, tmp_path / "test.csv")
    columns = ["--dense", "age", "--categorical", "colour", "--ids", "shop", "--buckets", "age=4"]
    split = ["--positive", "yes", "--valid-fraction", "0.25", "--test", tmp_path / "test.csv"]
    reported = figures("prepare", "csv", path, "--out", tmp_path / "data", "--label", "bought", *columns, *split)
    spec = read_dataset(tmp_path / "data")
    assert reported["rows"] == 800
    assert spec.column_names == ("bought", "age", "colour", "shop", "age_bucket")
    assert {split: spec.num_rows(split) for split in spec.splits} == {"train": 300, "valid": 100, "test": 400}
    shape = ["--model", "wide_deep", "--width", 4, "--hidden", 8, "--batch-size", 50, "--epochs", 3, "--dense-lr", 0.05]
    trained = figures("train", *shape, "--sparse-lr", 0.1, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert trained["auc"] > 0.95
