"""Preparation on a Spark cluster, by the parser, the operators and the states of the local engine.

Spark splits the sources, runs tasks, repeats those that fail, and shuffles; what a task does to its rows is the code of
the local engine, so states and data sets are the same. PySpark is imported when `prepare` or `fit` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from terarec.etl.engine.preparation import StartRun, fit_with, prepare_with
from terarec.etl.engine.report import OnProgress, PrepareReport
from terarec.etl.spark.session import check_spark, spark_session
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions

__all__ = ["fit", "prepare"]


def prepare(
    workflow: Workflow,
    sources: Sequence[str | Path],
    out: Path,
    options: PrepareOptions,
    progress: OnProgress | None = None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`, on a Spark cluster.

    ``<out>.partial`` takes the work; the same call resumes a killed run after its last complete phase.

    Args:
        workflow: Steps; if they are fitted, rows are transformed only.
        sources: Files, directories, patterns or URLs, in order, that every executor can read.
        out: New directory that the driver and every executor see under this path; it must not exist, or be empty.
        options: Settings of the preparation.
        progress: Called about every second, from another thread.

    Raises:
        ClusterError: The cluster cannot be reached, or gave up. The same call resumes after the last complete phase.
        ConfigError: Options or a split that do not fit the sources; `out` holds something, or is being written.
        DataNotFoundError: A source does not exist.
        FormatError: A damaged source, one that changed meanwhile, or bad input under the policy "raise".
        MissingDependencyError: PySpark or Java are missing.
        StorageError: A disk is full, or too little memory.
    """
    with _runs(options) as start:
        return prepare_with(start, workflow, sources, out, options, progress)


def fit(
    workflow: Workflow, sources: Sequence[str | Path], options: PrepareOptions, progress: OnProgress | None = None
) -> Workflow:
    """Return `workflow`, fitted on the training part of `sources` on a Spark cluster.

    Executors load states from the system's directory of temporary files: on a cluster set ``TMPDIR`` to a shared one.

    Raises:
        ClusterError, ConfigError, DataNotFoundError, FormatError, MissingDependencyError, StorageError: As for
            `prepare`.
    """
    with _runs(options) as start:
        return fit_with(start, workflow, sources, options, progress)


@contextmanager
def _runs(options: PrepareOptions) -> Iterator[StartRun]:
    """A function that starts a run on a session, which exists for the block."""
    check_spark()
    from functools import partial

    from terarec.etl.spark.errors import spark_errors
    from terarec.etl.spark.run import SparkRun

    with spark_errors(), spark_session(options.spark_master, options.spark_conf) as spark:
        yield partial(SparkRun, spark)
