"""``terarec train``: a run from its description to its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from terarec.cli.failures import failure_of
from terarec.cli.show import Show
from terarec.cli.train_options import TrainOptions, run_spec

if TYPE_CHECKING:
    from terarec.train.fit_report import FitReport
    from terarec.train.run import Run


def train(options: TrainOptions, show: Show) -> None:
    """Train a model on a data set; Ctrl-C leaves a checkpoint."""
    spec = run_spec(options)
    from terarec.train.progress import ProgressBar
    from terarec.train.run import build

    run = build(
        spec, options.out, callbacks=[ProgressBar(show.progress_console)], allow_import=options.allow_import or ()
    )
    if options.resume and not run.directory.has_checkpoint:
        show.line(f"{options.out}: no checkpoint to resume from, starting from the first step")
    report = run.fit(resume=options.resume)
    show.result(f"Trained {options.out}", _figures(run, report, _draw(options.out, show)))


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
        "init_from": str(run.initial) if run.initial is not None else None,
        "auc": evaluation.auc if evaluation is not None else None,
        "logloss": evaluation.logloss if evaluation is not None else None,
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
