"""Workflows of data sets: that of a directory, one for a data set without any, and the values behind ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.etl.ops import GivenIds, Operator
from terarec.etl.values import ValueIds
from terarec.etl.workflow.plan import producer
from terarec.etl.workflow.workflow import Workflow
from terarec.formats import read_dataset
from terarec.spec import CategoricalColumn, DatasetSpec, LabelSpec, SourceColumn, SourceSpec, WorkflowSpec


def workflow_of(directory: Path, *, allow_import: Sequence[str] = ()) -> Workflow:
    """Return the workflow of the data set in `directory`, whose shards are not needed.

    Args:
        directory: Directory with ``dataset.json``.
        allow_import: Packages whose functions the steps may name, as for `Workflow.load`.

    Raises:
        DataNotFoundError: No data set, or a file of the workflow that it names is missing.
        FormatError: A file is damaged.
        ConfigError: A step names a function that is not allowed.
    """
    dataset = read_dataset(directory)
    if dataset.workflow is None:
        return identity_workflow(dataset)
    return Workflow.load(directory / dataset.workflow, allow_import=allow_import)


def identity_workflow(dataset: DatasetSpec) -> Workflow:
    """Return a workflow for a data set that no workflow made: raw columns are those of its Parquet shards.

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


class IdValues:
    """The values behind the ids of one column of a fitted workflow.

    Attributes:
        kind: Kind of the step that makes the values; None where the source does.
        num_reserved: Number of the first ids without a value of their own: 0 for missing ones, then the rare or unseen
            ones; 0 where ids have no such order.
        vocabulary: Vocabulary that made the ids; None where there is none.

    Args:
        workflow: A fitted workflow.
        name: Column after the last step.
    """

    def __init__(self, workflow: Workflow, name: str) -> None:
        plan = workflow.plan
        step, made = producer(plan.operators, name, Operator.origin)
        self._operator = None if step is None else plan.operators[step]
        self._state = None if step is None else workflow.states.get(step)
        self._input = made if self._operator is None else self._operator.input_of(made) or ""
        self.kind: str | None = None
        self.num_reserved = 0
        self.vocabulary: ValueIds | None = None
        if self._operator is not None:
            self.kind = self._operator.kind
            self.num_reserved = self._operator.reserved_ids(plan.types[-1][name].kind == "id")
            self.vocabulary = self._operator.vocabularies(self._state).get(made)

    def values(self, ids: NDArray[np.int64]) -> Sequence[str]:
        """Return the value of each of ``ids int64[n]``, as text."""
        if self._operator is not None and self.num_reserved:
            return self._operator.describe_ids(self._input, ids, self._state)
        return [str(number) for number in ids]
