# SPDX-License-Identifier: Apache-2.0
"""Calibrations are those of their definitions, and every use of a calibrated run has calibrated scores."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from terarec.config import load_run, save_run
from terarec.config.starting_run import starting_run
from terarec.data import open_reader, read_spec
from terarec.errors import ConfigError
from terarec.export.artifact import EXPORT_FILE, export_run
from terarec.export.inputs import KeyInput, padded_keys
from terarec.models.artifact import load_model
from terarec.nn.objectives import BinaryObjective
from terarec.serve import InferenceSession, LiveUpdates, ServedTables
from terarec.spec import BinarySpec, GraphModelSpec, ParameterServerSpec, RegressionSpec, RunSpec
from terarec.spec.calibration import CalibrationMethod, IsotonicSpec, TemperatureSpec
from terarec.spec.run import calibration_of
from terarec.train.calibrating import _isotonic, _temperature, calibrate_run
from terarec.train.evaluation import Evaluator
from terarec.train.predict import predict
from terarec.train.run import build
from tests.cli.conftest import figures
from tests.cli.test_docs import unnamed
from tests.errors import at
from tests.params import in_every_run
from tests.train.small_run import changed

METHODS: tuple[CalibrationMethod, ...] = ("temperature", "isotonic")
CURVE = IsotonicSpec(scores=((0.1, 0.4, 0.9), (0.5,)), values=((0.0, 0.3, 0.7), (0.2,)), step=1)


def random_samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 2.0, count).astype(np.float32).astype(np.float64)
    labels = (rng.random(count) < 1 / (1 + np.exp(-logits / 2.5))).astype(np.float64)
    return logits, labels, rng.integers(1, 4, count).astype(np.float64)


def test_the_temperature_has_the_least_loss() -> None:
    logits, labels, weights = random_samples(500)
    found = _temperature("y", logits, labels, weights)

    def loss(temperature: float) -> float:
        z = logits / temperature
        return float(weights @ (np.logaddexp(0.0, z) - labels * z))

    grid = np.exp(np.linspace(-3, 3, 6001))
    best = grid[np.argmin([loss(temperature) for temperature in grid])]
    assert found == pytest.approx(best, rel=2e-3)
    assert loss(found) <= loss(best)


def test_isotonic_values_are_the_greatest_means_before_the_least_ones_behind() -> None:
    """min over k >= i of max over j <= i of the mean of samples j to k (Barlow et al. 1972)."""
    pytest.importorskip("scipy", reason="the extra 'calibration' is not installed")
    logits, labels, _ = random_samples(64, seed=3)  # as many as bins
    scores, values = _isotonic("y", logits, labels, np.ones(64))
    truth = labels[np.argsort(logits)]
    expected = [
        max(min(truth[first : last + 1].mean() for last in range(place, 64)) for first in range(place + 1))
        for place in range(64)
    ]
    assert np.allclose(values, expected)
    assert np.allclose(scores, np.sort(1 / (1 + np.exp(-logits))), atol=1e-6)


def test_scores_of_curves_are_interpolated() -> None:
    logits = torch.linspace(-6, 6, 400)
    objective = BinaryObjective(BinarySpec(calibration=CURVE))
    found = objective.scores(logits[:, None].repeat(1, 2)).numpy()
    probabilities = 1 / (1 + np.exp(-logits.numpy().astype(np.float64)))
    assert np.allclose(found[:, 0], np.interp(probabilities, CURVE.scores[0], CURVE.values[0]), atol=1e-6)
    assert np.allclose(found[:, 1], 0.2)
    # Sums of float32 would be above the last value, which may be 1.
    points = {"scores": ((0.29293689131736755, 0.86642986536026),), "values": ((0.10737831373856177, 1.0),)}
    steep = IsotonicSpec(**points, step=1)
    assert BinaryObjective(BinarySpec(calibration=steep)).scores(torch.tensor([[20.0]])).item() == 1.0
    tempered = BinaryObjective(BinarySpec(calibration=TemperatureSpec(temperatures=(2.0, 0.5), step=1)))
    both = tempered.scores(torch.tensor([[1.0, 1.0]]))
    assert torch.allclose(both, torch.tensor([[0.5, 2.0]]).sigmoid())
    with pytest.raises(ConfigError, check=at("objective.calibration", "is of 2 labels")):
        tempered.num_outputs(3)


@pytest.mark.parametrize("method", in_every_run(["isotonic"], METHODS))
def test_every_use_of_a_run_has_calibrated_scores(tmp_path: Path, spec: RunSpec, method: CalibrationMethod) -> None:
    if method == "isotonic":
        pytest.importorskip("scipy", reason="the extra 'calibration' is not installed")
    run = tmp_path / "run"
    build(changed(spec, max_steps=6), run).fit()
    records = next(iter(open_reader(spec.data, "valid", batch_size=40)))
    session = InferenceSession.open(run)
    raw = session.score_batch(records)
    report = calibrate_run(run, open_reader(spec.data, "valid", batch_size=100), method)
    assert report.after["ece"] <= report.before["ece"]
    objective = load_run(run / "run.json").objective
    assert isinstance(objective, BinarySpec)
    assert objective.calibration == report.calibration
    if isinstance(report.calibration, IsotonicSpec):
        expected = np.interp(raw[:, 0], report.calibration.scores[0], report.calibration.values[0])
    else:
        logits = np.log(raw[:, 0] / (1 - raw[:, 0])) / report.calibration.temperatures[0]
        expected = 1 / (1 + np.exp(-logits))
    assert np.allclose(InferenceSession.open(run).score_batch(records)[:, 0], expected, atol=1e-5)
    predict(run, spec.data, "valid", tmp_path / "scores.parquet")
    assert np.allclose(pq.read_table(tmp_path / "scores.parquet")["score"][:40], expected, atol=1e-5)
    # Compares the file with the calibrated scores.
    assert export_run(run, tmp_path / "exported", format="torch").max_abs_difference < 1e-5
    evaluator = Evaluator.of(spec.training, BinaryObjective(objective), ["y"])
    found = evaluator.evaluate(load_model(run).model, open_reader(spec.data, "valid", batch_size=100))
    assert found.value("logloss") == pytest.approx(report.after["logloss"], rel=1e-5)
    # Further steps change the weights: the calibration ends with them, also where the description that a resume or a
    # warm start takes over has it.
    calibrated = load_run(run / "run.json")
    warm = build(dataclasses.replace(changed(calibrated, max_steps=1), init_from=str(run)), tmp_path / "warm")
    for next_run, is_resumed in ((build(changed(calibrated, max_steps=7), run), True), (warm, False)):
        report = next_run.fit(resume=is_resumed)
        assert load_run(next_run.directory.run_file).objective in (None, BinarySpec())
        found = evaluator.of(spec.training, BinaryObjective(), ["y"]).evaluate(
            load_model(next_run.directory.path).model, open_reader(spec.data, "valid", batch_size=100)
        )
        assert found.value("logloss") == pytest.approx(report.evaluation.logloss, rel=1e-5)


def test_an_exported_graph_has_the_scores_of_the_objective_of_its_run(tmp_path: Path, spec: RunSpec) -> None:
    """It had the predictions of its losses, whatever the calibration."""
    run, dataset = tmp_path / "run", read_spec(spec.data)
    graph = starting_run(GraphModelSpec, dataset, spec.data).run.model
    build(dataclasses.replace(changed(spec, max_steps=6), model=graph), run).fit()
    calibrate_run(run, open_reader(spec.data, "valid", batch_size=100), "temperature")
    assert calibration_of(load_run(run / "run.json")).temperatures != (1.0,)  # type: ignore[union-attr]
    records = next(iter(open_reader(spec.data, "valid", batch_size=40)))
    for objective in (None, RegressionSpec()):
        if objective is not None:
            save_run(dataclasses.replace(load_run(run / "run.json"), objective=objective), run / "run.json")
        out = tmp_path / f"export-{objective}"
        export_run(run, out, format="torch")
        program = torch.export.load(out / "model.pt2").module()
        description = json.loads((out / EXPORT_FILE).read_text())
        inputs = [
            torch.from_numpy(padded_keys(records.sparse, KeyInput(name="", columns=tuple(one["columns"]))))
            if one["dtype"] == "int64"
            else records.dense
            for one in description["inputs"]
        ]
        (found,) = program(*inputs)
        assert np.allclose(found.detach(), InferenceSession.open(run).score_batch(records), atol=1e-5)


def test_a_calibration_of_other_weights_is_reported_and_left_out(
    tmp_path: Path, spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    build(changed(spec, max_steps=4, checkpoint_every=2, keep_checkpoints=2), run).fit()
    reported = figures("calibrate", run, "--data", spec.data)
    assert unnamed(reported, "calibrate") == set()
    assert reported["logloss"] <= reported["logloss_before"]
    records = next(iter(open_reader(spec.data, "valid", batch_size=40)))
    tables = ServedTables(server=ParameterServerSpec())
    for served in (None, tables):
        with InferenceSession.open(run, tables=served) as session:
            assert calibration_of(session.run) is not None
        assert caplog.messages == []
        with InferenceSession.open(run, 2, tables=served) as session:
            model = load_model(run, 2).model
            with torch.inference_mode():
                expected = model(records).sigmoid().numpy()
            assert np.allclose(session.score_batch(records), expected, atol=1e-6)
        told = f"{run}: its calibration is for the weights of step 4; those of step 2 are scored without it"
        assert set(caplog.messages) == {told}
        caplog.clear()


@pytest.mark.parametrize("executor", in_every_run(["eager"], ["eager", "onnxruntime"]))
def test_a_session_that_follows_a_run_leaves_a_calibration_behind_with_its_weights(
    tmp_path: Path, spec: RunSpec, executor: str
) -> None:
    run = tmp_path / "run"
    build(changed(spec, max_steps=2), run).fit()
    calibrate_run(run, open_reader(spec.data, "valid", batch_size=100), "temperature")
    records = next(iter(open_reader(spec.data, "valid", batch_size=40)))
    tables = ServedTables(server=ParameterServerSpec())
    with (
        InferenceSession.open(run, tables=tables, executor=executor) as session,
        LiveUpdates(session, run, every_seconds=None) as updates,
    ):
        build(changed(spec, max_steps=4), run).fit(resume=True)
        assert updates.poll()
        plain = InferenceSession.open(run).score_batch(records)
        assert np.allclose(session.score_batch(records), plain, atol=1e-6)
        assert calibration_of(session.loaded.spec) is None
        # One that the run has by the time of its next checkpoint counts.
        build(changed(spec, max_steps=6), run).fit(resume=True)
        calibrate_run(run, open_reader(spec.data, "valid", batch_size=100), "temperature")
        assert updates.poll()
        calibrated = InferenceSession.open(run).score_batch(records)
        assert not np.allclose(calibrated, plain, atol=1e-4)
        assert np.allclose(session.score_batch(records), calibrated, atol=1e-6)


def test_what_cannot_be_calibrated_is_reported(tmp_path: Path, spec: RunSpec) -> None:
    run = tmp_path / "run"
    build(changed(spec, max_steps=1), run).fit()
    text = (run / "run.json").read_bytes()
    ones = [
        dataclasses.replace(batch, label=torch.ones_like(batch.label))
        for batch in open_reader(spec.data, "valid", batch_size=64)
    ]
    with pytest.raises(ConfigError, match="got 1 alone, expected samples of both values"):
        calibrate_run(run, ones, "temperature")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, check=at("split", "has no samples")):
        calibrate_run(run, [], "temperature")  # type: ignore[arg-type]
    assert (run / "run.json").read_bytes() == text


@pytest.mark.parametrize(
    ("calibration", "field"),
    [
        (lambda: TemperatureSpec(temperatures=(0.0,), step=1), "temperatures"),
        (lambda: TemperatureSpec(temperatures=(), step=1), "temperatures"),
        (lambda: IsotonicSpec(scores=((0.5, 0.2),), values=((0.1, 0.2),), step=1), "scores"),
        (lambda: IsotonicSpec(scores=((0.1, 0.2),), values=((0.3, 0.2),), step=1), "values"),
        (lambda: IsotonicSpec(scores=((0.1,),), values=((1.3,),), step=1), "values"),
        (lambda: IsotonicSpec(scores=((0.1,),), values=((0.1, 0.2),), step=1), "values"),
    ],
)
def test_a_curve_that_is_none_is_rejected(calibration, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        calibration()
