# SPDX-License-Identifier: Apache-2.0
"""Finding N4: metrics without a value are named once, compare nothing, and change nothing."""

import dataclasses
import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from terarec.checkpoint import complete_checkpoints, find
from terarec.errors import ConfigError
from terarec.models.artifact import load_model
from terarec.spec import PlateauSchedule, RunSpec, TrainingSpec
from terarec.train import build
from terarec.train.report import write_report
from terarec.train.seeds import SeedResult, SeedsReport, fit_seeds
from terarec.train.stopping import EarlyStopping
from tests.errors import at
from tests.train.planted import make_labelled
from tests.train.small_run import changed


def labels(seed: int, rows: int) -> dict[str, np.ndarray]:
    return {"click": np.random.default_rng(seed).integers(0, 2, rows)}


@pytest.fixture(scope="module")
def one_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose validation split has no positive sample, so that AUC has no value there."""
    directory = tmp_path_factory.mktemp("one class")
    make_labelled(directory, {"train": labels(0, 300), "valid": {"click": np.zeros(100)}})
    return directory


@pytest.fixture
def spec(spec: RunSpec, one_class: Path) -> RunSpec:
    """3 steps an epoch, 4 epochs."""
    return changed(dataclasses.replace(spec, data=str(one_class)), epochs=4)


@pytest.mark.parametrize("training", [{"patience": 1}, {"monitor": "auc"}])
def test_a_comparison_by_a_metric_that_never_had_a_value_is_an_error_at_the_end(tmp_path, spec, training):
    """Finding N4: patience ended such a run after its first epoch without a word."""
    run = build(changed(spec, **training), tmp_path)
    with pytest.raises(ConfigError, check=at("training.monitor")):
        run.fit()
    assert run.trainer.step == 12
    assert complete_checkpoints(run.directory.checkpoints)[-1].name == "step-00000012"


def test_a_monitor_that_has_a_value_stops_such_a_run(tmp_path, spec):
    """Finding N4: the metrics beside it may be undefined."""
    report = build(changed(spec, patience=1, min_delta=10.0, monitor="logloss"), tmp_path).fit()
    assert (report.steps, report.stopped_early) == (6, True)


def test_the_best_checkpoint_of_such_a_run_is_none(tmp_path, spec):
    """Finding N4: without patience or a monitor the run ends well, and its last checkpoint is served."""
    run = build(spec, tmp_path)
    assert run.fit().best_step is None
    assert load_model(tmp_path).step == 12
    with pytest.raises(ConfigError, check=at(run.directory.checkpoints)):
        find(run.directory.checkpoints, "best")


def test_an_undefined_metric_leaves_the_rates_alone(tmp_path, spec):
    """Finding N4: a plateau counted it as no improvement, and lowered the rates."""
    run = build(changed(spec, schedule=PlateauSchedule(factor=0.5, patience=0)), tmp_path)
    with pytest.raises(ConfigError, check=at("training.schedule.metric")):
        run.fit()
    assert [group["lr"] for one in run.trainer.optimizers for group in one.param_groups] == [0.05, 0.01]


def test_undefined_values_between_others_change_nothing():
    """Finding N4: they use up no patience and are not the best."""
    stopping = EarlyStopping(TrainingSpec(patience=2), "auc")
    for step, value in enumerate([0.6, math.nan, 0.5, math.nan, math.nan]):
        stopping.update(step, value, counts=True)
        assert not stopping.is_over
    stopping.update(5, 0.55, counts=True)
    assert (stopping.best_step, stopping.is_over) == (0, True)
    stopping.check_defined()


def test_an_undefined_metric_is_named_once_a_run(tmp_path, spec, caplog):
    """Finding N4."""
    spec = changed(spec, metrics=("auc", "ne", "logloss"), slices=("user",))
    with caplog.at_level(logging.WARNING):
        build(spec, tmp_path).fit()
    named = [record.args[0] for record in caplog.records]
    assert named == ["auc", "ne", "auc by user", "ne by user"]


def test_the_log_and_the_report_show_that_it_is_undefined(tmp_path, spec):
    """Finding N4: the log has null, which is JSON, and the report the word."""
    build(spec, tmp_path).fit()
    points = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [point["auc"] for point in points if "split" in point] == [None] * 4
    page = write_report(tmp_path).read_text()
    assert "undefined" in page
    assert "nan" not in page.lower().replace("nano", "")


def test_patience_without_samples_to_evaluate_is_an_error(tmp_path, spec):
    """Finding N4: an empty validation split was passed over, and patience with it."""
    make_labelled(tmp_path / "data", {"train": labels(0, 300), "valid": {"click": np.zeros(0)}})
    empty = changed(dataclasses.replace(spec, data=str(tmp_path / "data")), patience=1)
    with pytest.raises(ConfigError, check=at("training.patience")):
        build(empty, tmp_path / "RUN").fit()


def test_seeds_have_no_mean_of_an_undefined_metric(tmp_path, spec):
    """Finding N4: `statistics.stdev` raised an AttributeError."""
    report = fit_seeds(changed(spec, epochs=1), tmp_path, 2, "valid")
    assert math.isnan(report.mean("auc"))
    assert math.isnan(report.deviation("auc"))
    written = json.loads((tmp_path / "seeds.json").read_text())
    assert (written["auc"], written["auc_deviation"]) == (None, None)
    assert written["logloss"] == pytest.approx(report.mean("logloss"))


def test_one_undefined_seed_leaves_no_mean():
    """Finding N4: a mean of the other seeds would compare other sets of runs."""
    results = [
        SeedResult(seed=seed, out=Path(), metrics={"auc": auc}, steps=1, epochs=1, seconds=1.0)
        for seed, auc in enumerate((0.5, math.nan))
    ]
    report = SeedsReport(results=tuple(results))
    assert math.isnan(report.mean("auc"))
    assert math.isnan(report.deviation("auc"))


def test_retrieval_without_a_relevant_item_is_named(caplog):
    """Finding N4: no evaluated user has a positive sample."""
    from terarec.batch import Batch, Jagged
    from terarec.models import build_model
    from terarec.spec import TwoTowerSpec
    from terarec.train.retrieval import evaluate_towers
    from tests.train.planted import COLUMNS

    spec = TwoTowerSpec(user=("user",), item=("item",), width=2, hidden=(), vector_width=2)
    keys, offsets = torch.arange(8) % 4, torch.arange(13).clamp_max(8)
    batch = Batch(
        dense=torch.zeros(4, 2),
        label=torch.zeros(4, 1),
        sparse=Jagged(names=("user", "item", "tags"), keys=keys, offsets=offsets),
    )
    results = evaluate_towers(build_model(spec, COLUMNS), [batch], user="user", k=[2])
    assert all(map(math.isnan, results.values.values()))
    assert [record.name for record in caplog.records] == ["terarec.train.retrieval"]
