# SPDX-License-Identifier: Apache-2.0
"""Raw records -> model inputs, encoded as preparation encodes rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import ColumnType, Rows, array_of
from terarec.etl.ops import GivenIds, State
from terarec.etl.ops.base import ColumnTypes
from terarec.etl.ops.user_steps import run_step
from terarec.etl.source.tables import read_records
from terarec.etl.workflow.plan import Plan, columns_needed, side_types
from terarec.etl.workflow.raw_values import RawValues, as_list, fault_of_array, few_as_list, read_raw_values
from terarec.etl.workflow.record_program import RawColumn, RecordProgram, ServingPlan
from terarec.etl.workflow.transform import cardinalities, data_set, dense_values, keys_of, state_of
from terarec.formats.block import Keys
from terarec.kernels.cpu.encoding import InvalidValueError
from terarec.ragged import Ragged
from terarec.spec import SourceColumn
from terarec.spec.checks import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedRecords:
    """Model inputs of B records.

    Attributes:
        dense: float32[B, F], the data set's dense columns, row after row in memory: models round by the layout.
        keys: Per categorical column int64[B], or B lists of int64 where hotness > 1.
    """

    dense: NDArray[np.float32]
    keys: tuple[Keys, ...]


class RecordEncoder:
    """Encodes records with a fitted workflow.

    Records in Python lists, and numbers, integers and texts in arrays, go through a program; other arrays of many
    values, and values that it rejects, go through the steps as blocks do, which also report what is wrong.

    Attributes:
        inputs: Raw column of a record -> type.
        sources: Those of them that are columns of files, and how these hold them.

    Args:
        plan: Plan of the workflow.
        states: States of its fitted steps.
        results: Columns that are read; the others are zeros, or empty lists. None for all.
    """

    def __init__(self, plan: Plan, states: Mapping[int, State], results: Collection[str] | None = None) -> None:
        self._dataset = data_set(plan, states, "parquet")
        dense, keys = (
            [column.name for column in columns] for columns in (self._dataset.dense, self._dataset.categorical)
        )
        self._is_whole = results is None or set(results).issuperset([*dense, *keys])
        if results is not None and not self._is_whole:
            dense, keys = ([name for name in names if name in results] for names in (dense, keys))
            plan = _restricted(plan, [*dense, *keys])
        plan, self._serving = serving_plan(plan, states, [*dense, *keys])
        self._plan, self._states, self._dense, self._keys = plan, states, dense, keys
        self._program = RecordProgram(plan, self._serving, states, self._dense, self._keys)
        self.inputs: Mapping[str, ColumnType] = self._serving.inputs
        names = list(self.inputs)
        self._fetch: Callable[[Mapping[str, Any]], Sequence[Any]] = (
            itemgetter(*names) if len(names) > 1 else lambda columns: [columns[name] for name in names]
        )
        source = plan.spec.source
        self.sources: Mapping[str, SourceColumn] = {
            # A record has one item of a list that a step explodes, which nothing cuts.
            one.name: one if self.inputs[one.name].is_list else dataclasses.replace(one, separator=None)
            for one in source.columns
            if one.name in self.inputs and one.name not in self._serving.brought
        }
        self._cleaning = Cleaning.of_records(source)
        self._accepted = frozenset(self.inputs) | {column.name for column in plan.spec.source.columns}

    def encode(self, columns: Mapping[str, RawValues]) -> EncodedRecords:
        """Encode B records, given column by column; see `Workflow.encode`."""
        encoded = self._encode_lists(columns)
        if encoded is not None:
            return encoded
        return self._transformed(self._read(columns, self._check(columns)))

    def _transformed(self, rows: Rows) -> EncodedRecords:
        for step in self._serving.steps:
            state = state_of(self._plan, step, self._states)
            rows = _as_config_error(run_step, self._plan.operators[step], rows, state)
        dense = np.ascontiguousarray(_as_config_error(dense_values, self._dense, rows))
        return self._completed(dense, keys_of(rows, self._keys))

    def _completed(self, dense: NDArray[np.float32], keys: tuple[Keys, ...]) -> EncodedRecords:
        """Add the columns that are not read."""
        if self._is_whole:
            return EncodedRecords(dense=dense, keys=keys)
        count, made = len(dense), dict(zip(self._keys, keys, strict=True))
        every = np.zeros((count, len(self._dataset.dense)), dtype=np.float32)
        every[:, [column.name in self._dense for column in self._dataset.dense]] = dense
        zeros = np.zeros(count, dtype=np.int64)
        none = Ragged(zeros[:0], np.zeros(count + 1, dtype=np.int64))
        columns = [made.get(one.name, zeros if one.hotness == 1 else none) for one in self._dataset.categorical]
        return EncodedRecords(dense=every, keys=tuple(columns))

    def encode_table(self, table: pa.Table) -> EncodedRecords:
        """Encode B records in a table, whose types are read as those of files; it may have further columns.

        Raises:
            ConfigError: A column that is missing or of another type, or a value that the workflow does not take.
        """
        for name in self.inputs:
            if name not in table.column_names:
                hint = did_you_mean(name, table.column_names)
                raise ConfigError(f"column {name!r}", f"missing{hint}, expected {', '.join(self.inputs)}")
        source = self._plan.spec.source
        rows = Rows({}, np.arange(table.num_rows, dtype=np.int64))
        if known := tuple(self.sources.values()):
            rows = _as_config_error(read_records, table, dataclasses.replace(source, columns=known))
        # What grouped steps make of other rows is in no file.
        others = {
            name: read_raw_values(name, table.column(name), column_type, None, Cleaning())
            for name, column_type in self.inputs.items()
            if name not in self.sources
        }
        return self._transformed(rows.with_columns(others))

    def _check(self, columns: Mapping[str, RawValues]) -> int:
        """Return the number of records; raise unless the columns are those of a record."""
        expected = ", ".join(self.inputs)
        for name in columns:
            if name not in self._accepted:
                raise ConfigError(f"column {name!r}", f"not in the workflow's records, expected {expected}")
        first, num_records = "", 0
        for name in self.inputs:
            if name not in columns:
                raise ConfigError(f"column {name!r}", f"missing, expected {expected}")
            size = len(columns[name])
            first, num_records = (first, num_records) if first else (name, size)
            if size != num_records:
                raise ConfigError(
                    f"column {name!r}", f"holds {size} values, expected {num_records} as in column {first!r}"
                )
        return num_records

    def _encode_lists(self, columns: Mapping[str, Any]) -> EncodedRecords | None:
        """Encode by the program; None where it does not take the values."""
        try:
            values: Sequence[Any] = self._fetch(columns)
        # `_check` names the column that is missing.
        except KeyError:
            return None
        if set(map(type, values)) != {list}:
            values = list(map(_program_column, values, self.inputs.values()))
            if any(column is None for column in values):
                return None
        # Only records with further columns are checked for unknown ones: others cost nothing.
        if len(columns) != len(values) and not self._accepted.issuperset(columns):
            return None
        sizes = set(map(len, values))
        if len(sizes) != 1:
            return None
        try:
            matrix, keys = self._program.run(values)
        # The steps name the value and what is accepted, which the program leaves out for speed.
        except InvalidValueError:
            return None
        if matrix is None:
            matrix = np.empty((0, *sizes))
        with np.errstate(over="ignore"):  # an infinite number is reported by the steps
            dense = matrix.T.astype(np.float32, order="C")
        if np.count_nonzero(np.isfinite(dense)) < dense.size:
            return None
        return self._completed(dense, tuple(keys))

    def _read(self, columns: Mapping[str, RawValues], num_records: int) -> Rows:
        read = {
            name: read_raw_values(
                name,
                columns[name],
                column_type,
                self.sources.get(name),
                self._cleaning if name in self.sources else Cleaning(),
            )
            for name, column_type in self.inputs.items()
        }
        return Rows(read, np.arange(num_records, dtype=np.int64))


def _program_column(values: RawValues, column_type: ColumnType) -> RawColumn | None:
    """Return raw values as the program takes them; None for those that the steps alone read."""
    if isinstance(values, pa.Array | pa.ChunkedArray) and fault_of_array(values) is not None:
        return None
    values, kind = few_as_list(values), column_type.kind
    if isinstance(values, list):
        return values
    if column_type.is_list:
        return None
    if isinstance(values, pa.LargeStringArray):
        return values if kind in ("text", "hex32") else as_list(values)
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        return None
    if kind == "number" and values.dtype.kind in "iuf":
        return values
    is_int64 = np.can_cast(values.dtype, np.int64) and values.dtype.kind in "iu"
    return array_of(np.ascontiguousarray(values, dtype=np.int64)) if kind == "integer" and is_int64 else None


def _as_config_error(work: Any, *arguments: Any) -> Any:
    """Return the result of `work`; a value that it rejects comes from the caller, not from a file."""
    try:
        return work(*arguments)
    except FormatError as error:
        raise ConfigError(error.where, error.problem) from None


def _restricted(plan: Plan, results: Collection[str]) -> Plan:
    """Return the plan with steps that make for a served record no columns but those that `results` depend on."""
    operators = list(plan.operators)

    def reads(step: int, outputs: set[str]) -> Iterable[str] | None:
        operator = plan.operators[step]
        if operator.stage == "rows" or not outputs:
            return None
        operators[step] = operator.restricted_to(outputs)
        return () if operator.stage == "grouped" else operators[step].serving_reads

    columns_needed(plan.operators, results, reads)
    return dataclasses.replace(plan, operators=tuple(operators))


def serving_plan(plan: Plan, states: Mapping[int, State], results: Sequence[str]) -> tuple[Plan, ServingPlan]:
    """Return the steps that the columns `results` depend on when a record is served, and the plan that has them.

    Steps that choose rows are left out: every record is kept, and is one item of an exploded list already. A record
    brings along what a grouped step makes of other rows; if these are ids, the step checks them.
    """
    record = _record_of(plan, results)
    operators, brought, needed = list(plan.operators), record.brought, record.needed
    for step, ids in record.ids.items():
        rows = cardinalities(plan, states, upto=step + 1)
        operators[step] = GivenIds(columns=ids, rows=tuple(rows[name] for name in ids))
    steps, plan = record.steps, dataclasses.replace(plan, operators=tuple(operators))
    exact = _exact_integers(plan, steps, results)
    exploded = {name for operator in plan.operators if operator.explodes for name in operator.writes}
    inputs = {
        name: _record_type(plan, steps, name, is_exact=name in exact, is_exploded=name in exploded)
        for name in plan.types[0]
        if name in needed
    }
    inputs |= brought
    return plan, ServingPlan(steps, inputs, _types_of_steps(plan, steps, inputs), frozenset(brought))


class _Record(NamedTuple):
    """What a record goes through.

    Attributes:
        steps: The steps that are done to it.
        ids: Grouped step -> those of its outputs that a record brings along as ids.
        brought: Columns that it brings along for grouped steps -> type.
        needed: The other columns that it needs.
    """

    steps: tuple[int, ...]
    ids: Mapping[int, tuple[str, ...]]
    brought: Mapping[str, ColumnType]
    needed: Set[str]


def check_record(plan: Plan) -> None:
    """Raise `ConfigError` if a record would need two columns of one name."""
    spec = plan.spec
    _record_of(plan, (*spec.dense, *spec.categorical, *spec.keys))


def _record_of(plan: Plan, results: Sequence[str]) -> _Record:
    brought: dict[str, ColumnType] = {}
    twice = set[str]()
    chosen: list[int] = []
    ids: dict[int, tuple[str, ...]] = {}

    def reads(step: int, outputs: set[str]) -> Iterable[str] | None:
        operator = plan.operators[step]
        if operator.stage == "rows" or not outputs:
            return None
        # The walk ends here: what the step reads is of other rows, too, which a record does not bring.
        if operator.stage == "grouped":
            # In the order of the step: that of a set differs from process to process.
            types = {name: plan.types[step + 1][name] for name in operator.writes if name in outputs}
            given = {name: dataclasses.replace(one, kind="integer") for name, one in types.items() if one.kind == "id"}
            if given:
                ids[step] = tuple(given)
                chosen.append(step)
            types |= given
            twice.update(brought.keys() & types)
            brought.update(types)
            return ()
        twice.update(brought.keys() & operator.writes)
        chosen.append(step)
        return operator.serving_reads

    needed = columns_needed(plan.operators, results, reads)
    twice.update(needed & brought.keys())
    if twice:
        raise ConfigError(
            f"column {min(twice)!r}",
            "a record would need it as it is before a grouped step and as that makes it; expected other names in the "
            "step's outputs",
        )
    return _Record(tuple(reversed(chosen)), ids, brought, needed)


def _record_type(plan: Plan, steps: Sequence[int], name: str, *, is_exact: bool, is_exploded: bool) -> ColumnType:
    """Return the type of a source column in a record."""
    column_type = plan.types[0][name]
    if column_type.kind == "integer" and not is_exact:
        # Only the number matters: it may come as a float, as tables with missing values hold integers.
        column_type = dataclasses.replace(column_type, kind="number")
    if is_exploded:
        return ColumnType(column_type.kind)
    first = next((plan.operators[step] for step in steps if name in plan.operators[step].writes), None)
    if not column_type.is_list or first is None or first.max_list_length is None or name not in first.reads:
        return column_type
    return ColumnType(column_type.kind, True, first.max_list_length)


def _exact_integers(plan: Plan, steps: Sequence[int], results: Sequence[str]) -> set[str]:
    """Return the source columns whose integers must come as such, for their ids, or for their meaning."""

    def reads(step: int, outputs: set[str]) -> Iterable[str] | None:
        if step not in steps:
            return None
        operator = plan.operators[step]
        gives_integers = any(plan.types[step + 1][name].kind == "integer" for name in outputs)
        return operator.serving_reads if gives_integers or not operator.is_numeric else ()

    exact = columns_needed(plan.operators, [name for name in results if name not in plan.spec.dense], reads)
    return exact | {column.name for column in plan.spec.source.columns if column.type == "time"}


def _types_of_steps(plan: Plan, steps: Sequence[int], inputs: Mapping[str, ColumnType]) -> dict[int, ColumnTypes]:
    """Return the types of the columns before each step."""
    types: dict[int, ColumnTypes] = {}
    column_types = dict(inputs)
    for step in steps:
        known = {**plan.types[step], **column_types}  # targets, known in training only, have their types of training
        try:
            types[step] = {**known, **side_types(plan.spec, plan.operators[step], known)}
            column_types.update(plan.operators[step].output_types(types[step]))
        except ConfigError as error:
            kind = type(plan.spec.steps[step]).__name__
            raise ConfigError(f"steps[{step}] {kind}", f"cannot be done to a served record: {error}") from None
    return types
