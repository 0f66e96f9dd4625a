"""Preparation on Spark: the entry points. PySpark is imported when they are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from terarec.etl.engine.preparation import StartRun, fit_with, prepare_with
from terarec.etl.engine.report import OnProgress, PrepareReport
from terarec.etl.spark.accepted import check_accepted
from terarec.etl.spark.session import check_spark, spark_session
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions


def prepare(
    workflow: Workflow,
    sources: Sequence[str | Path],
    out: Path,
    options: PrepareOptions,
    progress: OnProgress | None = None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`, on a Spark cluster.

    ``<out>.partial`` takes the work; a killed run is gone on with by the same call after its last whole phase.

    Args:
        workflow: what to do; if it is fitted, rows are transformed only.
        sources: files, directories, patterns or URLs, in order, that every executor can read.
        out: directory to make, that the driver and every executor see under this path; it must not exist, or be empty.
        options: how.
        progress: called about every second, from a thread beside.

    Raises:
        ClusterError: the cluster cannot be reached, or gave up. Whole phases are kept for the same call to go on with.
        ConfigError: what Spark cannot do of the workflow; options or a split that do not fit the sources; `out` holds
            something, or is being written.
        DataNotFoundError: a source does not exist.
        FormatError: a damaged source, one that changed meanwhile, or bad input under the policy "raise".
        MissingDependencyError: PySpark or Java are missing.
        StorageError: a disk is full, or too little memory.
    """
    check_accepted(workflow.spec)
    with _runs(options) as start:
        return prepare_with(start, workflow, sources, out, options, progress)


def fit(
    workflow: Workflow, sources: Sequence[str | Path], options: PrepareOptions, progress: OnProgress | None = None
) -> Workflow:
    """`workflow`, fitted on the training part of `sources` on a Spark cluster.

    What phases hand on goes to a directory beside the system's temporary files, which every executor must see: on a
    cluster set ``TMPDIR`` to a shared one.

    Raises:
        ClusterError, ConfigError, DataNotFoundError, FormatError, MissingDependencyError, StorageError: as for
            `prepare`.
    """
    check_accepted(workflow.spec)
    with _runs(options) as start:
        return fit_with(start, workflow, sources, options, progress)


@contextmanager
def _runs(options: PrepareOptions) -> Iterator[StartRun]:
    """What makes runs on a session, which is there for the block."""
    check_spark()
    from functools import partial

    from terarec.etl.spark.failures import in_one_line
    from terarec.etl.spark.run import SparkRun

    with in_one_line(), spark_session(options.spark_master, options.spark_conf) as spark:
        yield partial(SparkRun, spark)
