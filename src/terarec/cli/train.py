"""``terarec train``: a run from its description to its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from terarec.cli.failures import failure_of
from terarec.cli.show import Show
from terarec.cli.train_options import TrainOptions, run_spec
from terarec.errors import ConfigError

if TYPE_CHECKING:
    from terarec.spec import RunSpec
    from terarec.train.run import Run
    from terarec.train.seeds import SeedResult
    from terarec.train.trainer import Callback, FitReport


def train(options: TrainOptions, show: Show) -> None:
    """Train a model on a data set; Ctrl-C leaves a checkpoint."""
    spec = run_spec(options)
    if options.seeds is not None:
        _train_seeds(spec, options, options.seeds, show)
        return
    from terarec.train.run import build

    callbacks = _callbacks(spec, options, show, options.out)
    run = build(spec, options.out, callbacks=callbacks, allow_import=options.allow_import or ())
    if options.resume and not run.directory.has_checkpoint:
        show.line(f"{options.out}: no checkpoint to resume from, starting from the first step")
    report = run.fit(resume=options.resume)
    show.result(f"Trained {options.out}", _figures(run, report, _draw(options.out, show)))


def _train_seeds(spec: RunSpec, options: TrainOptions, count: int, show: Show) -> None:
    from terarec.data import read_spec
    from terarec.train.report import REPORT_FILE
    from terarec.train.seeds import fit_seeds

    split = spec.training.eval_split
    if split is None:
        raise ConfigError("--seeds: training.eval_split is none, expected a split whose metrics are compared")
    read_spec(Path(spec.data)).num_rows(split)  # refuses a split that is not there before the first training

    def done(result: SeedResult) -> None:
        tell_seed(result, show)
        if not (result.out / REPORT_FILE).is_file():
            _draw(result.out, show)

    report = fit_seeds(
        spec,
        options.out,
        count,
        split,
        callbacks=lambda directory: _callbacks(spec, options, show, directory),
        resume=options.resume,
        allow_import=options.allow_import or (),
        on_result=done,
    )
    figures = {"out": str(options.out), "model": spec.model.kind, "split": split, **report.figures()}
    show.result(f"Trained {count} seeds in {options.out}", figures)


def _callbacks(spec: RunSpec, options: TrainOptions, show: Show, directory: Path) -> list[Callback]:
    """The progress bar and the loggers of the run in `directory`."""
    from terarec.train.loggers import MLflowLogger, ProgressBar, TensorBoardLogger, has_tensorboard
    from terarec.train.run_dir import RunDirectory

    callbacks: list[Callback] = [ProgressBar(show.progress_console)]
    if has_tensorboard() and not options.no_tensorboard:
        callbacks.append(TensorBoardLogger(RunDirectory(directory).tensorboard, spec.training.eval_split or "valid"))
    if options.mlflow is not None:
        parts = directory.absolute().parts[-2:] if options.seeds is not None else directory.absolute().parts[-1:]
        callbacks.append(MLflowLogger(options.mlflow, spec, "/".join(parts)))
    return callbacks


def tell_seed(result: SeedResult, show: Show) -> None:
    """Show the metrics of a finished seed in one line."""
    found = ", ".join(f"{name} {value:.6f}" for name, value in result.metrics.items())
    show.line(f"seed {result.seed}: {found} in {result.seconds:,.1f} s")


def _draw(out: Path, show: Show) -> Path | None:
    """Write the report and return its path; None, with a line that says why, if that fails: the training has not."""
    from terarec.train.report import write_report

    try:
        return write_report(out)
    except Exception as error:
        show.line(f"no report: {failure_of(error).message}")
        return None


def _figures(run: Run, report: FitReport, page: Path | None) -> dict[str, Any]:
    evaluation = report.evaluation
    return {
        "out": str(run.directory.path),
        "model": run.spec.model.kind,
        "device": report.device,
        "init_from": str(run.initial) if run.initial is not None else None,
        "auc": None,
        "logloss": None,
        **(evaluation.results.overall.values if evaluation is not None else {}),
        "highest_auc": report.highest_auc,
        "best_auc": run.dataset.best_auc,
        "best_step": report.best_step,
        "stopped_early": report.stopped_early,
        "loss": report.loss,
        "steps": report.steps,
        "samples": report.samples,
        "seconds": report.seconds,
        "samples_per_second": report.samples_per_second,
        "peak_memory_bytes": report.peak_memory_bytes,
        "checkpoint": str(report.checkpoint) if report.checkpoint is not None else None,
        "report": str(page) if page is not None else None,
    }
