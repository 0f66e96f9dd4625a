"""A preparation around the phases of an engine: the directory in the making, its journal, and the report."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from terarec.errors import FormatError
from terarec.etl.engine.fingerprint import fingerprint
from terarec.etl.engine.phases import Phases, Result
from terarec.etl.engine.progress import OnProgress
from terarec.etl.engine.report import BadInput, InputColumn, PrepareReport, output_columns, table_sizes
from terarec.etl.engine.side_tables import bad_input, check_tables
from terarec.etl.generated import read_best_auc
from terarec.etl.sink import RECORD_KINDS
from terarec.etl.source import Source, open_source
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.results import check_times
from terarec.formats import Journal, resumable_directory
from terarec.kernels import memory
from terarec.spec import DatasetSpec, FieldError, PrepareOptions

WORK = "work"
"""Directory of what phases hand on through the disk."""
WORKFLOW = "workflow"
"""Directory of the fitted workflow in a data set."""


class EngineRun(Protocol):
    """The phases of one preparation, each of which is done unless it is done already.

    It saves the workflow, and what its steps learn, in `WORKFLOW` of its directory.

    Attributes:
        spilled: names of the steps that did not fit in memory while they learnt.
    """

    spilled: list[str]

    def fit(self) -> Workflow:
        """The fitted workflow."""
        ...

    def write(self, spec: DatasetSpec, fitted: Workflow, location: Path) -> Result:
        """Write all rows as `spec` describes them into the directory, which will lie at `location`.

        Returns:
            "rows": split -> rows; "missing": column of the sources -> its missing and all values; "bad_input": "counts"
            of each kind, and the "first" faults.
        """
        ...

    def finish(self) -> None:
        """Remove what phases handed on."""
        ...


StartRun: TypeAlias = Callable[[Workflow, Source, PrepareOptions, Phases, Path], EngineRun]
"""Makes the run of a workflow over a source, in a directory that becomes the data set."""


def prepare_by(
    start: StartRun,
    workflow: Workflow,
    sources: Sequence[str | Path],
    out: Path,
    options: PrepareOptions,
    progress: OnProgress | None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`, by the run that `start` makes.

    Raises:
        ConfigError, DataNotFoundError, FormatError, StorageError: as for `terarec.etl.engine.prepare`.
    """
    begun = time.perf_counter()
    _check_storage(workflow, options)
    _check(workflow, options)
    source = _opened(workflow, sources, options)
    work_on = fingerprint(workflow, source, options)
    with resumable_directory(out, work_on, restart=options.restart) as journal:
        phases = Phases(journal, progress)
        run = start(workflow, source, options, phases, journal.directory)
        fitted = run.fit()
        described = fitted.dataset_spec("raw" if options.storage == "raw" else "parquet")
        spec = dataclasses.replace(described, best_auc=read_best_auc([file.path for file in source.files]))
        written = run.write(spec, fitted, out.resolve())
        if _opened(workflow, sources, options).fingerprint() != source.fingerprint():
            raise FormatError(f"{source.files[0].path}: the sources changed while they were read")
        written["bad_input"] = bad_input(written["bad_input"], phases.results)
        report = _report(spec, written, source, options, time.perf_counter() - begun)
        report = dataclasses.replace(report, spilled=tuple(run.spilled), phases=phases.reports)
        report.save(journal.directory)
        run.finish()
    return report


def _check(workflow: Workflow, options: PrepareOptions) -> None:
    check_tables(workflow, options)
    if not workflow.states:  # one that has learnt goes on as it was fitted
        check_times(workflow.spec)


def _check_storage(workflow: Workflow, options: PrepareOptions) -> None:
    """Raise where files cannot hold columns of the workflow, before anything is learnt."""
    if workflow.spec.keys and options.storage != "parquet":
        names = ", ".join(map(repr, workflow.spec.keys))
        problem = f"got {options.storage!r}, which holds no keys of 64 bits ({names}), expected 'parquet'"
        raise FieldError("", "storage", problem)
    if workflow.spec.metadata and options.storage != "parquet":
        names = ", ".join(map(repr, workflow.spec.metadata))
        problem = f"got {options.storage!r}, which holds no metadata ({names}), expected 'parquet'"
        raise FieldError("", "storage", problem)
    if workflow.spec.weight is not None and options.storage in RECORD_KINDS:
        problem = f"got {options.storage!r}, which holds no weights ({workflow.spec.weight!r})"
        raise FieldError("", "storage", f"{problem}, expected 'parquet' or 'raw'")


def fit_by(
    start: StartRun,
    workflow: Workflow,
    sources: Sequence[str | Path],
    options: PrepareOptions,
    progress: OnProgress | None,
) -> Workflow:
    """`workflow`, fitted on the training part of `sources` by the run that `start` makes.

    Raises:
        ConfigError, DataNotFoundError, FormatError, StorageError: as for `terarec.etl.engine.fit`.
    """
    _check(workflow, options)
    source = _opened(workflow, sources, options)
    with tempfile.TemporaryDirectory(prefix="terarec-") as directory:
        phases = Phases(Journal(Path(directory), {}), progress)
        return start(workflow, source, options, phases, Path(directory)).fit()


def _opened(workflow: Workflow, sources: Sequence[str | Path], options: PrepareOptions) -> Source:
    return open_source(workflow.spec.source, sources, options.bad_input, options.threads)


def _report(
    spec: DatasetSpec, written: Result, source: Source, options: PrepareOptions, seconds: float
) -> PrepareReport:
    rows = sum(written["rows"].values())
    columns = output_columns(spec)
    return PrepareReport(
        rows=rows,
        splits=written["rows"],
        input_bytes=source.num_bytes,
        seconds=seconds,
        rows_per_second=rows / seconds,
        peak_memory_bytes=memory.peak_bytes(),
        best_auc=spec.best_auc,
        columns=columns,
        inputs=tuple(
            InputColumn(name=name, missing=missing, missing_share=missing / values if values else 0.0)
            for name, (missing, values) in written["missing"].items()
        ),
        tables=table_sizes(columns),
        bad_input=BadInput(policy=options.bad_input, **written["bad_input"]),
        spilled=(),
        phases=(),
    )
