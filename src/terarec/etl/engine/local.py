"""The single-machine engine: fits a workflow on the training part of logs, and writes the data set of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terarec.etl.engine.preparation import fit_by, prepare_by
from terarec.etl.engine.progress import OnProgress
from terarec.etl.engine.report import PrepareReport
from terarec.etl.engine.run import Run
from terarec.etl.workflow import Workflow
from terarec.spec import PrepareOptions


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
    return prepare_by(Run, workflow, sources, out, options, progress)


def fit(
    workflow: Workflow, sources: Sequence[str | Path], options: PrepareOptions, progress: OnProgress | None = None
) -> Workflow:
    """`workflow`, fitted on the training part of `sources`; nothing is written but files that spill, which go again.

    Raises:
        ConfigError, DataNotFoundError, FormatError, StorageError: as for `prepare`.
    """
    return fit_by(Run, workflow, sources, options, progress)
