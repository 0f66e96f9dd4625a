"""The single-machine engine: fits a workflow on the training part of logs, and writes the data set of all of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from terarec.errors import FormatError
from terarec.etl.engine.fingerprint import fingerprint
from terarec.etl.engine.options import PrepareOptions
from terarec.etl.engine.phases import Phases, Result
from terarec.etl.engine.progress import OnProgress
from terarec.etl.engine.report import BadInput, InputColumn, PrepareReport, output_columns, table_sizes
from terarec.etl.engine.run import Run
from terarec.etl.source import Source, open_source
from terarec.etl.workflow import Workflow
from terarec.formats import Journal, resumable_directory
from terarec.kernels import memory


def prepare(
    workflow: Workflow,
    sources: Sequence[str | Path],
    out: Path,
    options: PrepareOptions,
    progress: OnProgress | None = None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`.

    ``<out>.partial`` takes the work; a killed run is gone on with by the same call after its last whole phase.

    Args:
        workflow: what to do; if it is fitted, rows are transformed only.
        sources: files, directories, patterns or URLs, in order.
        out: directory to make; it must not exist, or be empty. ``workflow/`` and ``report.json`` are in it, too.
        options: how.
        progress: called after every block.

    Raises:
        ConfigError: options or a split that do not fit the sources; `out` holds something, or is being written.
        DataNotFoundError: a source does not exist.
        FormatError: a damaged source, one that changed meanwhile, or bad input under the policy "raise".
        StorageError: the disk is full.
    """
    begun = time.perf_counter()
    source = open_source(workflow.spec.source, sources, options.bad_input, options.threads)
    work_on = fingerprint(workflow, source, options)
    with resumable_directory(out, work_on, restart=options.restart) as journal:
        run = Run(workflow, source, options, Phases(journal, progress), journal.directory)
        fitted = run.fit()
        written = run.write(fitted, out.resolve())
        _check_unchanged(source, sources, workflow, options)
        report = _report(run, fitted, written, source, time.perf_counter() - begun)
        report.save(journal.directory)
        run.finish()
    return report


def fit(
    workflow: Workflow, sources: Sequence[str | Path], options: PrepareOptions, progress: OnProgress | None = None
) -> Workflow:
    """`workflow`, fitted on the training part of `sources`; nothing is written but files that spill, which go again.

    Raises:
        ConfigError, DataNotFoundError, FormatError, StorageError: as for `prepare`.
    """
    source = open_source(workflow.spec.source, sources, options.bad_input, options.threads)
    with tempfile.TemporaryDirectory(prefix="terarec-") as directory:
        journal = Journal(Path(directory), {})
        return Run(workflow, source, options, Phases(journal, progress), Path(directory)).fit()


def _check_unchanged(
    source: Source, sources: Sequence[str | Path], workflow: Workflow, options: PrepareOptions
) -> None:
    """Raise if a file is not what it was: phases would have seen different rows."""
    now = open_source(workflow.spec.source, sources, options.bad_input, options.threads)
    if now.fingerprint() != source.fingerprint():
        raise FormatError(f"{source.files[0].path}: the sources changed while they were read")


def _report(run: Run, fitted: Workflow, written: Result, source: Source, seconds: float) -> PrepareReport:
    rows = sum(written["rows"].values())
    columns = output_columns(fitted.dataset_spec())
    return PrepareReport(
        rows=rows,
        splits=written["rows"],
        input_bytes=run.input_bytes,
        seconds=seconds,
        rows_per_second=rows / seconds,
        peak_memory_bytes=memory.peak_bytes(),
        best_auc=run.best_auc,
        columns=columns,
        inputs=tuple(
            InputColumn(name=name, missing=missing, missing_share=missing / values if values else 0.0)
            for name, (missing, values) in written["missing"].items()
        ),
        tables=table_sizes(columns),
        bad_input=BadInput(policy=run.options.bad_input, **written["bad_input"]),
        spilled=tuple(run.spilled),
        phases=run.phases.reports,
    )
