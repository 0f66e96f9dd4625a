# SPDX-License-Identifier: Apache-2.0
"""Fit a workflow, and write data sets with it, by the engine of the options. See docs/preparing.md."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from terarec.errors import ConfigError, FormatError
from terarec.etl.engine.local import LocalRun
from terarec.etl.engine.phases import OnProgress, Phases
from terarec.etl.engine.report import (
    BadInput,
    FileRows,
    MissingValues,
    PrepareReport,
    add_bad_input,
    output_columns,
    table_sizes,
)
from terarec.etl.engine.run import StartRun
from terarec.etl.sink import RECORD_STORAGES
from terarec.etl.source.files import numbered_order
from terarec.etl.source.source import Source, Sources, check_sources, open_source, read_best_auc
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.earlier_rows import open_earlier_rows
from terarec.etl.workflow.plan import check_times
from terarec.etl.workflow.workflow import state_name
from terarec.io.directories import Journal, resumable_dir
from terarec.io.opening import sha256_of
from terarec.kernels import memory
from terarec.spec import PrepareOptions, to_data
from terarec.spec.checks import FieldError
from terarec.spec.dataset import DATASET_STORAGES, DatasetStorage
from terarec.spec.preparation import Storage

_FREE_OPTIONS = ("threads", "memory_bytes", "restart", "spark_master", "spark_conf")
"""Options that change no result, so that an interrupted run may be resumed with others."""


def prepare(
    workflow: Workflow,
    sources: Sources,
    out: Path | str,
    options: PrepareOptions | None = None,
    progress: OnProgress | None = None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`.

    Args:
        workflow: Steps, split and result columns; a fitted one only transforms rows. Steps that look at other rows
            continue from the rows of the files that it was prepared with before (`PrepareOptions.earlier_rows`).
        sources: Files, directories, patterns or URLs, in order; or a table in memory: a DataFrame of pandas or Polars,
            or a table, record batch or reader of Arrow, which has the columns by name, whatever the workflow's format.
        out: Directory to make, which will hold the fitted workflow and the report, too.
        options: Engine, storage, threads, memory and error policy.
        progress: Callback for the progress of each phase.

    Raises:
        ClusterError: The cluster cannot be reached, or gave up.
        ConfigError: Options or a split that do not fit the sources; `out` holds something, or is being written.
        DataNotFoundError: A source does not exist.
        FormatError: A damaged source, or bad input under the policy "raise".
        MissingDependencyError: PySpark or Java are missing.
        StorageError: The disk is full.
    """
    options, out = options or PrepareOptions(), Path(out)
    checked = check_sources(sources)
    _warn_of_order(checked)
    _check_storage(workflow, options)
    source = _open(workflow, checked, options)
    with (
        _runs(options) as start,
        resumable_dir(out, run_fingerprint(workflow, source, options), restart=options.restart) as journal,
    ):
        inputs = _inputs(workflow, source, options)
        begun = time.perf_counter()  # a session of Spark has started by now
        phases = Phases(journal, progress)
        run = start(workflow, source, options, phases, journal.directory)
        fitted = run.fit()
        described = fitted.dataset_spec(dataset_storage(options.storage))
        best_auc = None if isinstance(checked, pa.Table) else read_best_auc([file.path for file in source.files])
        spec = dataclasses.replace(described, best_auc=best_auc)
        written = run.write(spec, out.resolve())
        # Each pass reads the files again: states and rows must come from the same content.
        for kind, text in _inputs(workflow, _open(workflow, checked, options), options).items():
            if text != inputs[kind]:
                place = source.files[0].path if kind == "sources" else kind
                raise FormatError(place, f"the {kind} changed while they were read")
        # Steps that join the same side table read it alike: it counts once.
        tables = {
            result["bad_table"]["table"]: result["bad_table"] for result in phases.results if "bad_table" in result
        }
        bad_input = add_bad_input([*tables.values(), written["bad_input"]])
        columns, rows, seconds = output_columns(spec), sum(written["rows"].values()), time.perf_counter() - begun
        report = PrepareReport(
            rows=rows,
            splits=written["rows"],
            files=tuple(
                FileRows(file=file.path, splits=rows) for file, rows in zip(source.files, written["files"], strict=True)
            ),
            input_bytes=source.num_bytes,
            seconds=seconds,
            rows_per_second=rows / seconds,
            peak_memory_bytes=memory.peak_bytes(),
            best_auc=spec.best_auc,
            columns=columns,
            inputs=tuple(
                MissingValues(name=name, missing=missing, missing_share=missing / values if values else 0.0)
                for name, (missing, values) in written["missing"].items()
            ),
            tables=table_sizes(columns),
            bad_input=BadInput(policy=options.bad_input, **bad_input),
            earlier_rows=sum(result.get("earlier_rows", 0) for result in phases.results),
            late_rows=sum(result.get("late_rows", 0) for result in phases.results),
            spilled=tuple(step for result in phases.results for step in result.get("spilled", ())),
            phases=tuple(phases.reports),
        )
        report.save(journal.directory)
        # After the report is written: a killed run would resume from the files of the phases.
        run.finish()
    return report


def fit(
    workflow: Workflow,
    sources: Sources,
    options: PrepareOptions | None = None,
    progress: OnProgress | None = None,
) -> Workflow:
    """Return `workflow` fitted on the training part of `sources`; arguments and errors as for `prepare`.

    No rows are prepared, so that a preparation by the result begins without earlier rows.
    Only temporary files are written. On a cluster executors load states from the system's directory of temporary files:
    set ``TMPDIR`` to a shared one.
    """
    options = options or PrepareOptions()
    checked = check_sources(sources)
    _warn_of_order(checked)
    source = _open(workflow, checked, options)
    with _runs(options) as start, tempfile.TemporaryDirectory(prefix="terarec-") as directory:
        phases = Phases(Journal(Path(directory), {}), progress)
        return start(workflow, source, options, phases, Path(directory)).fit()


def _warn_of_order(sources: Sequence[str | Path] | pa.Table) -> None:
    """Warn of sources that are listed as texts: a list is in the order of its caller, who may have sorted names."""
    if isinstance(sources, pa.Table):
        return
    listed = list(map(str, sources))
    for path, other in zip(listed, numbered_order(listed), strict=True):
        if path != other:
            warnings.warn(
                f"sources: {path} stands where {other} would in the order of the numbers in the names; the rows are "
                "taken in the order of the list (a directory or a pattern gives that of the numbers)",
                stacklevel=3,
            )
            return


@contextmanager
def _runs(options: PrepareOptions) -> Iterator[StartRun]:
    """Yield a function that starts a run of the engine; Spark's session ends with the block."""
    if options.engine == "local":
        yield LocalRun
        return
    from terarec.etl.spark import spark_runs  # not loaded for local work

    with spark_runs(options) as start:
        yield start


def run_fingerprint(workflow: Workflow, source: Source, options: PrepareOptions) -> dict[str, str]:
    """Return a digest of each part of a run that must be the same when an interrupted run is resumed."""
    chosen = {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE_OPTIONS}
    return {
        "workflow": _digest([to_data(workflow.spec), workflow.is_fitted, *_state_digests(workflow)]),
        "options": _digest(chosen),
        **_inputs(workflow, source, options),
    }


def _state_digests(workflow: Workflow) -> Sequence[str]:
    """Return a digest of each file of the states: steps of one spec may be fitted to other rows."""
    digests: list[str] = []
    for step, state in sorted(workflow.states.items()):
        with tempfile.TemporaryDirectory(prefix="terarec-") as directory:
            state.save(Path(directory), state_name(workflow.plan, step))
            digests += map(sha256_of, sorted(Path(directory).iterdir()))
    return digests


def _inputs(workflow: Workflow, source: Source, options: PrepareOptions) -> dict[str, str]:
    """Return the kinds of files that a run reads, each with a text that changes when one of its files does."""
    plan, earlier = workflow.plan, open_earlier_rows(workflow.plan, workflow.earlier_rows, options.earlier_rows)
    tables = {str(plan.operators[step].side_table) for step in plan.table_steps if step not in workflow.states}
    listed = [
        open_source(workflow.spec.tables[name], options.tables[name]).fingerprint()
        for name in sorted(tables.intersection(options.tables))
    ]
    return {
        "sources": source.fingerprint(),
        "side tables": _digest(listed),
        "earlier rows": "" if earlier is None else earlier.fingerprint(),
    }


def _open(workflow: Workflow, sources: Sequence[str | Path] | pa.Table, options: PrepareOptions) -> Source:
    """Open the sources of a workflow that can be fitted with these options."""
    for name in options.tables:
        if name not in workflow.spec.tables:
            known = ", ".join(map(repr, workflow.spec.tables)) or "no table"
            raise ConfigError(f"side table {name!r}", f"the workflow joins none of this name, expected {known}")
    if isinstance(sources, pa.Table) and options.engine != "local":
        raise FieldError("", "engine", f"got {options.engine!r} and a table in memory, expected 'local', or files")
    if not workflow.states:  # a fitted one continues as it was fitted
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
    if workflow.spec.weight is not None and options.storage in RECORD_STORAGES:
        problem = f"got {options.storage!r}, which holds no weights ({workflow.spec.weight!r})"
        raise FieldError("", "storage", f"{problem}, expected 'parquet' or 'raw'")


def _digest(data: object) -> str:
    # `default` spells what JSON lacks, such as paths.
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
