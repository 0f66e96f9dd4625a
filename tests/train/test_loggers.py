# SPDX-License-Identifier: Apache-2.0
"""The log, the progress bar, warnings, and loggers of other programs, with these programs."""

import dataclasses
import io
import json
import logging
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from terarec.errors import ConfigError, MissingDependencyError
from terarec.metrics.means import Throughput
from terarec.nn import precision
from terarec.spec import ExponentialSchedule, RunSpec, SGDSpec, TrainingSpec
from terarec.train import Callback, ProgressBar, build, loggers
from terarec.train.evaluation import Evaluator
from terarec.train.loggers import MLflowLogger, TensorBoardLogger, has_tensorboard
from terarec.train.metrics_log import MetricsLog
from terarec.train.optimizers import Optimizers
from tests.errors import at
from tests.train.small_run import changed


class Place:
    """The attributes of a trainer that a log reads."""

    step, first_step, samples, epoch = 0, 0, 0, 0
    last_loss, saving_seconds = None, 0.0
    device, spec = torch.device("cpu"), TrainingSpec()
    optimizers = Optimizers.of(nn.Linear(1, 1), SGDSpec(lr=0.25), SGDSpec())
    optimizers.rows = SimpleNamespace(param_groups=[{"lr": 0.5}])

    def tier_use(self):
        return None  # the model has no table in tiers


def test_the_log_has_a_line_every_few_steps_and_one_per_evaluation(tmp_path, spec):
    run = build(changed(spec, batch_size=50), tmp_path)  # 20 steps an epoch
    report = run.fit()
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = [point for point in points if "loss" in point]
    evaluations = [point for point in points if "auc" in point]
    assert [point["step"] for point in training] == [10, 20, 30, 40]
    assert [point["samples"] for point in training] == [500, 1000, 1500, 2000]
    assert all(0 < point["loss"] < 2 and point["samples_per_second"] > 0 for point in training)
    assert [point["seconds"] for point in training] == sorted(point["seconds"] for point in training)
    assert [(point["step"], point["split"]) for point in evaluations] == [(20, "valid"), (40, "valid")]
    assert evaluations[-1]["auc"] == report.evaluation.auc
    assert evaluations[-1]["logloss"] == report.evaluation.logloss


def test_the_logged_loss_is_the_mean_since_the_last_line(tmp_path):
    log, place = MetricsLog(tmp_path / "metrics.jsonl", "valid", every=2), Place()
    log.on_start(place)
    for place.step, loss in enumerate([1.0, 2.0, 5.0], start=1):
        place.last_loss = torch.tensor(loss)
        place.samples += 10
        log.on_step(place)
    log.on_end(place)
    start, *points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (start["step"], start["device"], start["precision"]) == (0, "cpu", "fp32")
    assert set(start["kernels"].values()) <= {"cpu", "ref", "triton"}
    assert [(point["step"], point["loss"]) for point in points] == [(2, 1.5), (3, 5.0)]
    assert [(point["lr"], point["rows_lr"]) for point in points] == [(0.25, 0.5)] * 2


def test_the_time_of_saving_is_in_no_rate(tmp_path):
    """The last point, one step and the save of it, fell to almost nothing."""
    log, place, clock = MetricsLog(tmp_path / "metrics.jsonl", "valid", every=2), Place(), [0.0]
    log._throughput = Throughput(lambda: clock[0])
    log.on_start(place)
    place.last_loss = torch.tensor(1.0)
    for place.step in (1, 2, 3):
        place.samples += 10
        clock[0] += 0.5
        log.on_step(place)
        if place.step == 2:  # by a callback behind the log
            place.saving_seconds += 30.0
            clock[0] += 30.0
    place.saving_seconds += 7.0
    clock[0] += 7.0
    log.on_end(place)
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]]
    assert [point["samples_per_second"] for point in points] == [20.0, 20.0]
    assert [point["seconds"] for point in points] == [1.0, 38.5]


def test_the_trainer_counts_the_time_of_saving(tmp_path, spec):
    run = build(changed(spec, batch_size=500), tmp_path)
    run.fit()
    assert run.trainer.saving_seconds > 0


def test_a_single_class_split_is_logged_with_an_auc_of_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", "valid")
    found = Evaluator(metrics=("auc", "logloss"), labels=("a", "b")).evaluate(nn.Module(), [])
    assert math.isnan(found.auc)
    results = dataclasses.replace(found.results.overall, values={"auc": math.nan, "logloss": 0.5})
    evaluation = dataclasses.replace(found, results=dataclasses.replace(found.results, overall=results), seconds=0.1)
    log.on_start(Place())
    log.on_evaluation(Place(), evaluation)
    log.on_end(Place())
    _, line = (tmp_path / "metrics.jsonl").read_text().splitlines()
    point = json.loads(line)
    assert set(point.pop("labels")) == {"a", "b"}
    assert point == {"step": 0, "samples": 0, "split": "valid", "auc": None, "logloss": 0.5, "seconds": 0.1}


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_bar_shows_figures_to_people_and_lines_to_files(tmp_path, spec, terminal):
    output = io.StringIO()
    bar = ProgressBar(Console(file=output, force_terminal=terminal, width=120))
    report = build(spec, tmp_path, callbacks=[bar]).fit()
    text = output.getvalue()
    metrics = f"auc {report.evaluation.auc:.5f}, logloss {report.evaluation.logloss:.5f}"
    assert f"step 16: {metrics}, the best so far (" in text  # finding P4: the best step is on the console
    assert ("samples/s" in text) == terminal
    assert ("\x1b[" in text) == terminal
    assert re.findall(r"epoch (\d+)", text)[-1:] == (["2"] if terminal else [])  # E3: it ended at "epoch 3"


@pytest.mark.parametrize(("monitor", "shown"), [("auc", ""), ("auc/click", ", auc/click 0.70000")])
def test_the_line_of_an_evaluation_has_the_metric_that_is_compared(monitor, shown):
    output = io.StringIO()
    values = {"auc": 0.6, "logloss": 0.5}
    trainer = SimpleNamespace(step=4, early_stopping=SimpleNamespace(monitor=monitor, best_step=4))
    evaluation = SimpleNamespace(
        results=SimpleNamespace(overall=SimpleNamespace(values=values)),
        value=lambda metric: {**values, "auc/click": 0.7}[metric],
        rows=10,
        seconds=0.0,
    )
    ProgressBar(Console(file=output, width=120)).on_evaluation(trainer, evaluation)
    line = f"step 4: auc 0.60000, logloss 0.50000{shown}, the best so far (10 rows in 0.0 s)\n"
    assert output.getvalue() == line


@pytest.mark.parametrize(
    ("cpuinfo", "slow"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", False),
        ("flags\t\t: fpu avx2 amx_bf16\n", False),
        ("Features\t: fp asimd bf16\n", False),
        ("flags\t\t: fpu avx2 avx512f\n", True),
        (None, False),
    ],
)
def test_bf16_on_a_processor_without_it_is_reported_once(tmp_path, monkeypatch, caplog, cpuinfo, slow):
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    monkeypatch.setattr(precision, "_CPUINFO", path)
    precision.warn_if_slow.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            precision.warn_if_slow("bf16")
            precision.warn_if_slow("fp32")
            precision.warn_if_slow("bf16", torch.device("cuda"))
    assert len(caplog.records) == slow
    precision._processors_mixed_precision.cache_clear()
    assert {precision.mixed_precision(precision.CPU) for _ in range(3)} == {"fp32" if slow else "bf16"}
    assert len(caplog.records) == 2 * slow
    precision._processors_mixed_precision.cache_clear()  # other tests read the real processor


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

    # Files are read in the order of their names, in which the tenth of a process in one second comes before the ninth.
    found = EventAccumulator(str(directory)).Reload()
    return {
        name: sorted((event.step, event.value) for event in found.Scalars(name)) for name in found.Tags()["scalars"]
    }


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
def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert not has_tensorboard()
    with pytest.raises(MissingDependencyError, check=at("TensorBoard")):
        TensorBoardLogger(tmp_path, "valid")
    with pytest.raises(MissingDependencyError, check=at("MLflow")):
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
    logged = [record for record in caplog.records if record.name == loggers.__name__]
    assert [record.levelno for record in logged] == [logging.WARNING]


def test_a_store_that_is_not_there_is_rejected_before_the_first_step(spec: RunSpec, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny, the extra mlflow, is absent")
    (tmp_path / "file").write_text("no store")
    with pytest.raises(ConfigError, check=at("mlflow")):
        build(spec, tmp_path / "run", callbacks=[MLflowLogger(str(tmp_path / "file"), spec, "small")]).fit()
    assert not (tmp_path / "run").exists()
