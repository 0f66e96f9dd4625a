# SPDX-License-Identifier: Apache-2.0
"""``terarec train --seeds``: the same run with several seeds."""

import json
import statistics
from pathlib import Path

import pytest

from tests.cli.conftest import figures, rejected
from tests.cli.test_train import SHAPE, prepare


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("seeds"))


@pytest.mark.slow
@pytest.mark.usefixtures("reports")
def test_the_figures_are_the_mean_and_the_deviation_of_single_runs(data: Path, tmp_path: Path) -> None:
    options = [*SHAPE, "--data", data, "--sparse-lr", 0.1, "--metrics", "auc,logloss,accuracy"]
    found = figures("train", *options, "--out", tmp_path / "all", "--seed", 3, "--seeds", 2)
    single = [figures("train", *options, "--out", tmp_path / f"{seed}", "--seed", seed) for seed in (3, 4)]
    assert [run["seed"] for run in found["runs"]] == [3, 4]
    for name in ("auc", "logloss", "accuracy"):
        values = [run[name] for run in single]
        assert [run[name] for run in found["runs"]] == pytest.approx(values)
        assert found[name] == pytest.approx(statistics.fmean(values))
        assert found[f"{name}_deviation"] == pytest.approx(statistics.stdev(values))
    written = json.loads((tmp_path / "all" / "seeds.json").read_text())
    assert written["runs"] == found["runs"]
    assert all((tmp_path / "all" / f"seed-{seed}" / "report.html").is_file() for seed in (3, 4))


@pytest.mark.slow
def test_an_interrupted_seed_resumes_and_finished_ones_are_kept(data: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    options = ["--epochs", 2, "--set", "training.patience=5"]
    expected = figures("train", *SHAPE, "--data", data, "--out", whole, "--seeds", 2, *options)
    first = figures("train", *SHAPE, "--data", data, "--out", out, "--seeds", 1, *options)
    kept = (out / "seed-0" / "metrics.jsonl").read_bytes()
    # The second seed has stopped after its first epoch, with a checkpoint and no result.
    figures("train", *SHAPE, "--data", data, "--out", out / "seed-1", "--seed", 1, "--set", "training.patience=5")
    found = figures("train", "--resume", "--out", out, "--seeds", 2, *options)
    assert found["runs"][0] == first["runs"][0]
    assert (out / "seed-0" / "metrics.jsonl").read_bytes() == kept
    assert [run["auc"] for run in found["runs"]] == [run["auc"] for run in expected["runs"]]
    assert [run["steps"] for run in found["runs"]] == [10, 10]
    longer = figures("train", "--resume", "--out", out, "--seeds", 2, "--epochs", 3)
    assert [run["steps"] for run in longer["runs"]] == [15, 15]


def test_what_seeds_cannot_do_is_rejected(data: Path, tmp_path: Path) -> None:
    options = ["train", *SHAPE, "--data", data, "--out", tmp_path / "run"]
    rejected(
        *options, "--seeds", 2, "--set", "training.eval_split=none", where="--seeds", problem="training.eval_split"
    )
    rejected(
        *options, "--seeds", 2, "--set", "training.eval_split=tset", where="data set 'data'", problem="no split 'tset'"
    )
    rejected(*options, "--seeds", 2, "--share-device", where="--share-device", problem="no meaning with --seeds")
    assert not (tmp_path / "run").exists()
    figures(*options)
    rejected(*options, "--seeds", 2, where=tmp_path / "run")


@pytest.mark.slow
def test_curves_are_logged_where_the_packages_are(data: Path, tmp_path: Path) -> None:
    """TensorBoard by default, MLflow where a place is named; each seed has its own."""
    options = ["train", *SHAPE, "--data", data]
    figures(*options, "--out", tmp_path / "without", "--no-tensorboard")
    assert not (tmp_path / "without" / "tensorboard").exists()
    pytest.importorskip("tensorboard", reason="the extra tensorboard is absent")
    pytest.importorskip("mlflow", reason="the extra mlflow is absent")
    figures(*options, "--out", tmp_path / "run", "--seeds", 2, "--mlflow", tmp_path / "mlruns")
    assert [len(list((tmp_path / "run" / f"seed-{seed}" / "tensorboard").iterdir())) for seed in (0, 1)] == [1, 1]
    names = {path.read_text() for path in (tmp_path / "mlruns").rglob("mlflow.runName")}
    assert names == {"run/seed-0", "run/seed-1"}
