"""Raw records -> what a model takes, as preparation made it of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import Block, ColumnType
from terarec.etl.operators import State
from terarec.etl.workflow.data_set import data_set, dense_values, keys_of
from terarec.etl.workflow.encoded_records import EncodedRecords
from terarec.etl.workflow.execution import state_of
from terarec.etl.workflow.fast_records import lookups, number_groups
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.raw_column import RawValues
from terarec.etl.workflow.raw_values import read_column
from terarec.etl.workflow.serving import ServingPlan, serving_plan
from terarec.formats import Keys
from terarec.kernels.encoding_types import RefusedValueError


class RecordEncoder:
    """Encodes records with a fitted workflow.

    Records given as Python lists go a short way column by column, where there is one; what it does not know or refuses
    goes through the steps as blocks do, which also tells what is wrong.

    Attributes:
        inputs: raw column -> type, what a record holds.

    Raises:
        ConfigError: a step cannot be done to a record.
    """

    def __init__(self, plan: Plan, states: Mapping[int, State]) -> None:
        self._plan, self._states = plan, states
        self._dataset = data_set(plan, states, "parquet")
        self._dense = [column.name for column in self._dataset.dense]
        self._keys = [column.name for column in self._dataset.categorical]
        whole = serving_plan(plan, [*self._dense, *self._keys])
        self._whole = whole
        self.inputs: Mapping[str, ColumnType] = whole.inputs
        self._accepted = frozenset(whole.inputs) | {column.name for column in plan.spec.source.columns}
        self._groups = number_groups(plan, whole, states, self._dense)
        self._lookups = lookups(plan, whole, states, self._keys)
        grouped = {place for group in self._groups for place in group.places}
        self._rest_dense = [place for place in range(len(self._dense)) if place not in grouped]
        looked_up = {lookup.place for lookup in self._lookups}
        self._rest_keys = [place for place in range(len(self._keys)) if place not in looked_up]
        names = [self._dense[place] for place in self._rest_dense] + [self._keys[place] for place in self._rest_keys]
        self._rest = serving_plan(plan, names) if names else None

    def encode(self, columns: Mapping[str, RawValues]) -> EncodedRecords:
        """Encode B records, given column by column; see `Workflow.encode`."""
        encoded = self._encode_lists(columns)
        if encoded is not None:
            return encoded
        num_records = self._check(columns)
        block = self._run(self._whole, columns, num_records)
        return EncodedRecords(dense=_told(self._dense_of, block), keys=keys_of(self._plan, block, self._keys))

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
        values = [columns.get(name) for name in self.inputs]
        if {type(column) for column in values} != {list} or not self._accepted.issuperset(columns):
            return None
        sizes = {len(column) for column in values if column is not None}
        if len(sizes) != 1:
            return None
        (num_records,) = sizes
        dense = np.empty((len(self._dense), num_records), dtype=np.float32)
        try:
            with np.errstate(over="ignore"):  # an infinite number is told below
                for group in self._groups:
                    dense[group.at] = group.numbers(columns, num_records)
            found: dict[int, Keys] = {place: find(columns[name]) for place, name, find in self._lookups}
        except RefusedValueError:
            return None
        if self._rest is not None:
            block = self._run(self._rest, columns, num_records)
            for place in self._rest_dense:
                dense[place] = block.columns[self._dense[place]].numbers()
            rest = keys_of(self._plan, block, [self._keys[place] for place in self._rest_keys])
            found.update(zip(self._rest_keys, rest, strict=True))
        if np.count_nonzero(np.isfinite(dense)) < dense.size:
            return None
        keys = tuple([found[place] for place in range(len(self._keys))])
        return EncodedRecords(dense=np.ascontiguousarray(dense.T), keys=keys)

    def _run(self, serving: ServingPlan, columns: Mapping[str, RawValues], num_records: int) -> Block:
        source = self._plan.spec.source
        read = {
            name: read_column(name, columns[name], found, source.column(name) if name in self._plan.types[0] else None)
            for name, found in serving.inputs.items()
        }
        block = Block(read, np.arange(num_records, dtype=np.int64))
        for step in serving.steps:
            code = self._plan.codes[step]
            block = _told(code.apply, block, state_of(self._plan, step, self._states))
        return block

    def _dense_of(self, block: Block) -> NDArray[np.float32]:
        return np.ascontiguousarray(dense_values([column.name for column in self._dataset.dense], block))


def _told(work: Any, *arguments: Any) -> Any:
    """What `work` gives; a value that it refuses is the caller's and not a file's."""
    try:
        return work(*arguments)
    except FormatError as error:
        raise ConfigError(str(error)) from None
