"""Raw rows, encoded by the workflow that made a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from terarec.errors import ConfigError
from terarec.etl.drift.summary import DataSummary, summarize
from terarec.etl.source import Source, open_source
from terarec.etl.workflow import Workflow, workflow_of
from terarec.formats import ColumnBlock


def summarize_raw(files: Sequence[str | Path], reference: Path, *, allow_import: Sequence[str] = ()) -> DataSummary:
    """The summary of raw logs as the fitted workflow of the data set `reference` encodes them.

    Values that this workflow never saw come out as rare or unseen. Nothing is split, and nothing is learnt.

    Args:
        files: files, directories, globs and URLs in the workflow's source format.
        reference: a data set that a workflow made.
        allow_import: packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.

    Raises:
        ConfigError: the steps of `reference` look at other rows, or name a function that is not allowed.
        DataNotFoundError: a file that is not there.
        FormatError: bad input, with its file and line.
    """
    workflow = workflow_of(reference, allow_import=allow_import)
    if workflow.plan.grouped_steps:
        steps = ", ".join(type(workflow.spec.steps[step]).__name__ for step in workflow.plan.grouped_steps)
        raise ConfigError(f"{reference}: its workflow looks at other rows ({steps}), expected the logs as a data set")
    workflow = workflow.with_sample_columns(weight=None, metadata=())  # which are not compared, and may be bad here
    source = open_source(workflow.spec.source, files)
    dataset = workflow.dataset_spec()
    name = ", ".join(str(path).rstrip("/").rpartition("/")[2] for path in files)
    return summarize(name, dataset, _blocks(workflow, source), workflow)


def _blocks(workflow: Workflow, source: Source) -> Iterator[ColumnBlock]:
    for block in source.blocks():
        yield workflow.encode_block(workflow.apply(block))
