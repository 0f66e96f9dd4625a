"""Steps of every engine around its phases: the partial directory, its journal, and the report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from terarec.errors import ConfigError, FormatError
from terarec.etl.engine.fitting import add_bad_input
from terarec.etl.engine.report import (
    BadInput,
    InputColumn,
    OnProgress,
    PhaseReport,
    PrepareReport,
    ProgressMeter,
    output_columns,
    table_sizes,
)
from terarec.etl.sink import RECORD_KINDS
from terarec.etl.source import Source, open_source
from terarec.etl.source.files import read_best_auc
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.plan import check_times
from terarec.io import Journal, resumable_dir
from terarec.kernels import memory
from terarec.spec import DatasetSpec, FieldError, PrepareOptions, to_data
from terarec.spec.dataset import DATASET_STORAGES, DatasetStorage
from terarec.spec.workflow import Storage

WORK = "work"
"""Directory of what phases pass on through the disk."""
WORKFLOW = "workflow"
"""Directory of the fitted workflow in a data set."""
_FREE_OPTIONS = ("threads", "memory_bytes", "restart", "spark_master", "spark_conf")
"""Options that change no result, so that an interrupted run may be resumed with others."""

Result: TypeAlias = dict[str, Any]
"""Result of a phase, as JSON."""


class EngineRun(Protocol):
    """The phases of one preparation; complete ones are not run again.

    It saves the workflow, and the states that its steps are fitted to, in `WORKFLOW` of its directory.

    Attributes:
        spilled: Names of the steps whose statistics did not fit in memory.
    """

    spilled: list[str]

    def fit(self) -> Workflow:
        """Return the fitted workflow."""
        ...

    def write(self, spec: DatasetSpec, fitted: Workflow, location: Path) -> Result:
        """Write all rows as `spec` describes them into the directory, which will lie at `location`.

        Returns:
            "rows": split -> rows; "missing": column of the sources -> its missing and all values; "bad_input": "counts"
            of each kind, and the "first" faults.
        """
        ...

    def finish(self) -> None:
        """Remove what phases passed on."""
        ...


class Phases:
    """Runs phases and commits them, so that each is run once, by this run or by an interrupted one before it.

    Args:
        journal: Record of the phases that are done.
        progress: Callback, called after every block.

    Attributes:
        meter: Progress meter, to be called for every block.
        reports: Report of each phase.
        results: Result of each phase.
    """

    def __init__(self, journal: Journal, progress: OnProgress | None) -> None:
        self.meter = ProgressMeter(progress)
        self.reports: list[PhaseReport] = []
        self.results: list[Result] = []
        self._journal = journal

    def run(self, name: str, work: Callable[[], Result], num_bytes: int) -> Result:
        """Return the result of phase `name`, computed by `work` unless it is done already.

        Args:
            name: Name of the phase.
            work: Function that does it; its result goes to the journal.
            num_bytes: Bytes of the sources that it reads.
        """
        known = self._journal.result(name)
        if known is not None:
            self.meter.skip(num_bytes)
            report, result = PhaseReport(**{**known["report"], "resumed": True}), dict(known["result"])
        else:
            self.meter.begin(name)
            result = work()
            report = self.meter.end()
            self._journal.commit(name, {"report": dataclasses.asdict(report), "result": result})
        self.reports.append(report)
        self.results.append(result)
        return result


StartRun: TypeAlias = Callable[[Workflow, Source, PrepareOptions, Phases, Path], EngineRun]
"""Makes the run of a workflow over a source, in a directory that becomes the data set."""


def prepare_with(
    start: StartRun,
    workflow: Workflow,
    sources: Sequence[str | Path],
    out: Path,
    options: PrepareOptions,
    progress: OnProgress | None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`, by the run that `start` makes.

    Raises:
        ConfigError, DataNotFoundError, FormatError, StorageError: As for `terarec.etl.prepare`.
    """
    begun = time.perf_counter()
    _check_storage(workflow, options)
    source = _open(workflow, sources, options)
    with resumable_dir(out, fingerprint(workflow, source, options), restart=options.restart) as journal:
        phases = Phases(journal, progress)
        run = start(workflow, source, options, phases, journal.directory)
        fitted = run.fit()
        described = fitted.dataset_spec(dataset_storage(options.storage))
        spec = dataclasses.replace(described, best_auc=read_best_auc([file.path for file in source.files]))
        written = run.write(spec, fitted, out.resolve())
        # Each pass reads the files anew: states and rows must come from the same content.
        if _open(workflow, sources, options).fingerprint() != source.fingerprint():
            raise FormatError(source.files[0].path, "the sources changed while they were read")
        # Steps that join the same side table read it alike: it counts once.
        tables = {found["bad_table"]["table"]: found["bad_table"] for found in phases.results if "bad_table" in found}
        bad_input = add_bad_input([*tables.values(), written["bad_input"]])
        columns, rows, seconds = output_columns(spec), sum(written["rows"].values()), time.perf_counter() - begun
        report = PrepareReport(
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
            bad_input=BadInput(policy=options.bad_input, **bad_input),
            spilled=tuple(run.spilled),
            phases=tuple(phases.reports),
        )
        report.save(journal.directory)
        run.finish()
    return report


def fit_with(
    start: StartRun,
    workflow: Workflow,
    sources: Sequence[str | Path],
    options: PrepareOptions,
    progress: OnProgress | None,
) -> Workflow:
    """Return `workflow`, fitted on the training part of `sources` by the run that `start` makes.

    Raises:
        ConfigError, DataNotFoundError, FormatError, StorageError: As for `terarec.etl.fit`.
    """
    source = _open(workflow, sources, options)
    with tempfile.TemporaryDirectory(prefix="terarec-") as directory:
        phases = Phases(Journal(Path(directory), {}), progress)
        return start(workflow, source, options, phases, Path(directory)).fit()


def fingerprint(workflow: Workflow, source: Source, options: PrepareOptions) -> dict[str, str]:
    """Return what an interrupted run must have in common with the one that resumes it, a digest for each part."""
    chosen = {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE_OPTIONS}
    return {
        "workflow": _digest([to_data(workflow.spec), workflow.is_fitted]),
        "options": _digest(chosen),
        "sources": source.fingerprint(),
    }


def _open(workflow: Workflow, sources: Sequence[str | Path], options: PrepareOptions) -> Source:
    """Open the sources of a workflow that can be fitted with these options."""
    for name in options.tables:
        if name not in workflow.spec.tables:
            known = ", ".join(map(repr, workflow.spec.tables)) or "no table"
            raise ConfigError(f"side table {name!r}", f"the workflow joins none of this name, expected {known}")
    if not workflow.states:  # a fitted one goes on as it was fitted
        check_times(workflow.spec)
    return open_source(workflow.spec.source, sources, options.bad_input, options.threads, options.limit)


def dataset_storage(storage: Storage) -> DatasetStorage:
    """Return the storage of the data set's description; HugeCTR's files have that of Parquet."""
    return next((known for known in DATASET_STORAGES if known == storage), "parquet")


def _check_storage(workflow: Workflow, options: PrepareOptions) -> None:
    """Raise where files cannot hold columns of the workflow, before anything is fitted."""
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


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
