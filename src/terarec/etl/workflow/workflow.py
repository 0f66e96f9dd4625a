"""A feature workflow: its definition, its fitted state, and its transform of rows. Described in docs/workflows.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType, Rows
from terarec.etl.ops import GivenIds, Operator, State
from terarec.etl.values import ValueIds
from terarec.etl.workflow.plan import Plan, plan, producer
from terarec.etl.workflow.raw_values import RawValues
from terarec.etl.workflow.saved import load_states, read_workflow, save_states, write_workflow
from terarec.etl.workflow.serving import EncodedRecords, RecordEncoder
from terarec.etl.workflow.transform import column_block, data_set, state_of, with_metadata
from terarec.formats import ColumnBlock, read_dataset
from terarec.spec import CategoricalColumn, DatasetSpec, LabelSpec, SourceColumn, SourceSpec, Split, WorkflowSpec
from terarec.spec.dataset import DatasetStorage


class Workflow:
    """Steps from raw rows to a data set.

    Attributes:
        spec: Source, steps, split and result columns.
        plan: Order of the passes and of the steps in them.
        states: Step -> state of each fitted step; empty before the workflow is fitted.

    Args: the fields of `WorkflowSpec`; lists are taken as tuples. `of` takes its version along, and
        `with_sample_columns` adds weight and metadata.

    Raises:
        ConfigError: A field is wrong, or steps do not fit together.
    """

    def __init__(
        self,
        steps: Sequence[Operator],
        *,
        source: SourceSpec,
        labels: Sequence[LabelSpec],
        dense: Sequence[str] = (),
        categorical: Sequence[str] = (),
        keys: Sequence[str] = (),
        split: Split | None = None,
        tables: Mapping[str, SourceSpec] | None = None,
        name: str = "workflow",
    ) -> None:
        self.spec = WorkflowSpec(
            name=name,
            source=source,
            tables=tables or {},
            steps=tuple(steps),
            split=split,
            labels=tuple(labels),
            dense=tuple(dense),
            categorical=tuple(categorical),
            keys=tuple(keys),
        )
        self.plan: Plan = plan(self.spec)
        self.states: dict[int, State] = {}

    @classmethod
    def of(cls, spec: WorkflowSpec, states: Mapping[int, State] | None = None) -> Workflow:
        """Return the workflow that `spec` describes, with the states of its steps if it is fitted."""
        workflow = cls.__new__(cls)
        workflow.spec = spec
        workflow.plan = plan(spec)
        workflow.states = dict(states or {})
        return workflow

    @classmethod
    def from_json(cls, path: Path | str, *, allow_import: Sequence[str] = ()) -> Workflow:
        """Read an unfitted workflow from a ``workflow.json``.

        Args:
            path: The file.
            allow_import: Packages whose functions the steps may name, such as ``("shop",)``: a workflow from
                another party could run any code. Those of the ready workflows need none.

        Raises:
            DataNotFoundError: No such file.
            FormatError: Not a workflow, or of a newer version.
            ConfigError: A field is wrong (JSON path), steps do not fit together, or one names a function that is not
                allowed.
        """
        return cls.of(read_workflow(Path(path), allow_import))

    def to_json(self, path: Path | str, *, replace: bool = True) -> None:
        """Write ``workflow.json`` without the fitted state.

        Args:
            path: The file.
            replace: Whether a file that is there is replaced.

        Raises:
            ConfigError: A directory is there, or a file that may not be replaced.
            StorageError: The disk is full.
        """
        write_workflow(self.spec, Path(path), replace=replace)

    @classmethod
    def load(cls, directory: Path | str, *, allow_import: Sequence[str] = ()) -> Workflow:
        """Read what `save` wrote; without states the workflow is unfitted.

        Args:
            directory: Directory with ``workflow.json``.
            allow_import: As for `from_json`.

        Raises:
            DataNotFoundError: A file is missing.
            FormatError: A file is damaged.
            ConfigError: As for `from_json`.
        """
        workflow = cls.from_json(Path(directory) / "workflow.json", allow_import=allow_import)
        workflow.states = load_states(workflow.plan, Path(directory))
        return workflow

    def save(self, directory: Path | str) -> None:
        """Write ``workflow.json`` and the states of the steps to `directory`, which is made if necessary.

        Raises:
            StorageError: The disk is full.
        """
        save_states(self.plan, self.states, Path(directory))
        self.to_json(Path(directory) / "workflow.json")

    def with_split(self, split: Split | None) -> Workflow:
        """Return this workflow with its state and another split: `OneSplit` for files that it only transforms.

        Raises:
            ConfigError: `split` names a column that is not there.
        """
        return Workflow.of(dataclasses.replace(self.spec, split=split), self.states)

    def with_sample_columns(self, *, weight: str | None, metadata: Sequence[str]) -> Workflow:
        """Return this workflow with its state and other columns besides those that models read.

        Args:
            weight: As for `WorkflowSpec`.
            metadata: As for `WorkflowSpec`.

        Raises:
            ConfigError: A column that is not there, or of another type.
        """
        return Workflow.of(dataclasses.replace(self.spec, weight=weight, metadata=tuple(metadata)), self.states)

    @property
    def is_fitted(self) -> bool:
        """Whether all steps that need a state have one."""
        return all(not operator.is_fitted or step in self.states for step, operator in enumerate(self.plan.operators))

    def apply(self, rows: Rows, upto: int | None = None) -> Rows:
        """Apply all steps, or those before step `upto`, to rows.

        Grouped steps find the earlier rows of a group among these alone: they must be all rows of their groups.

        Raises:
            ConfigError: A step among them is not fitted.
            FormatError: A value that a step refuses, with its column and row.
        """
        rows = with_metadata(rows, self.spec.metadata)
        for step in range(len(self.plan.operators) if upto is None else upto):
            rows = self.plan.operators[step].transform(rows, state_of(self.plan, step, self.states))
        return rows

    def dataset_spec(self, storage: DatasetStorage = "parquet") -> DatasetSpec:
        """Return the resulting data set without its shards; it names the directory ``workflow`` for the saved workflow.

        Raises:
            ConfigError: The workflow is not fitted.
        """
        self._check_fitted()
        return data_set(self.plan, self.states, storage)

    def encode_rows(self, rows: Rows) -> ColumnBlock:
        """Return the columns of the data set for rows after the last step.

        Raises:
            FormatError: A missing label, number or weight, a number that float32 does not hold, or a negative weight,
                with its column and row.
        """
        return column_block(self.plan, self._dataset, rows)

    @property
    def record_columns(self) -> Mapping[str, ColumnType]:
        """Raw columns of a served record, and their types.

        Raises:
            ConfigError: The workflow is not fitted.
        """
        return self._records.inputs

    def encode(self, columns: Mapping[str, RawValues]) -> EncodedRecords:
        """Encode B raw records, given column by column, as `encode_rows` does rows of the source.

        Args:
            columns: Each of `record_columns` -> B values; None, null, ``""`` and, among numbers, NaN are missing. Other
                columns of the source may be there and are not read.

        Raises:
            ConfigError: The workflow is not fitted; a column that is missing, unknown or of another length; a value of
                another type, or one that a step refuses, with its column, row and what is accepted.
        """
        return self._records.encode(columns)

    @cached_property
    def _records(self) -> RecordEncoder:
        self._check_fitted()
        return RecordEncoder(self.plan, self.states)

    @cached_property
    def _dataset(self) -> DatasetSpec:
        return self.dataset_spec()

    def _check_fitted(self) -> None:
        if not self.is_fitted:
            raise ConfigError(f"workflow {self.spec.name!r}", "is not fitted, expected a fitted one")


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
