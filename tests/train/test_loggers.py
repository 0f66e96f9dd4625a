"""Loggers of other programs, with these programs."""

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from terarec.errors import ConfigError, MissingDependencyError
from terarec.spec import ExponentialSchedule, RunSpec
from terarec.train import Callback, build, loggers
from terarec.train.loggers import MLflowLogger, TensorBoardLogger, has_tensorboard
from tests.train.small_run import changed

needs_tensorboard = pytest.mark.skipif(not has_tensorboard(), reason="tensorboard, the extra of its name, is absent")


@pytest.fixture
def scheduled(spec: RunSpec) -> RunSpec:
    """Eight steps an epoch, rates that halve after each epoch."""
    return changed(spec, schedule=ExponentialSchedule(gamma=0.5), metrics=("auc", "recall@5"), group="user")


def logged(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and evaluation lines."""
    points = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [point for point in points if "loss" in point], [point for point in points if "split" in point]


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory)).Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


@needs_tensorboard
def test_tensorboard_shows_the_curves_of_the_log(scheduled: RunSpec, tmp_path: Path) -> None:
    board = tmp_path / "run" / "tensorboard"
    build(changed(scheduled, max_steps=11), tmp_path / "run", callbacks=[TensorBoardLogger(board, "valid")]).fit()
    build(scheduled, tmp_path / "run", callbacks=[TensorBoardLogger(board, "valid")]).fit(resume=True)
    training, evaluations = logged(tmp_path / "run")
    found = events(board)
    for name, curve in (("loss", "train/loss"), ("lr", "lr/layers"), ("rows_lr", "lr/tables")):
        assert found[curve] == [(point["step"], pytest.approx(point[name])) for point in training]
    assert [step for step, _ in found["lr/layers"]] == [10, 11, 16]
    assert found["lr/layers"][-1][1] < found["lr/layers"][0][1]
    assert found["valid/auc"] == [(point["step"], pytest.approx(point["auc"])) for point in evaluations]
    assert "valid/recall@5" in found


@needs_tensorboard
def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert not has_tensorboard()
    with pytest.raises(MissingDependencyError, match=r"terarec\[tensorboard\]"):
        TensorBoardLogger(tmp_path, "valid")
    with pytest.raises(MissingDependencyError, match=r"terarec\[mlflow\]"):
        MLflowLogger("file:///nowhere", RunSpec(data="d"), "run")


@pytest.fixture
def store(tmp_path: Path) -> str:
    pytest.importorskip("mlflow", reason="mlflow-skinny, the extra mlflow, is absent")
    return (tmp_path / "store").as_uri()


def only_run(store: str) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("terarec").experiment_id])
    return client, run


def test_mlflow_has_the_settings_and_the_curves(scheduled: RunSpec, store: str, tmp_path: Path) -> None:
    build(scheduled, tmp_path / "run", callbacks=[MLflowLogger(store, scheduled, "small")]).fit()
    client, run = only_run(store)
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params["model.kind"] == "dlrm"
    assert run.data.params["training.batch_size"] == "128"
    assert "device" in run.data.tags
    training, evaluations = logged(tmp_path / "run")
    for name, points in (("train/loss", training), ("valid/auc", evaluations)):
        history = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        key = name.split("/")[1]
        assert history == [(point["step"], pytest.approx(point[key])) for point in points]
    assert client.get_metric_history(run.info.run_id, "valid/recall_at_5")


def test_a_training_that_fails_is_failed_there(spec: RunSpec, store: str, tmp_path: Path) -> None:
    class Fault(Callback):
        def on_epoch_end(self, trainer: object) -> None:
            raise ValueError("a fault")

    with pytest.raises(ValueError, match="a fault"):
        build(spec, tmp_path / "run", callbacks=[MLflowLogger(store, spec, "small"), Fault()]).fit()
    assert only_run(store)[1].info.status == "FAILED"


def test_a_store_that_goes_away_does_not_end_the_training(
    spec: RunSpec, store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Removal(Callback):
        def on_epoch_end(self, trainer: object) -> None:
            shutil.rmtree(tmp_path / "store", ignore_errors=True)

    report = build(spec, tmp_path / "run", callbacks=[MLflowLogger(store, spec, "small"), Removal()]).fit()
    assert report.steps == 16
    told = [record for record in caplog.records if record.name == loggers.__name__]
    assert [record.levelno for record in told] == [logging.WARNING]


def test_a_store_that_is_not_there_is_refused_before_the_first_step(spec: RunSpec, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny, the extra mlflow, is absent")
    (tmp_path / "file").write_text("no store")
    with pytest.raises(ConfigError, match="mlflow: "):
        build(spec, tmp_path / "run", callbacks=[MLflowLogger(str(tmp_path / "file"), spec, "small")]).fit()
    assert not (tmp_path / "run").exists()
