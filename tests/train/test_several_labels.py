# SPDX-License-Identifier: Apache-2.0
"""Finding P3: several labels, their weights, and monitors of one of them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from terarec.config import load_run
from terarec.data import open_reader
from terarec.errors import ConfigError
from terarec.models import build_model
from terarec.models.artifact import load_model
from terarec.nn.objectives import BinaryObjective
from terarec.spec import BinarySpec, ClassWeights, PlateauSchedule, RunSpec, TwoTowerSpec
from terarec.train import build
from terarec.train.calibrating import calibrate_run
from terarec.train.evaluation import Evaluator
from tests.errors import at
from tests.train.planted import make_labelled
from tests.train.small_run import changed


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dense column tells `click`; nothing tells `noise`."""
    directory, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(2)
    splits = {
        split: {name: rng.integers(0, 2, rows) for name in ("click", "noise")}
        for split, rows in (("train", 600), ("valid", 200))
    }
    make_labelled(directory, splits)
    return directory


@pytest.fixture
def spec(spec: RunSpec, shop: Path) -> RunSpec:
    return dataclasses.replace(spec, data=str(shop))


def test_the_mean_leaves_labels_of_weight_0_out(tmp_path, spec):
    """Finding P3: the headline was the mean over labels that nothing was trained for."""
    both = build(spec, tmp_path / "both").fit().evaluation
    assert both.auc == pytest.approx((both.value("auc/click") + both.value("auc/noise")) / 2)
    weighted = dataclasses.replace(spec, objective=BinarySpec(label_weights=(1.0, 0.0)))
    one = build(weighted, tmp_path / "one").fit().evaluation
    assert one.auc == one.value("auc/click") != one.value("auc/noise")
    assert one.logloss == one.value("logloss/click")
    assert one.to_json()["untrained_labels"] == ["noise"]
    assert set(one.to_json()["labels"]) == {"click", "noise"}


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_labels_of_weight_0_are_neither_counted_nor_calibrated(tmp_path, spec, method):
    """They may have one value alone."""
    if method == "isotonic":
        pytest.importorskip("scipy", reason="the extra 'calibration' is not installed")
    rng, data = np.random.default_rng(1), tmp_path / "data"
    make_labelled(
        data,
        {
            split: {"click": rng.integers(0, 2, rows), "noise": np.zeros(rows)}
            for split, rows in (("train", 300), ("valid", 200))
        },
    )
    objective = BinarySpec(label_weights=(1.0, 0.0), positive_weight="auto")
    run = build(dataclasses.replace(changed(spec, max_steps=3), data=str(data), objective=objective), tmp_path / "run")
    run.fit()
    path = run.directory.path
    assert load_run(run.directory.run_file).objective.class_weights[1] == ClassWeights(negative=1.0, positive=1.0)
    report = calibrate_run(path, open_reader(data, "valid", batch_size=64), method)
    if method == "temperature":
        assert report.calibration.temperatures[0] != report.calibration.temperatures[1] == 1.0
    else:
        assert report.calibration.scores[1] == report.calibration.values[1] == (0.0, 1.0)
    objective = BinaryObjective(load_run(run.directory.run_file).objective)
    evaluator = Evaluator.of(spec.training, objective, ["click", "noise"])
    found = evaluator.evaluate(load_model(path).model, open_reader(data, "valid", batch_size=64))
    assert report.after["logloss"] == pytest.approx(found.logloss, rel=1e-5)


@pytest.mark.parametrize("training", [{"monitor": "auc/noise"}, {"schedule": PlateauSchedule(metric="logloss/click")}])
def test_one_label_is_compared(tmp_path, spec, training):
    """Finding P3."""
    report = build(changed(spec, eval_every=1, epochs=1, keep_checkpoints=9, **training), tmp_path).fit()
    names = {f"{metric}{label}" for metric in ("auc", "logloss") for label in ("", "/click", "/noise")}
    assert set(report.best_metrics) == names


def test_the_best_step_is_that_of_the_label(tmp_path, spec):
    """Finding P3: `--monitor auc/click` was rejected as no metric."""
    run = build(changed(spec, eval_every=1, epochs=3, monitor="auc/noise"), tmp_path)
    values = {}

    class Watch:
        def on_evaluation(self, trainer, evaluation):
            values[trainer.step] = evaluation.results.overall.labels["noise"].values["auc"]

        def __getattr__(self, hook):
            return lambda *_: None

    run.trainer.callbacks.append(Watch())
    assert run.fit().best_step == max(values, key=lambda step: (values[step], -step))


@pytest.mark.parametrize(
    ("monitor", "where"),
    [
        ("auc/clik", "training.monitor"),
        ("rmse/click", "training.monitor"),
        ("auc/", "TrainingSpec.monitor"),
        ("/click", "TrainingSpec.monitor"),
    ],
)
def test_an_unknown_label_or_metric_is_rejected(tmp_path, spec, monitor, where):
    """Finding P3."""
    with pytest.raises(ConfigError, check=at(where)):
        build(changed(spec, monitor=monitor), tmp_path).fit()


def test_weights_of_0_alone_are_rejected():
    """Finding P3: there would be no label to train, and no mean."""
    with pytest.raises(ConfigError, check=at("BinarySpec.label_weights")):
        BinarySpec(label_weights=(0.0, 0.0))


def test_two_towers_take_one_label(shop):
    """Finding P3: the error says why, and what to do."""
    from terarec.data import read_spec

    spec = TwoTowerSpec(user=("age",), item=("user",))
    with pytest.raises(ConfigError, check=at("two_tower", "choose one of them")):
        build_model(spec, read_spec(shop))
