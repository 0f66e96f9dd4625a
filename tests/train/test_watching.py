"""The log, the progress bar, and the warnings."""

import dataclasses
import io
import json
import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from terarec.nn import precision
from terarec.spec import SGDSpec, TrainingSpec
from terarec.train import ProgressBar, build
from terarec.train.evaluation import Evaluator
from terarec.train.loggers import MetricsLog
from terarec.train.optimizers import Optimizers
from tests.train.small_run import changed


class Place:
    """What a log asks a trainer."""

    step, samples, epoch = 0, 0, 0
    last_loss = None
    device, spec = torch.device("cpu"), TrainingSpec()
    optimizers = Optimizers.of(nn.Linear(1, 1), SGDSpec(lr=0.25), SGDSpec())
    optimizers.rows = SimpleNamespace(param_groups=[{"lr": 0.5}])


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


def test_a_single_class_split_is_logged_without_an_auc(tmp_path):
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
    assert point == {"step": 0, "samples": 0, "split": "valid", "logloss": 0.5, "seconds": 0.1}


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_bar_shows_figures_to_people_and_lines_to_files(tmp_path, spec, terminal):
    output = io.StringIO()
    bar = ProgressBar(Console(file=output, force_terminal=terminal, width=120))
    report = build(spec, tmp_path, callbacks=[bar]).fit()
    text = output.getvalue()
    assert f"step 16: auc {report.evaluation.auc:.5f}, logloss {report.evaluation.logloss:.5f} (" in text
    assert ("samples/s" in text) == terminal
    assert ("\x1b[" in text) == terminal
    assert re.findall(r"epoch (\d+)", text)[-1:] == (["2"] if terminal else [])  # E3: it ended at "epoch 3"


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
def test_bf16_on_a_processor_without_it_is_told_once(tmp_path, monkeypatch, caplog, cpuinfo, slow):
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
    precision._processors_mixed_precision.cache_clear()  # other tests ask the processor itself
