# SPDX-License-Identifier: Apache-2.0
"""The base class of operators: fields, types, fitting, and the transform of rows and of a few records."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import ConfigError
from terarec.etl.columns import (
    ColumnType,
    Kind,
    Rows,
    from_arrow,
    ids_as_integers,
    is_list,
    is_missing,
    kind_of,
    numbers_of,
    numpy_values,
)
from terarec.etl.ops.states import SpillOptions, State, Statistic
from terarec.etl.ops.values import (
    HEX_DIGITS,
    RecordFunction,
    arrow_of_values,
    result_array,
    values_of_array,
)
from terarec.etl.values import ValueIds
from terarec.spec import checks
from terarec.spec.checks import quoted
from terarec.spec.dataset import MISSING_ID
from terarec.spec.registry import OperatorSpec
from terarec.user_code import is_user_module

Stage: TypeAlias = Literal["stateless", "fitted", "grouped", "rows"]
"""stateless: one row at a time; fitted: the same with a fitted state; grouped: needs other rows: `transform` takes
all rows of each of their groups, by rising row id; rows: changes which rows exist."""

ColumnTypes: TypeAlias = Mapping[str, ColumnType]
"""Name -> type of the columns at some place of a workflow."""


class Operator(OperatorSpec):
    """Base of all operators: frozen, keyword-only dataclasses that `register` names.

    A subclass implements `output_types` and `transform_batch`, or `transform` where it needs the ids of the rows or
    changes which rows and columns there are; a fitted one `statistic` and `load_state`, too. The rest describes to
    planners how it differs from the default.

    Attributes:
        accepted: Kinds of inputs that the operator takes.
        takes_lists: Whether the inputs must be lists; else lists are taken item by item.
        output_kind: Kind of the outputs; None for those of the inputs.
        keeps_integers: Whether outputs of integers are integers in the same unit (a time stays a time).
        keeps_values: Whether each output holds values of its input and no others.
        is_numeric: Whether only the number of an input matters, not whether it is an integer.
        explodes: Whether the operator makes a row of every item of a list.
        filters: Whether the operator drops rows, which it does not do to served records.
        samples: Whether the operator adds rows to train on, which it does not do to served records and, by
            `for_scoring`, to rows that are only scored.
        carries_rows: Whether a grouped operator has `carried_rows` and `late_rows`, so that the preparation of later
            files continues from them.
    """

    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "number", "hex32", "id")
    takes_lists: ClassVar[bool] = False
    output_kind: ClassVar[Kind | None] = None
    keeps_integers: ClassVar[bool] = False
    keeps_values: ClassVar[bool] = False
    is_numeric: ClassVar[bool] = False
    explodes: ClassVar[bool] = False
    filters: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    carries_rows: ClassVar[bool] = False

    @property
    def stage(self) -> Stage:
        """Inputs of `transform` besides the row itself; see `Stage`."""
        return "stateless"

    @property
    def is_fitted(self) -> bool:
        """Whether the step has a state."""
        return self.stage == "fitted" or self.side_table is not None

    @property
    def side_columns(self) -> tuple[str, ...]:
        """Columns of the side table that the step takes: its key and the others."""
        return (*self.reads, *self.writes)

    @property
    def may_reject(self) -> bool:
        """Whether `transform` may raise a `RowFaultError`; functions and code of a user may always reject rows."""
        return False

    @property
    def has_missing_id(self) -> bool:
        """Whether id 0 of an output stands for a missing value, whatever the input has it for."""
        return False

    @property
    def removes(self) -> tuple[str, ...]:
        """Columns that no later step may read."""
        return ()

    @property
    def may_drop(self) -> tuple[str, ...]:
        """Columns of the result that the state may drop."""
        return ()

    @property
    def renames(self) -> Mapping[str, str]:
        """Old names -> new names of columns that are not changed."""
        return {}

    @property
    def functions(self) -> Mapping[str, str]:
        """Field -> ``"package.module:name"`` of the functions that the step imports."""
        return {}

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Inputs with the outputs that depend on no other input."""
        return ()

    @property
    def reads_times(self) -> tuple[str, ...]:
        """Columns that must be times as the source has them."""
        return ()

    @property
    def max_list_length(self) -> int | None:
        """The longest list that the step accepts; None for no bound."""
        return None

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return the types of `writes`; by default those of the inputs in `pairs`, of the kind `output_kind`.

        Args:
            types: Types of all columns before the step, which include `reads`.

        Raises:
            ConfigError: An input of a type that the operator does not take; names the column and what is accepted.
        """
        types_of_outputs = {output: self.input_type(types, name) for name, output in self.pairs}
        if self.output_kind is None:
            return types_of_outputs
        return {output: replace(one, kind=self.output_kind) for output, one in types_of_outputs.items()}

    def input_type(self, types: ColumnTypes, name: str) -> ColumnType:
        """Return the type of the input `name`, checked against `accepted`."""
        column_type = types[name]
        if column_type.kind not in self.accepted:
            raise ConfigError(f"column {name!r}", f"holds {column_type}, expected {' or '.join(self.accepted)}")
        if self.takes_lists and not column_type.is_list:
            raise ConfigError(f"column {name!r}", f"holds one {column_type} a row, expected lists")
        return column_type

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Return the numbers of ids of those outputs that are ids.

        Args:
            rows: Numbers of ids of the id columns before the step.
            state: State of a fitted step.
        """
        return {output: rows[name] for name, output in self.pairs if name in rows}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Do the step to some rows, by default through `transform_batch`.

        The result shares the columns that the step does not write.

        Raises:
            RowFaultError: Rows hold a value that the step does not take.
        """
        known = {name: ColumnType(kind_of(array), is_list(array)) for name, array in rows.columns.items()}
        # Served records lack what is read in training alone, such as a target.
        names = self.reads if set(self.reads) <= known.keys() else self.serving_reads
        # User code gets plain int64: an extension type would reach it through every function of Arrow.
        arrays = [ids_as_integers(rows.columns[name]) for name in names]
        arrays_made = self.transform_batch(pa.RecordBatch.from_arrays(arrays, names=list(names)), state)
        return rows.with_columns(
            {
                name: result_array(f"{self.kind}: {name!r}", arrays_made.get(name), column_type, rows.num_rows)
                for name, column_type in self.output_types(known).items()
            }
        )

    def transform_batch(self, batch: pa.RecordBatch, state: State | None) -> Mapping[str, pa.Array]:
        """Compute `writes` from an Arrow batch of `reads`, whose nulls are missing values.

        Integers and ids are int64, numbers float64, texts large_string, hex32 uint32 and lists large_list; the result
        may be of any type that casts to these.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither transform nor transform_batch")

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return functions that do the step to a few records, by default through `transform`.

        Where several functions write one output, one of them gives it as a matrix of numbers.

        Args:
            types: Types of the columns before the step.
            state: State of a fitted step.
        """
        # A record contains the outputs of grouped steps, is never left out, and keeps its values under new names.
        if self.stage in ("grouped", "rows") or self.renames or not self.writes:
            return ()
        return [RecordFunction(self.serving_reads, self.writes, partial(self._transform_records, types, state))]

    def _transform_records(self, types: ColumnTypes, state: State | None, *inputs: Any) -> Sequence[Any]:
        kinds = [types[name].kind for name in self.serving_reads]
        arrays = [from_arrow(arrow_of_values(values, kind), kind) for values, kind in zip(inputs, kinds, strict=True)]
        # Positions in place of row ids, which records do not have.
        ids = np.arange(len(arrays[0]), dtype=np.int64)
        rows = self.transform(Rows(dict(zip(self.serving_reads, arrays, strict=True)), ids), state)
        return [values_of_array(rows.columns[name]) for name in self.writes]

    def carried_rows(self, rows: Rows) -> NDArray[np.int64]:
        """Return the rising positions of those rows that outputs for rows of later files may depend on.

        Only for grouped steps that have `carries_rows`.

        Args:
            rows: All rows of some groups, by rising row id; those of earlier files have negative ids.
        """
        raise NotImplementedError(f"{type(self).__name__} carries no rows to later files")

    def late_rows(self, rows: Rows) -> NDArray[np.int64]:
        """Return the positions of those rows whose outputs may depend on earlier rows that were not carried.

        Arguments as for `carried_rows`.
        """
        raise NotImplementedError(f"{type(self).__name__} carries no rows to later files")

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> Statistic:
        """Return a fresh statistic (fitted steps only); `types` as for `output_types`, or of the side table."""
        raise NotImplementedError(f"{type(self).__name__} is not fitted")

    def load_state(self, directory: Path, name: str) -> State:
        """Read the files of `State.save` (fitted steps only).

        Raises:
            DataNotFoundError: No such file.
            FormatError: A file of another content.
        """
        raise NotImplementedError(f"{type(self).__name__} is not fitted")

    def dropped(self, state: State | None) -> tuple[str, ...]:
        """Return those of `may_drop` that the state drops."""
        return ()

    def restricted_to(self, needed: set[str]) -> Operator:
        """Return the operator that makes those of its outputs that are `needed`, or all where it makes them at once."""
        return self

    def for_scoring(self) -> Operator:
        """Return the operator for rows that are only scored."""
        return self

    def origin(self, output: str) -> str | None:
        """Return the input whose values `output` holds; None where the step makes values of its own."""
        pairs = {**{new: old for old, new in self.renames.items()}, **{new: old for old, new in self.pairs}}
        return pairs.get(output) if self.renames or self.keeps_values else None

    def input_of(self, output: str) -> str | None:
        """Return the only input of `output`; None if it has several."""
        return next((name for name, own in self.pairs if own == output), None)

    def inverse(
        self, column: str, numbers: NDArray[np.float64], state: State | None, *, is_float32: bool = False
    ) -> NDArray[np.float64]:
        """Return the numbers of the input `column` from its outputs `numbers`, unchanged if nothing scales them.

        Args:
            column: An input.
            numbers: Values of its output.
            state: State of a fitted step.
            is_float32: Whether they were rounded to float32; digits that it does not hold are rounded away.
        """
        return numbers

    def reserved_ids(self, is_id: bool) -> int:
        """Return the number of the first ids without a value of their own: 0 for missing values, then rare ones."""
        return int(is_id)

    def vocabularies(self, state: State | None) -> Mapping[str, ValueIds]:
        """Return output -> the vocabulary of its ids, for outputs that have one."""
        return {}

    def describe_ids(self, column: str, ids: NDArray[np.int64], state: State | None) -> Sequence[str]:
        """Return the meaning of ids of the input `column`, as text."""
        return [MISSING if number == MISSING_ID else f"(bucket {number})" for number in ids]


def operators(steps: Sequence[OperatorSpec]) -> tuple[Operator, ...]:
    """Return the steps of a workflow as operators.

    Raises:
        ConfigError: A class that is no `Operator`.
    """
    chosen = tuple(step for step in steps if isinstance(step, Operator))
    # A class that derives from `OperatorSpec` alone describes a step, but cannot run it.
    if len(chosen) < len(steps):
        names = ", ".join(type(step).__name__ for step in steps if not isinstance(step, Operator))
        raise ConfigError("steps", f"got the operator {names}, expected a class derived from terarec.etl.ops.Operator")
    return chosen


MISSING, RARE = "(missing)", "(rare or unseen)"
"""Descriptions of ids that stand for no value of their own."""


@dataclass(frozen=True, kw_only=True)
class ColumnsOperator(Operator):
    """An operator that reads `columns`, and writes them again unless a subclass overrides it.

    Attributes:
        columns: The inputs.
    """

    columns: checks.ColumnNames

    def __post_init__(self) -> None:
        checks.check_fields(self)

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return self.columns

    @property
    @override
    def serving_reads(self) -> tuple[str, ...]:
        return self.columns

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return self.columns


@dataclass(frozen=True, kw_only=True)
class MappedColumns(ColumnsOperator):
    """An operator that makes one output column of each input column.

    Attributes:
        columns: The inputs.
        outputs: Names of the outputs, one for each input; () replaces the inputs under their own names.
    """

    outputs: checks.AnyColumnNames = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs and len(self.outputs) != len(self.columns):
            checks.fail(self, "outputs", f"{len(self.columns)} names, one for each of columns")

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return self.outputs or self.columns

    @property
    @override
    def pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.columns, self.outputs or self.columns, strict=True))

    @override
    def restricted_to(self, needed: set[str]) -> Operator:
        # A user's class may have fields with a value for each column.
        if self.stage == "grouped" or is_user_module(type(self).__module__):
            return self
        places = [place for place, (_, output) in enumerate(self.pairs) if output in needed]
        fields = {name: tuple(values[place] for place in places) for name, values in self._of_each_column().items()}
        return replace(self, **fields) if len(places) < len(self.columns) else self

    def _of_each_column(self) -> dict[str, tuple[Any, ...]]:
        """Return the fields that have a value for each column."""
        return {"columns": self.columns} | ({"outputs": self.outputs} if self.outputs else {})


def scalar_input(types: ColumnTypes, name: str, accepted: Sequence[str]) -> ColumnType:
    """Return the type of the input `name`.

    Raises:
        ConfigError: A column of lists, or of a kind that is not `accepted`.
    """
    column_type = types[name]
    if column_type.is_list or column_type.kind not in accepted:
        raise ConfigError(f"column {name!r}", f"holds {column_type}, expected one {' or '.join(accepted)} a row")
    return column_type


_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)


def value_of(kind: Kind, value: float | str, where: str = "") -> Any:
    """Convert a value that a field spells to that of a column of `kind`.

    Raises:
        ConfigError: A column of this kind cannot hold it.
    """
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "number" and not isinstance(value, str):
        return float(value)
    if kind in ("integer", "id"):
        whole = int(value) if isinstance(value, str) and _INTEGER.fullmatch(value) else value
        if not isinstance(whole, str) and whole == int(whole) and -(2**63) <= whole < 2**63:
            return int(whole)
    if kind == "hex32" and isinstance(value, str) and HEX_DIGITS.fullmatch(value):
        return int(value, 16)
    spelled = {"text": "a text", "number": "a number", "hex32": "up to 8 hexadecimal digits as text"}
    raise ConfigError(
        where, f"got {quoted(value)}, expected {spelled.get(kind, 'a 64-bit integer')} for a column of {kind}"
    )


def is_between(array: pa.Array, low: float | None, high: float | None) -> NDArray[np.bool_]:
    """Return which of n numbers or integers are at least `low` and at most `high`, bool[n]; missing ones never are."""
    if kind_of(array) == "integer":  # float64 would round those from 2^53 on
        numbers, within = numpy_values(array), ~is_missing(array)
        low, high = None if low is None else math.ceil(low), None if high is None else math.floor(high)
    else:
        numbers = numbers_of(array)
        within = ~np.isnan(numbers)
    if low is not None:
        within &= numbers >= low
    return within if high is None else within & (numbers <= high)


def is_among(array: pa.Array, spelled: Sequence[str]) -> NDArray[np.bool_]:
    """Return which of n values (not numbers) equal a value of a field, bool[n]; missing values never do."""
    wanted = pa.array([value_of(kind_of(array), value) for value in spelled], type=array.type)
    is_member: NDArray[np.bool_] = pc.is_in(array, value_set=wanted).to_numpy(zero_copy_only=False)
    return is_member
