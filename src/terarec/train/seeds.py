# SPDX-License-Identifier: Apache-2.0
"""Runs that differ in their seeds, and the mean and deviation of their metrics."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from terarec.config import load_run
from terarec.config.files import RUN_FILE
from terarec.errors import ConfigError, FormatError
from terarec.io.files import write_json
from terarec.io.opening import read_bytes
from terarec.metrics.samples import NamesOfIds
from terarec.models.artifact import load_model
from terarec.spec import RunSpec, to_data
from terarec.spec.codec import differences, finite_data, parse_json
from terarec.spec.run import without_calibration
from terarec.train.metrics_log import read_log
from terarec.train.run import Run, build
from terarec.train.trainer import Callback

RESULT_FILE = "result.json"
"""Figures of a finished seed in its RUN directory."""

SEEDS_FILE = "seeds.json"
"""Figures of all seeds in the directory of the runs."""

_SAME_TRAINING = ("device", "compile", "threads", "reader_threads", "rank_timeout", "schedule.ends_with_run")
_SAME_RESULT = frozenset({"data"} | {f"training.{name}" for name in _SAME_TRAINING})
"""Fields of `RunSpec` that a finished seed need not have in common with the run that is to be repeated."""


Measure = Callable[[nn.Module, Run, str], Mapping[str, float]]
"""Trained model, its run, and a split of its data -> metrics by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedResult:
    """One trained run.

    Attributes:
        seed: Its seed.
        out: Its RUN directory.
        metrics: Metrics of its checkpoint on the evaluated split, by name.
        steps: Training steps.
        epochs: Epochs.
        seconds: Wall-clock time of the training with its evaluations, that before a resume included.
    """

    seed: int
    out: Path
    metrics: Mapping[str, float]
    steps: int
    epochs: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedsReport:
    """Results of `fit_seeds`."""

    results: tuple[SeedResult, ...]

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over the seeds; NaN if it is undefined for one of them."""
        return statistics.fmean(result.metrics[metric] for result in self.results)

    def deviation(self, metric: str) -> float:
        """Return the standard deviation of a metric over the seeds, with n - 1; NaN for one seed, or without a mean."""
        values = [result.metrics[metric] for result in self.results]
        # Of a value that is not finite `statistics.stdev` raises.
        is_defined = len(values) > 1 and all(map(math.isfinite, values))
        return statistics.stdev(values) if is_defined else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return all values as JSON data, None for NaN.

        A metric's name has its mean over the seeds, the name with "_deviation" its standard deviation, "seeds" has
        their number, "seconds" the time of all, and "runs" the figures of each.
        """
        figures: dict[str, Any] = {}
        for name in self.results[0].metrics:
            figures |= {name: self.mean(name), f"{name}_deviation": self.deviation(name)}
        figures["seeds"] = len(self.results)
        figures["seconds"] = math.fsum(result.seconds for result in self.results)
        figures["runs"] = [
            {
                "seed": result.seed,
                **result.metrics,
                "steps": result.steps,
                "epochs": result.epochs,
                "seconds": result.seconds,
                "out": str(result.out),
            }
            for result in self.results
        ]
        data: dict[str, Any] = finite_data(figures)
        return data


def fit_seeds(
    spec: RunSpec,
    out: Path,
    count: int,
    split: str,
    *,
    callbacks: Callable[[Path], Sequence[Callback]] | None = None,
    resume: bool = False,
    allow_import: Sequence[str] = (),
    on_result: Callable[[SeedResult], None] | None = None,
    names: NamesOfIds | None = None,
    measure: Measure | None = None,
) -> SeedsReport:
    """Train a run with the seeds s, s + 1, ... and evaluate each, s being the seed of `spec`.

    Each run lies in ``out/seed-<seed>``. Its best checkpoint is evaluated where training stops early, else the last.
    ``out/seeds.json`` has the figures of all.

    Args:
        spec: The run.
        out: Directory of the runs.
        count: Number of seeds.
        split: Split of the data that is evaluated.
        callbacks: Function from the directory of a run to its callbacks; None for none.
        resume: Whether finished runs are kept and interrupted ones are continued, including finished ones if `spec`
            requests more steps.
        allow_import: Packages from which the model may come by name.
        on_result: Function called after each run.
        names: Names of the ids in slice columns; None to report the ids.
        measure: Function that returns the metrics of a trained model; None for those of the run's evaluator.

    Raises:
        ConfigError: See `Run.fit`.
        RunInterruptedError: A signal; the run continues with `resume`.
    """
    if (out / RUN_FILE).is_file():
        raise ConfigError(out, "holds a run, expected a new directory for the runs of several seeds")
    results = []
    for seed in range(spec.training.seed, spec.training.seed + count):
        directory = out / f"seed-{seed}"
        file = directory / RESULT_FILE
        training = dataclasses.replace(spec.training, seed=seed)
        watching = () if callbacks is None else callbacks(directory)
        described = dataclasses.replace(spec, training=training)
        run = build(described, directory, watching, allow_import=allow_import, names=names)
        # A finished run whose settings differ, such as by more epochs, continues below.
        if resume and file.is_file() and _is_same(run):
            run.directory.check(run.spec, run.dataset, resume=True)  # the data may be other ones
            result = _read(file, seed, directory)
        else:
            result = _fit(run, split, resume=resume, allow_import=allow_import, measure=measure)
            # Written last: without it the run counts as unfinished, and continues with `resume`.
            _write(file, result)
        results.append(result)
        if on_result is not None:
            on_result(result)
    report = SeedsReport(results=tuple(results))
    write_json(out / SEEDS_FILE, report.to_json())
    return report


def _is_same(run: Run) -> bool:
    """Return whether the finished run in the directory of `run` was trained as `run` describes."""
    # A calibration was fitted to the trained model.
    kept = to_data(without_calibration(load_run(run.directory.run_file)))
    return all(path in _SAME_RESULT for path, _, _ in differences(kept, to_data(run.spec)))


def _fit(run: Run, split: str, *, resume: bool, allow_import: Sequence[str], measure: Measure | None) -> SeedResult:
    training, directory = run.spec.training, run.directory.path
    report = run.fit(resume=resume)
    # From its checkpoint, as a user would load it: the best step need not be the last one, which is in memory.
    loaded = load_model(directory, device=run.device, allow_import=allow_import)
    metrics: Mapping[str, float]
    if measure is None:
        metrics = run.trainer.evaluator.evaluate(loaded.model, run.reader(split)).results.named_values()
    else:
        metrics = measure(loaded.model, run, split)
    log = read_log(run.directory.metrics)  # which has the time before a resume, too
    return SeedResult(
        seed=training.seed,
        out=directory,
        metrics=metrics,
        steps=report.steps,
        epochs=run.trainer.epoch,
        seconds=log.training_seconds + sum(point["seconds"] for point in log.evaluations),
    )


def _write(file: Path, result: SeedResult) -> None:
    figures = {
        "metrics": result.metrics,
        "steps": result.steps,
        "epochs": result.epochs,
        "seconds": result.seconds,
    }
    write_json(file, finite_data(figures))


def _read(file: Path, seed: int, directory: Path) -> SeedResult:
    try:
        figures: dict[str, Any] = parse_json(read_bytes(file))
        figures_of_run = figures["metrics"].items()
        metrics = {str(name): math.nan if value is None else float(value) for name, value in figures_of_run}
        steps, epochs, seconds = int(figures["steps"]), int(figures["epochs"]), float(figures["seconds"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(file, f"damaged ({error}), expected the figures of a finished run") from None
    return SeedResult(seed=seed, out=directory, metrics=metrics, steps=steps, epochs=epochs, seconds=seconds)
