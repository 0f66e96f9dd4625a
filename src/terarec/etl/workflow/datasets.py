# SPDX-License-Identifier: Apache-2.0
"""Workflows of data sets: that of a directory, one for a data set without any, and the values behind ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import TerarecError
from terarec.etl.ops import GivenIds, Operator
from terarec.etl.values import ValueIds
from terarec.etl.workflow.plan import producer
from terarec.etl.workflow.workflow import Workflow
from terarec.formats import read_dataset
from terarec.formats.dataset import DATASET_FILE, EARLIER_ROWS
from terarec.spec import CategoricalColumn, DatasetSpec, LabelSpec, SourceColumn, SourceSpec, WorkflowSpec
from terarec.spec.dataset import MISSING_ID


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
    workflow = Workflow.load(directory / dataset.workflow, allow_import=allow_import)
    # A workflow without states prepared this data set all the same.
    workflow.earlier_rows = directory / dataset.workflow / EARLIER_ROWS
    return workflow


def identity_workflow(dataset: DatasetSpec) -> Workflow:
    """Return a workflow for a data set that no workflow made: raw columns are those of its Parquet shards.

    Dense numbers must be there, as must ids but those of columns whose `given` is false, which are 0 where they are
    missing. Lists are no longer than `hotness`; a missing key is the key of missing ones.
    """
    steps: list[GivenIds] = []
    for hotness, has_missing in dict.fromkeys((one.hotness, one.given is False) for one in dataset.categorical):
        alike = [one for one in dataset.categorical if (one.hotness, one.given is False) == (hotness, has_missing)]
        names = tuple(column.name for column in alike)
        rows = tuple(column.rows for column in alike)
        longest = hotness if hotness > 1 else None
        steps.append(GivenIds(columns=names, rows=rows, max_length=longest, zero_is_missing=has_missing))
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
        step, origin = producer(plan.operators, name, Operator.origin)
        self._operator = None if step is None else plan.operators[step]
        self._state = None if step is None else workflow.states.get(step)
        self._input = origin if self._operator is None else self._operator.input_of(origin) or ""
        self.kind: str | None = None
        self.num_reserved = 0
        self.vocabulary: ValueIds | None = None
        if self._operator is not None:
            self.kind = self._operator.kind
            self.num_reserved = self._operator.reserved_ids(plan.types[-1][name].kind == "id")
            self.vocabulary = self._operator.vocabularies(self._state).get(origin)

    def values(self, ids: NDArray[np.int64]) -> Sequence[str]:
        """Return the value of each of ``ids int64[n]``, as text."""
        if self._operator is not None and self.num_reserved:
            return self._operator.describe_ids(self._input, ids, self._state)
        return [str(number) for number in ids]


_logger = logging.getLogger(__name__)


class ValueNames:
    """The raw values behind the ids of categorical columns of a data set, for slices and kept columns.

    The workflow is read when a value is first asked for. If it cannot be, a warning says why, and no column has names.

    Args:
        directory: Directory with ``dataset.json``, or of other data, whose columns have no names.
        allow_import: Packages whose functions the steps may name, as for `Workflow.load`.
    """

    def __init__(self, directory: Path, *, allow_import: Sequence[str] = ()) -> None:
        self._directory, self._allow_import = directory, tuple(allow_import)
        self._columns: dict[str, IdValues] = {}

    def __call__(self, column: str, ids: NDArray[np.int64]) -> Sequence[str | None] | None:
        """Return the value of each of ``ids int64[n]`` as text, None for a missing one; None if a column has no names.

        Metadata columns have values of their own, and columns of given ids have no others.
        """
        if column not in self._named or self._workflow is None:
            return None
        if column not in self._columns:
            self._columns[column] = IdValues(self._workflow, column)
        values = self._columns[column]
        if not values.num_reserved:
            return None
        named = zip(ids.tolist(), values.values(ids), strict=True)
        return [None if number == MISSING_ID else name for number, name in named]

    @cached_property
    def _named(self) -> frozenset[str]:
        if not (self._directory / DATASET_FILE).is_file():
            return frozenset()
        dataset = read_dataset(self._directory)
        if dataset.workflow is None:
            return frozenset()
        single = {column.name for column in dataset.categorical if column.hotness == 1}
        return frozenset(single.difference(column.name for column in dataset.metadata))

    @cached_property
    def _workflow(self) -> Workflow | None:
        try:
            return workflow_of(self._directory, allow_import=self._allow_import)
        except TerarecError as error:
            _logger.warning("values are shown as ids, not as names: %s", error)
            return None
