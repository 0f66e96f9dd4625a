"""Preparation on Spark: the entry points. PySpark is imported when they are called."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from terarec.errors import ConfigError
from terarec.etl.engine.fingerprint import fingerprint
from terarec.etl.engine.options import PrepareOptions
from terarec.etl.engine.phases import Phases
from terarec.etl.engine.progress import OnProgress
from terarec.etl.engine.report import BadInput, PrepareReport, output_columns, table_sizes
from terarec.etl.generated import read_best_auc
from terarec.etl.source import Source, open_source
from terarec.etl.spark.session import spark_session
from terarec.etl.workflow import Workflow
from terarec.formats import Journal, resumable_directory, write_dataset
from terarec.kernels import memory
from terarec.spec import DatasetSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from terarec.etl.spark.run import SparkRun

WORK = "work"
"""Directory of what phases hand on through the disk; gone at the end."""
WORKFLOW = "workflow"
"""Directory of the fitted workflow in a data set."""


def prepare(
    workflow: Workflow,
    sources: Sequence[str | Path],
    out: Path,
    options: PrepareOptions,
    progress: OnProgress | None = None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`, on a Spark cluster.

    Args:
        workflow: what to do; if it is fitted, rows are transformed only.
        sources: files, directories, patterns or URLs, in order, that every executor can read.
        out: directory to make, that the driver and every executor see under this path; it must not exist, or be empty.
        options: how.
        progress: called after every phase.

    Raises:
        ConfigError: options or a split that do not fit the sources; `out` holds something, or is being written.
        DataNotFoundError: a source does not exist.
        FormatError: a damaged source, or bad input under the policy "raise".
        MissingDependencyError: PySpark or Java are missing.
        StorageError: the disk is full.
    """
    begun = time.perf_counter()
    if options.storage != "parquet":
        raise ConfigError(
            f"storage: got {options.storage!r}, expected 'parquet' (engine 'spark'; 'terarec convert' makes others)"
        )
    with _session(options) as spark:
        source = open_source(workflow.spec.source, sources, options.bad_input, options.threads)
        with resumable_directory(out, fingerprint(workflow, source, options), restart=True) as journal:
            from terarec.etl.spark.run import SparkRun

            phases = Phases(journal, progress)
            run = SparkRun(spark, workflow, _paths(source), options, journal.directory / WORK, phases)
            fitted = run.fit()
            described = dataclasses.replace(
                fitted.dataset_spec(), best_auc=read_best_auc([file.path for file in source.files])
            )
            dataset = run.write(described, journal.directory)
            fitted.save(journal.directory / WORKFLOW)
            write_dataset(dataset, journal.directory, location=out.resolve())
            report = _report(run, dataset, source, time.perf_counter() - begun)
            report.save(journal.directory)
            shutil.rmtree(journal.directory / WORK, ignore_errors=True)
    return report


def fit(
    workflow: Workflow, sources: Sequence[str | Path], options: PrepareOptions, progress: OnProgress | None = None
) -> Workflow:
    """`workflow`, fitted on the training part of `sources` on a Spark cluster.

    What phases hand on goes to a directory beside the system's temporary files, which every executor must see: on a
    cluster set ``TMPDIR`` to a shared one.

    Raises:
        ConfigError, DataNotFoundError, FormatError, MissingDependencyError, StorageError: as for `prepare`.
    """
    with _session(options) as spark, tempfile.TemporaryDirectory(prefix="terarec-") as directory:
        from terarec.etl.spark.run import SparkRun

        source = open_source(workflow.spec.source, sources, options.bad_input, options.threads)
        phases = Phases(Journal(Path(directory), {}), progress)
        return SparkRun(spark, workflow, _paths(source), options, Path(directory) / WORK, phases).fit()


@contextmanager
def _session(options: PrepareOptions) -> Iterator[SparkSession]:
    with spark_session(options.spark_master, options.spark_conf) as spark:
        from pyspark.errors import PySparkException

        from terarec.etl.spark.expressions import told

        try:
            yield spark
        except PySparkException as error:
            raise told(error) from error


def _paths(source: Source) -> list[str]:
    return [file.path if "://" in file.path else str(Path(file.path).resolve()) for file in source.files]


def _report(run: SparkRun, dataset: DatasetSpec, source: Source, seconds: float) -> PrepareReport:
    rows = sum(run.split_rows.values())
    columns = output_columns(dataset)
    return PrepareReport(
        rows=rows,
        splits=run.split_rows,
        input_bytes=sum(file.bytes for file in source.files),
        seconds=seconds,
        rows_per_second=rows / seconds,
        peak_memory_bytes=memory.peak_bytes(),
        best_auc=dataset.best_auc,
        columns=columns,
        inputs=run.inputs(),
        tables=table_sizes(columns),
        bad_input=BadInput(policy=run.options.bad_input, counts=run.faults.counts(), first=run.faults.first()),
        spilled=(),
        phases=run.phases.reports,
    )
