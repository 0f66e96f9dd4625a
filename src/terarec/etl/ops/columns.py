# SPDX-License-Identifier: Apache-2.0
"""Operators that rename, compute or drop columns, or filter rows. See docs/workflows.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import ColumnType, Kind, Rows, ids_as_integers
from terarec.etl.ops.base import ColumnsOperator, ColumnTypes, Operator, Stage, is_among, is_between, value_of
from terarec.etl.ops.fitted_params import decode_state
from terarec.etl.ops.states import MergeableStatistic, SpillOptions, State, read_params, write_params
from terarec.etl.ops.values import (
    RecordFunction,
    ValueType,
    arrow_of_values,
    python_of_values,
    result_array,
    values_of_array,
    values_of_python,
)
from terarec.etl.values import lookup_values
from terarec.spec import checks
from terarec.spec.checks import quoted
from terarec.spec.registry import imported, register

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
FUNCTION_FIELDS = ("function", "record_function")
"""Fields of `LambdaOp` that name a function."""


@register("rename")
@dataclass(frozen=True, kw_only=True)
class Rename(Operator):
    """New names for columns, all at once: {"a": "b", "b": "a"} swaps two.

    Attributes:
        names: Old name -> new name.
    """

    names: Mapping[str, str]

    def __post_init__(self) -> None:
        names = [*self.names, *self.names.values()]
        if not self.names or not all(isinstance(name, str) and name for name in names):
            checks.reject(self, "names", f"got {quoted(dict(self.names))}, expected old names with their new names")
        checks.distinct(self, "names", tuple(self.names.values()))

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return tuple(self.names)

    @property
    @override
    def serving_reads(self) -> tuple[str, ...]:
        return tuple(self.names)

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return tuple(self.names.values())

    @property
    @override
    def removes(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.names.values())

    @property
    @override
    def renames(self) -> Mapping[str, str]:
        return self.names

    @override
    def restricted_to(self, needed: set[str]) -> Rename:
        return replace(self, names={old: new for old, new in self.names.items() if new in needed})

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        return {new: types[old] for old, new in self.names.items()}

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        return {new: rows[old] for old, new in self.names.items() if old in rows}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        kept = {name: array for name, array in rows.columns.items() if name not in self.names}
        named = {new: rows.columns[old] for old, new in self.names.items()}
        # Without `zero_nulls`, which goes by the old names.
        origins = {name: name for name in kept} | {new: old for old, new in self.names.items()}
        nanoseconds = {name: rows.nanoseconds[old] for name, old in origins.items() if old in rows.nanoseconds}
        return Rows({**kept, **named}, rows.ids, rows.split, nanoseconds=nanoseconds)


@register("lambda_op")
@dataclass(frozen=True, kw_only=True)
class LambdaOp(ColumnsOperator):
    """Calls a function that can be imported, such as "shop.features:price_per_item".

    It takes one Arrow array for each of `columns` (nulls are missing) and returns one for each of `outputs`: the array
    for one output, a tuple of arrays for several. Row i of the result may depend on row i of the arguments alone.

    Attributes:
        columns: The inputs.
        outputs: Columns that the function returns.
        function: "package.module:name".
        output_type: Type of all outputs.
        record_function: "package.module:name" of the same on one row's Python values, None for a missing one and hex32
            as int; it gives a value, or a tuple for several outputs. It spares a served record Arrow's arrays.
    """

    outputs: checks.ColumnNames
    function: str
    output_type: ValueType
    record_function: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in FUNCTION_FIELDS:
            value = getattr(self, field)
            if (value is not None or field == "function") and not (
                isinstance(value, str) and _FUNCTION.fullmatch(value)
            ):
                checks.fail(self, field, "a function that can be imported, as 'package.module:name'")

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return self.outputs

    @property
    @override
    def functions(self) -> Mapping[str, str]:
        return {field: getattr(self, field) for field in FUNCTION_FIELDS if getattr(self, field) is not None}

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        imported(self.function)
        if self.record_function is not None:
            imported(self.record_function)
        return {output: ColumnType(self.output_type) for output in self.outputs}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Call the function.

        Raises:
            ConfigError: It returned other arrays than `outputs` says.
        """
        arrays = self._outputs([ids_as_integers(rows.columns[name]) for name in self.columns], rows.num_rows)
        return rows.with_columns(dict(zip(self.outputs, arrays, strict=True)))

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        kinds = [types[name].kind for name in self.columns]
        if self.record_function is None:
            call = partial(self._call_with_arrays, kinds)
        else:
            call = partial(self._call_by_record, kinds, imported(self.record_function))
        return [RecordFunction(self.columns, self.outputs, call)]

    def _call_with_arrays(self, kinds: Sequence[Kind], *columns: Any) -> Sequence[Any]:
        arrays = [arrow_of_values(values, kind) for values, kind in zip(columns, kinds, strict=True)]
        return [values_of_array(array) for array in self._outputs(arrays, len(arrays[0]))]

    def _call_by_record(self, kinds: Sequence[Kind], function: Callable[..., Any], *columns: Any) -> Sequence[Any]:
        arguments = [python_of_values(values, kind) for values, kind in zip(columns, kinds, strict=True)]
        results = [function(*row) for row in zip(*arguments, strict=True)]
        columns_made = zip(*results, strict=True) if len(self.outputs) > 1 else (results,)
        outputs = [values_of_python(list(values), self.output_type) for values in columns_made]
        # No records give no results to zip, but as many empty outputs as others.
        return outputs or [values_of_python([], self.output_type)] * len(self.outputs)

    def _outputs(self, arguments: Sequence[pa.Array], num_rows: int) -> list[pa.Array]:
        """Call the function with Arrow arrays; return an array for each output."""
        result = imported(self.function)(*arguments)
        arrays = result if isinstance(result, tuple) else (result,)
        if len(arrays) != len(self.outputs):
            raise ConfigError(
                self.function, f"returned {len(arrays)} arrays, expected {len(self.outputs)}, one for each of outputs"
            )
        expected = ColumnType(self.output_type)
        return [result_array(self.function, array, expected, num_rows) for array in arrays]


@register("keep_rows")
@dataclass(frozen=True, kw_only=True)
class KeepRows(Operator):
    """Keep the rows whose `column` is one of `values` or within the bounds; rows with a missing value are dropped.

    At serving every record is kept.

    Attributes:
        column: Text, integer or hex32 for `values`; number or integer for the bounds.
        values: Texts; integers in decimal, hex32 as hexadecimal digits.
        at_least: The lowest number that is kept.
        at_most: The highest number that is kept.
    """

    stage: ClassVar[Stage] = "rows"
    filters: ClassVar[bool] = True
    column: checks.ColumnName
    values: tuple[str, ...] = ()
    at_least: checks.Finite | None = None
    at_most: checks.Finite | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if bool(self.values) is not (self.at_least is None and self.at_most is None):
            checks.reject(self, "", "expected either values, or at_least or at_most or both")
        if not isinstance(self.values, tuple) or not all(isinstance(value, str) and value for value in self.values):
            checks.fail(self, "values", "texts that are not empty")

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    @override
    def serving_reads(self) -> tuple[str, ...]:
        # None: every record is kept.
        return ()

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return ()

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        column_type = types[self.column]
        accepted = ("text", "integer", "hex32") if self.values else ("number", "integer")
        if column_type.is_list or column_type.kind not in accepted:
            raise ConfigError(f"column {self.column!r}", f"holds {column_type}, expected {' or '.join(accepted)}")
        for value in self.values:
            value_of(column_type.kind, value, f"column {self.column!r}")
        return {}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        return rows.filter(self.kept(rows))

    def kept(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which rows are kept, bool[n]."""
        array = rows.columns[self.column]
        if self.values:
            return is_among(array, self.values)
        return is_between(array, self.at_least, self.at_most)


@dataclass(frozen=True, slots=True)
class DistinctCounts:
    """State of `DropLowCardinality`.

    Attributes:
        columns: Input column -> its distinct values in training, counted up to ``min_distinct``.
        dropped: Columns that have fewer.
    """

    columns: Mapping[str, int]
    dropped: tuple[str, ...]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>.json``."""
        state = {"columns": self.columns, "dropped": self.dropped}
        write_params(directory, name, DropLowCardinality.kind, state)


@register("drop_low_cardinality")
@dataclass(frozen=True, kw_only=True)
class DropLowCardinality(ColumnsOperator):
    """Drops those of `columns` that have fewer than `min_distinct` values in the training part, missing ones apart.

    Attributes:
        min_distinct: Least number of different values of a column that stays.
    """

    stage: ClassVar[Stage] = "fitted"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32", "id")
    min_distinct: Annotated[int, checks.whole(2)] = 2

    @property
    @override
    def serving_reads(self) -> tuple[str, ...]:
        # None that the step drops: records lack them.
        return ()

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return ()

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        for name in self.columns:
            self.input_type(types, name)
        return {}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        assert isinstance(state, DistinctCounts)
        return rows.select([name for name in rows.columns if name not in state.dropped])

    @property
    @override
    def may_drop(self) -> tuple[str, ...]:
        return self.columns

    @override
    def dropped(self, state: State | None) -> tuple[str, ...]:
        return state.dropped if isinstance(state, DistinctCounts) else ()

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> DistinctStatistic:
        return DistinctStatistic(self)

    @override
    def load_state(self, directory: Path, name: str) -> DistinctCounts:
        where = f"{directory / name}.json: $.state"
        counts = decode_state(_Counts, dict(read_params(directory, name, self.kind)), where).columns
        if counts.keys() != set(self.columns):
            problem = f"got counts of {', '.join(counts)}, expected those of {', '.join(self.columns)}"
            raise FormatError(f"{where}.columns", problem)
        return _distinct_counts(self, counts)


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Column -> its distinct values, and the columns that have too few, as in the file."""

    columns: Mapping[str, int]
    dropped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(checks.integer(0, checks.MOST).accepts, self.columns.values())):
            checks.fail(self, "columns", "counts >= 0")


class DistinctStatistic(MergeableStatistic):
    """Collects distinct values until a column has enough."""

    def __init__(self, op: DropLowCardinality) -> None:
        self._op = op
        self._seen: dict[str, set[object]] = {name: set() for name in op.columns}

    @override
    def observe(self, rows: Rows) -> Mapping[str, pa.Array]:
        enough = self._op.min_distinct
        # `merge` may add to the sets at the same time, in another thread: at worst a column is read once more.
        short = [name for name, seen in self._seen.items() if len(seen) < enough]
        return {name: lookup_values(rows.columns[name]).drop_null().unique().slice(0, enough) for name in short}

    @override
    def merge(self, partial: Mapping[str, pa.Array | Sequence[object]]) -> None:
        for name, values in partial.items():
            self._seen[name].update(values.to_pylist() if isinstance(values, pa.Array) else values)

    @override
    def partial(self) -> Mapping[str, Sequence[object]]:
        return {name: list(seen) for name, seen in self._seen.items()}

    @override
    def finish(self) -> DistinctCounts:
        counts = {name: min(len(seen), self._op.min_distinct) for name, seen in self._seen.items()}
        return _distinct_counts(self._op, counts)


def _distinct_counts(op: DropLowCardinality, counts: Mapping[str, int]) -> DistinctCounts:
    return DistinctCounts(counts, tuple(name for name, count in counts.items() if count < op.min_distinct))
