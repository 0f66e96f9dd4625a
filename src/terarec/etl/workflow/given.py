"""The workflow that encodes raw values as those of a data set were: the saved one, or one that takes them as given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from terarec.etl.ops import GivenIds
from terarec.etl.workflow.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import CategoricalColumn, DatasetSpec, LabelSpec, SourceColumn, SourceSpec, WorkflowSpec


def workflow_of(directory: Path, *, allow_import: Sequence[str] = ()) -> Workflow:
    """The workflow of the data set in `directory`, whose shards are not needed.

    Args:
        directory: with ``dataset.json``.
        allow_import: packages whose functions the steps may name, as for `Workflow.load`.

    Raises:
        DataNotFoundError: no data set, or a file of the workflow that it names is missing.
        FormatError: a file is damaged.
        ConfigError: a step names a function that is not allowed.
    """
    dataset = read_dataset(directory)
    if dataset.workflow is None:
        return given_workflow(dataset)
    return Workflow.load(directory / dataset.workflow, allow_import=allow_import)


def given_workflow(dataset: DatasetSpec) -> Workflow:
    """The workflow of a data set that none made: raw columns hold what its Parquet shards hold.

    Dense numbers and ids must be there, and lists no longer than `hotness`; a missing key is the key of missing ones.
    """
    steps: list[GivenIds] = []
    for hotness in dict.fromkeys(column.hotness for column in dataset.categorical):
        alike = [column for column in dataset.categorical if column.hotness == hotness]
        names = tuple(column.name for column in alike)
        rows = tuple(column.rows for column in alike)
        steps.append(GivenIds(columns=names, rows=rows, max_length=hotness if hotness > 1 else None))
    numbers = (*(label.name for label in dataset.labels), *(column.name for column in dataset.dense))
    columns = (
        *(SourceColumn(name=name, type="number") for name in numbers),
        *(_source_column(column) for column in dataset.categorical),
    )
    return Workflow.of(
        WorkflowSpec(
            name=dataset.name,
            source=SourceSpec(format="parquet", columns=columns),
            steps=tuple(steps),
            labels=tuple(LabelSpec(name=label.name) for label in dataset.labels),
            dense=tuple(column.name for column in dataset.dense),
            categorical=tuple(column.name for column in dataset.categorical if column.rows is not None),
            keys=tuple(column.name for column in dataset.categorical if column.rows is None),
        )
    )


def _source_column(column: CategoricalColumn) -> SourceColumn:
    return SourceColumn(name=column.name, type="integer", separator="," if column.hotness > 1 else None)
