"""Raw records -> what a model takes, as preparation made it of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from terarec.errors import ConfigError, FormatError
from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import Block, ColumnType
from terarec.etl.ops import State
from terarec.etl.workflow.data_set import data_set, dense_values, keys_of
from terarec.etl.workflow.encoded_records import EncodedRecords
from terarec.etl.workflow.execution import state_of
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.raw_column import RawValues, few_as_list
from terarec.etl.workflow.raw_values import read_column
from terarec.etl.workflow.record_program import RecordProgram
from terarec.etl.workflow.serving import serving_plan
from terarec.kernels.encoding_types import RefusedValueError


class RecordEncoder:
    """Encodes records with a fitted workflow.

    Records in Python lists, and a few in arrays, go through a program on plain values; many in arrays, and values that
    it refuses, go through the steps as blocks do, which also tells what is wrong.

    Attributes:
        inputs: raw column -> type, what a record holds.

    Raises:
        ConfigError: a step cannot be done to a record.
    """

    def __init__(self, plan: Plan, states: Mapping[int, State]) -> None:
        self._plan, self._states = plan, states
        dataset = data_set(plan, states, "parquet")
        self._dense = [column.name for column in dataset.dense]
        self._keys = [column.name for column in dataset.categorical]
        self._serving = serving_plan(plan, [*self._dense, *self._keys])
        self._program = RecordProgram(plan, self._serving, states, self._dense, self._keys)
        self.inputs: Mapping[str, ColumnType] = self._serving.inputs
        self._accepted = frozenset(self.inputs) | {column.name for column in plan.spec.source.columns}

    def encode(self, columns: Mapping[str, RawValues]) -> EncodedRecords:
        """Encode B records, given column by column; see `Workflow.encode`."""
        encoded = self._encode_lists(columns)
        if encoded is not None:
            return encoded
        block = self._run(columns, self._check(columns))
        dense = np.ascontiguousarray(_told(dense_values, self._dense, block))
        return EncodedRecords(dense=dense, keys=keys_of(self._plan, block, self._keys))

    def _check(self, columns: Mapping[str, RawValues]) -> int:
        """The number of records; raises unless the columns are those that a record has."""
        expected = ", ".join(self.inputs)
        for name in columns:
            if name not in self._accepted:
                raise ConfigError(f"column {name!r}: not in the workflow's records, expected {expected}")
        first, num_records = "", 0
        for name in self.inputs:
            if name not in columns:
                raise ConfigError(f"column {name!r}: missing, expected {expected}")
            size = len(columns[name])
            first, num_records = (first, num_records) if first else (name, size)
            if size != num_records:
                raise ConfigError(
                    f"column {name!r}: holds {size} values, expected {num_records} as in column {first!r}"
                )
        return num_records

    def _encode_lists(self, columns: Mapping[str, Any]) -> EncodedRecords | None:
        """The short way; None where something is not as it should be there."""
        values: list[Any] = [columns.get(name) for name in self.inputs]
        if set(map(type, values)) != {list}:
            values = list(map(few_as_list, values))
            if set(map(type, values)) != {list}:
                return None
        if not self._accepted.issuperset(columns):
            return None
        sizes = set(map(len, values))
        if len(sizes) != 1:
            return None
        try:
            matrix, keys = self._program.run(values)
        except RefusedValueError:
            return None
        if matrix is None:
            matrix = np.empty((0, *sizes))
        with np.errstate(over="ignore"):  # an infinite number is told by the long way
            dense = matrix.T.astype(np.float32, order="C")
        if np.count_nonzero(np.isfinite(dense)) < dense.size:
            return None
        return EncodedRecords(dense=dense, keys=tuple(keys))

    def _run(self, columns: Mapping[str, RawValues], num_records: int) -> Block:
        source = self._plan.spec.source
        read = {
            name: read_column(name, columns[name], found, column, Cleaning.of_records(source) if column else Cleaning())
            for name, found in self.inputs.items()
            for column in [source.column(name) if name in self._plan.types[0] else None]
        }
        block = Block(read, np.arange(num_records, dtype=np.int64))
        for step in self._serving.steps:
            block = _told(self._plan.codes[step].transform, block, state_of(self._plan, step, self._states))
        return block


def _told(work: Any, *arguments: Any) -> Any:
    """What `work` gives; a value that it refuses is the caller's and not a file's."""
    try:
        return work(*arguments)
    except FormatError as error:
        raise ConfigError(str(error)) from None
