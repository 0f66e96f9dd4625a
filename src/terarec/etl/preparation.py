"""Fit a workflow and write data sets with it, by the engine that the options name. Described in docs/preparing.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terarec.etl import engine
from terarec.etl.engine import OnProgress, PrepareReport
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions


def prepare(
    workflow: Workflow,
    sources: Sequence[str | Path],
    out: Path | str,
    options: PrepareOptions | None = None,
    progress: OnProgress | None = None,
) -> PrepareReport:
    """Fit `workflow`, unless it is fitted, and write the data set of `sources`.

    Args:
        workflow: Steps, split and result columns; a fitted one only transforms rows.
        sources: Files, directories, patterns or URLs, in order.
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
    chosen = options or PrepareOptions()
    if chosen.engine == "local":
        return engine.prepare(workflow, sources, Path(out), chosen, progress)
    from terarec.etl import spark  # not loaded for local work

    return spark.prepare(workflow, sources, Path(out), chosen, progress)


def fit(
    workflow: Workflow,
    sources: Sequence[str | Path],
    options: PrepareOptions | None = None,
    progress: OnProgress | None = None,
) -> Workflow:
    """Return `workflow` fitted on the training part of `sources`; arguments and errors as for `prepare`."""
    chosen = options or PrepareOptions()
    if chosen.engine == "local":
        return engine.fit(workflow, sources, chosen, progress)
    from terarec.etl import spark  # not loaded for local work

    return spark.fit(workflow, sources, chosen, progress)
