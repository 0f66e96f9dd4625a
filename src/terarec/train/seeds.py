"""The same run with several seeds, and the mean and deviation of its metrics."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terarec.errors import FormatError
from terarec.formats import write_bytes
from terarec.models.artifact import load_model
from terarec.spec import RunSpec
from terarec.spec.json_text import parse_json
from terarec.train.callback import Callback
from terarec.train.evaluation import Evaluator
from terarec.train.run import build

RESULT_FILE = "result.json"
"""Figures of a finished seed in its RUN directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedResult:
    """One trained run.

    Attributes:
        seed: Its seed.
        out: Its RUN directory.
        metrics: Metrics of its checkpoint on the evaluated split, by name.
        steps: Training steps.
        epochs: Epochs.
        seconds: Wall-clock time of the training with its evaluations.
    """

    seed: int
    out: Path
    metrics: Mapping[str, float]
    steps: int
    epochs: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedsReport:
    """What `fit_seeds` found.

    Attributes:
        results: The runs in the order of their seeds.
    """

    results: tuple[SeedResult, ...]

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over the seeds."""
        return statistics.fmean(result.metrics[metric] for result in self.results)

    def deviation(self, metric: str) -> float:
        """Return the standard deviation of a metric over the seeds, with n - 1; NaN for one seed."""
        values = [result.metrics[metric] for result in self.results]
        return statistics.stdev(values) if len(values) > 1 else math.nan


def fit_seeds(
    spec: RunSpec,
    out: Path,
    count: int,
    split: str,
    *,
    callbacks: Callable[[], Sequence[Callback]] = tuple,
    resume: bool = False,
    allow_import: Sequence[str] = (),
    on_result: Callable[[SeedResult], None] | None = None,
) -> SeedsReport:
    """Train a run with the seeds s, s + 1, ... and evaluate each, s being the seed of `spec`.

    Each run lies in ``out/seed-<seed>``. Its best checkpoint is evaluated where training stops early, else the last.

    Args:
        spec: The run.
        out: Directory of the runs.
        count: Number of seeds.
        split: Split of the data that is evaluated.
        callbacks: Function that makes the callbacks of a run.
        resume: Whether finished runs are kept and an interrupted one goes on.
        allow_import: Packages from which the model may come by name.
        on_result: Function called after each run.

    Raises:
        ConfigError: See `Run.fit`.
        RunInterruptedError: A signal; the run goes on with `resume`.
    """
    results = []
    for seed in range(spec.training.seed, spec.training.seed + count):
        directory = out / f"seed-{seed}"
        file = directory / RESULT_FILE
        result = _read(file, seed, directory) if resume and file.is_file() else None
        if result is None:
            result = _fit(spec, seed, directory, split, callbacks(), resume=resume, allow_import=allow_import)
            figures = {
                "metrics": dict(result.metrics),
                "steps": result.steps,
                "epochs": result.epochs,
                "seconds": result.seconds,
            }
            write_bytes(file, json.dumps(figures, indent=2).encode())
        results.append(result)
        if on_result is not None:
            on_result(result)
    return SeedsReport(results=tuple(results))


def _fit(
    spec: RunSpec,
    seed: int,
    directory: Path,
    split: str,
    callbacks: Sequence[Callback],
    *,
    resume: bool,
    allow_import: Sequence[str],
) -> SeedResult:
    training = dataclasses.replace(spec.training, seed=seed)
    run = build(dataclasses.replace(spec, training=training), directory, callbacks, allow_import=allow_import)
    report = run.fit(resume=resume)
    loaded = load_model(directory, device=run.device, allow_import=allow_import)
    evaluator = Evaluator(
        run.objective,
        metrics=training.metrics,
        labels=[label.name for label in run.dataset.labels],
        group=training.group,
        slices=training.slices,
        precision=training.precision,
    )
    evaluation = evaluator.evaluate(loaded.model, run.reader(split))
    return SeedResult(
        seed=seed,
        out=directory,
        metrics=evaluation.results.overall.values,
        steps=report.steps,
        epochs=run.trainer.epoch,
        seconds=report.total_seconds,
    )


def _read(file: Path, seed: int, directory: Path) -> SeedResult:
    try:
        figures: dict[str, Any] = parse_json(file.read_bytes())
        metrics = {str(name): float(value) for name, value in figures["metrics"].items()}
        steps, epochs, seconds = int(figures["steps"]), int(figures["epochs"]), float(figures["seconds"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{file}: damaged ({error}), expected the figures of a finished run") from None
    return SeedResult(seed=seed, out=directory, metrics=metrics, steps=steps, epochs=epochs, seconds=seconds)
