# SPDX-License-Identifier: Apache-2.0
"""``terarec train`` from end to end, on small data of its own."""

from pathlib import Path

import numpy as np
import pytest

from terarec.config import load_run
from terarec.serve import InferenceSession
from tests.cli.conftest import figures, rejected, terarec

SHAPE = ["--model", "wide_deep", "--width", 2, "--hidden", "4", "--batch-size", 50]


def write_csv(path: Path, *, rows: int = 300, labels: tuple[float, ...] = (0, 1), seed: int = 0) -> Path:
    """A label that follows ``x``, a number, and a category of seven values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows)
    rank = np.argsort(np.argsort(x + rng.normal(size=rows)))
    label = np.array(labels)[rank * len(labels) // rows]
    lines = [f"{y:g},{a:.3f},c{c}" for y, a, c in zip(label, x, rng.integers(0, 7, rows), strict=True)]
    path.write_text("\n".join(["y,x,c", *lines]) + "\n")
    return path


def prepare(folder: Path, name: str = "data", **columns: object) -> Path:
    """A data set of `write_csv` with a fifth of its rows for validation."""
    raw = write_csv(folder / f"{name}.csv", **columns)
    out = folder / name
    columns_of = ["--label", "y", "--dense", "x", "--categorical", "c", "--valid-fraction", 0.2]
    figures("prepare", "csv", raw, "--out", out, *columns_of)
    return out


@pytest.mark.parametrize("labels", [(0.25, 0.75), (0.0, 0.3, 1.0)])
def test_labels_between_0_and_1_are_trained_and_evaluated(tmp_path: Path, labels: tuple[float, ...]) -> None:
    """Regression: the evaluation after the first epoch rejected them, and the run was deleted."""
    data = prepare(tmp_path, labels=labels)
    trained = figures("train", *SHAPE, "--data", data, "--out", tmp_path / "run")
    evaluated = figures("evaluate", tmp_path / "run", "--data", data)
    assert evaluated["auc"] == pytest.approx(trained["auc"])
    assert evaluated["logloss"] == pytest.approx(trained["logloss"])
    assert 0 < trained["auc"] < 1


def test_patience_stops_a_run_whose_best_checkpoint_is_used(tmp_path: Path) -> None:
    """Evaluation, prediction and export take the best checkpoint by default.

    Finding P4: the figures of the training were those of the last evaluation, whichever checkpoint is served.
    """
    data, run = prepare(tmp_path), tmp_path / "run"
    stop = ["--patience", 2, "--epochs", 9, "--set", "training.min_delta=0.9", "--monitor", "logloss/y"]
    trained = figures("train", *SHAPE, "--data", data, "--out", run, "--sparse-lr", 0.3, *stop)
    assert (trained["steps"], trained["stopped_early"]) == (15, True)
    best = trained["best_step"]
    # Nothing is an improvement of 0.9; with such a learning rate the first epoch need not be the best one.
    assert best in (5, 10, 15)
    assert trained["served_step"] == best
    for which, figures_of_step in (("best", trained), ("last", trained["last"])):
        evaluated = figures("evaluate", run, "--data", data, "--checkpoint", which)
        assert figures_of_step["auc"] == pytest.approx(evaluated["auc"])
        assert figures_of_step["logloss"] == pytest.approx(evaluated["logloss"])
    scores = tmp_path / "scores.parquet"
    for which, step in ((["--checkpoint", "best"], best), (["--checkpoint", "last"], 15), ([], best)):
        assert figures("evaluate", run, "--data", data, *which)["step"] == step
        assert figures("inspect", run, *which)["step"] == step
        assert figures("inspect", run, "--table", "c", *which)["checkpoint"].endswith(f"step-{step:08d}")
        assert figures("predict", run, "--data", data, "--out", scores, *which)["step"] == step
        scores.unlink()
        assert InferenceSession.open(run, *which[1:]).step == step
    assert figures("evaluate", run, "--data", data, "--checkpoint", 15)["step"] == 15
    for command in (["evaluate", run, "--data", data], ["inspect", run], ["serve", run, "--port", 0]):
        rejected(*command, "--checkpoint", 7, where=run / "checkpoints", problem="step 7")
    typed = ["predict", run, "--data", data, "--out", scores, "--checkpoint", "lats"]
    rejected(*typed, where="--checkpoint", problem="got 'lats' (did you mean 'last'?)")


def test_the_last_checkpoint_is_used_without_patience(tmp_path: Path) -> None:
    data = prepare(tmp_path)
    trained = figures("train", *SHAPE, "--data", data, "--out", tmp_path / "run", "--epochs", 3, "--sparse-lr", 0.5)
    assert figures("evaluate", tmp_path / "run", "--data", data)["step"] == trained["steps"] == 15
    assert trained["served_step"] == 15
    assert trained["last"] == {name: trained[name] for name in ("auc", "logloss")}


@pytest.mark.usefixtures("reports")
def test_options_of_rows_end_in_figures_and_a_report(tmp_path: Path) -> None:
    """Regression: each of them ended a finished training in a TypeError."""
    data = prepare(tmp_path)
    options = ["--sparse-optimizer", "adam", "--set", "sparse_optimizer.rows.l2=0.05"]
    trained = figures("train", *SHAPE, "--data", data, "--out", tmp_path / "run", *options)
    assert "l2 0.05" in Path(trained["report"]).read_text()


@pytest.mark.usefixtures("reports")
def test_a_failed_report_does_not_fail_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are printed, and a line says why there is no report."""
    import terarec.train.report as report

    monkeypatch.setattr(report, "draw_curves", None)
    data, run = prepare(tmp_path), tmp_path / "run"
    ended = terarec("train", *SHAPE, "--data", data, "--out", run, "--json")
    assert (ended.code, ended.figures["report"]) == (0, None)
    assert "no report: a defect in terarec: TypeError: 'NoneType' object is not callable" in ended.err
    assert not (run / "report.html").exists()


def test_a_warm_start_takes_over_the_description_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Data of the next day may have other numbers of rows; learning rates are those of the first run."""
    data, run = prepare(tmp_path), tmp_path / "run"
    first = figures("train", *SHAPE, "--data", data, "--out", run, "--epochs", 3)
    raw = write_csv(tmp_path / "day2.csv", rows=180, seed=1)
    figures("prepare", data / "workflow", raw, "--out", tmp_path / "day2")
    warm = ["train", "--init-from", run, "--data", tmp_path / "day2", "--epochs", 1, "--sparse-lr", 0.005]
    second = figures(*warm, "--out", tmp_path / "run2")
    assert (second["model"], second["steps"], second["init_from"]) == ("wide_deep", 3, first["checkpoint"])
    assert figures("evaluate", tmp_path / "run2", "--data", tmp_path / "day2", "--split", "train")["rows"] == 144
    fall = ("--schedule", "cosine", "--positive-weight", "auto", "--no-tensorboard")
    figures("train", "--init-from", run, "--data", data, "--out", tmp_path / "fall", *fall)
    again = ("train", "--init-from", tmp_path / "fall", "--data", tmp_path / "day2", "--out", tmp_path / "again")
    figures(*again, "--epochs", 5, "--no-tensorboard")
    fall_run, again_run = (load_run(tmp_path / name / "run.json") for name in ("fall", "again"))
    assert (fall_run.training.schedule.t_max, again_run.training.schedule.t_max) == (15, 15)
    assert fall_run.objective.class_weights != again_run.objective.class_weights  # of each day's labels
    fixed = (*again[:-1], tmp_path / "fixed", "--set", "training.schedule.t_max=7", "--no-tensorboard")
    figures(*fixed)
    assert load_run(tmp_path / "fixed" / "run.json").training.schedule.t_max == 7
    ended = terarec(*warm, "--out", tmp_path / "run3", "--reset-optimizer", "--dense-optimizer", "sgd")
    assert ended.code == 0
    assert "init_from: the state of dense_optimizer and sparse_optimizer was not loaded" in caplog.text
    resume = ["train", "--resume", "--out", run, "--data", tmp_path / "day2", "--epochs", 9]
    rejected(*resume, where="reader state", problem="--init-from")
    rejected(*warm, "--out", tmp_path / "run4", "--width", 3, where="--init-from", problem="got shape [4, 3]")
    other = prepare(tmp_path, "other", seed=2)
    rejected("train", "--init-from", run, "--data", other, "--out", tmp_path / "run4", where="data set 'other'")
    assert not (tmp_path / "run4").exists()
