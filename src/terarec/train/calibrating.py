# SPDX-License-Identifier: Apache-2.0
"""Calibration of a trained run: fitted on a split, and written into ``run.json``, with which every use of it loads."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.batch import Batch
from terarec.config import load_run, save_run
from terarec.config.files import RUN_FILE
from terarec.data import BatchReader
from terarec.errors import ConfigError, MissingDependencyError
from terarec.metrics.calibration import Calibration
from terarec.metrics.means import LogLoss
from terarec.models.artifact import load_model
from terarec.nn.objectives import BinaryObjective, untrained_labels
from terarec.spec import BinarySpec, RunSpec
from terarec.spec.calibration import CalibrationMethod, CalibrationSpec, IsotonicSpec, TemperatureSpec
from terarec.spec.run import without_calibration
from terarec.train.evaluation import score
from terarec.train.run_dir import RunDirectory

Floats = NDArray[np.float64]
_Numbers = tuple[float, ...]

_BINS = 64
_BISECTIONS = 60
_LARGEST = 1e3
"""Largest temperature, and the reciprocal of the smallest."""
_UNCHANGED = ((0.0, 1.0), (0.0, 1.0))
"""The curve of a label of weight 0, which is not calibrated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationReport:
    """Results of `calibrate_run`.

    Attributes:
        step: Training steps of the weights.
        calibration: What was written.
        before: "ece", "logloss" of the samples without a calibration, means over the trained labels.
        after: The same with it.
    """

    step: int
    calibration: CalibrationSpec
    before: Mapping[str, float]
    after: Mapping[str, float]


def calibrate_run(
    run_dir: Path,
    reader: BatchReader,
    method: CalibrationMethod,
    *,
    checkpoint: int | str | None = None,
    device: torch.device | None = None,
    allow_import: Sequence[str] = (),
) -> CalibrationReport:
    """Fit a calibration of the probabilities of a run, and write it into its ``run.json`` in place of an earlier one.

    Args:
        run_dir: The run.
        reader: Samples to fit it on, which the run was not trained on.
        method: "temperature": one divisor of the logits for each label, which leaves the order of samples as it is;
            "isotonic": a rising function of the probability, of at most 64 points.
        checkpoint: "last", "best" or a step; None as in `terarec.models.artifact.find_checkpoint`.
        device: Device of the model; the CPU by default.
        allow_import: Packages whose code the model may name.

    Raises:
        ConfigError: A run whose scores are no probabilities of labels, no sample with a known label, labels of one
            value, or no such checkpoint.
        DataNotFoundError: `run_dir` is not a run, or holds no complete checkpoint.
        MissingDependencyError: "isotonic" without SciPy.
    """
    directory = RunDirectory(run_dir)
    with directory.locked():
        loaded = load_model(run_dir, checkpoint, device=device, allow_import=allow_import)
        plain = without_calibration(loaded.spec)
        objective = plain.objective or BinarySpec()
        if not isinstance(objective, BinarySpec) or not getattr(loaded.model, "gives_probabilities", True):
            kind = loaded.spec.model.kind
            raise ConfigError(run_dir, f"a {kind} whose scores are no probabilities of labels, expected one of them")
        scored = score(loaded.model, reader, plain.training.precision)
        parts = [_arrays(batch, logits) for batch, logits, _ in scored]
        if not parts:
            raise ConfigError("split", "has no samples, expected some to calibrate by")
        logits, labels, weights = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        names = [label.name for label in loaded.dataset.labels]
        known = ~np.isnan(labels)
        untrained = untrained_labels(BinaryObjective(objective), names)
        trained = [place for place, name in enumerate(names) if name not in untrained]
        of_labels = {
            names[place]: (logits[known[:, place], place], labels[known[:, place], place], weights[known[:, place]])
            for place in trained
        }
        calibration: CalibrationSpec
        if method == "temperature":
            of_trained = {name: _temperature(name, *samples) for name, samples in of_labels.items()}
            temperatures = tuple(of_trained.get(name, 1.0) for name in names)
            calibration = TemperatureSpec(temperatures=temperatures, step=loaded.step)
        else:
            curves = {name: _isotonic(name, *samples) for name, samples in of_labels.items()}
            scores, values = zip(*(curves.get(name, _UNCHANGED) for name in names), strict=True)
            calibration = IsotonicSpec(scores=scores, values=values, step=loaded.step)
        calibrated = dataclasses.replace(plain, objective=dataclasses.replace(objective, calibration=calibration))
        before, after = (_metrics(run, logits, labels, weights, trained) for run in (plain, calibrated))
        save_run(dataclasses.replace(load_run(run_dir / RUN_FILE), objective=calibrated.objective), run_dir / RUN_FILE)
    return CalibrationReport(step=loaded.step, calibration=calibration, before=before, after=after)


def _arrays(batch: Batch, logits: torch.Tensor) -> tuple[Floats, Floats, Floats]:
    weight = torch.ones(batch.batch_size) if batch.weight is None else batch.weight
    return logits.double().numpy(), batch.label.double().numpy(), weight.double().numpy()


def _metrics(
    run: RunSpec, logits: Floats, labels: Floats, weights: Floats, trained: Sequence[int]
) -> Mapping[str, float]:
    """Return the metrics of the scores as every user of the run computes them, over the labels `trained`."""
    objective = BinaryObjective(run.objective if isinstance(run.objective, BinarySpec) else None)
    inputs = torch.from_numpy(logits).float()
    every = objective.scores(inputs).numpy(), objective.calibrated_logits(inputs).numpy(), labels
    scores, corrected, labels = (columns[:, trained] for columns in every)
    return {
        "ece": Calibration().update(scores, labels, weights).compute(),
        "logloss": LogLoss().update(corrected, labels, weights).compute(),
    }


def _check_labels(label: str, labels: Floats, weights: Floats) -> None:
    weighted = labels[weights > 0.0]
    if not len(weighted) or weighted.min() == weighted.max():
        got = f"{weighted[0]:g} alone" if len(weighted) else "none"
        raise ConfigError(f"label {label!r}", f"got {got}, expected samples of both values to calibrate by")


def _temperature(label: str, logits: Floats, labels: Floats, weights: Floats) -> float:
    """Return the T of the least sum of log(1 + exp(x / T)) - y x / T."""
    _check_labels(label, labels, weights)
    # The derivative by a = 1 / T, sum of x (s(a x) - y), rises: its zero is found by bisection of log a.
    low, high = -np.log(_LARGEST), np.log(_LARGEST)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        slope = weights @ (logits * (0.5 + 0.5 * np.tanh(np.exp(middle) * logits / 2) - labels))
        low, high = (low, middle) if slope > 0.0 else (middle, high)
    return float(np.exp(-(low + high) / 2))


def _isotonic(label: str, logits: Floats, labels: Floats, weights: Floats) -> tuple[_Numbers, _Numbers]:
    """Return points of the isotonic regression of the mean labels of bins of about equal weight."""
    _check_labels(label, labels, weights)
    probabilities = 0.5 + 0.5 * np.tanh(logits / 2)
    (curve,) = Calibration(bins=_BINS).update(probabilities, labels, weights).curves()
    # float32, in which scores are computed, may not tell means apart.
    scores, first = np.unique(np.array(curve.score, dtype=np.float32), return_index=True)
    means, sums = np.array(curve.label)[first], np.array(curve.weight)[first]
    values = _scipy_optimize().isotonic_regression(means, weights=sums).x.clip(0.0, 1.0)
    return tuple(scores.tolist()), tuple(np.maximum.accumulate(values).tolist())


def _scipy_optimize() -> Any:
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError:
        raise MissingDependencyError("scipy", "not installed, expected pip install 'terarec[calibration]'") from None
