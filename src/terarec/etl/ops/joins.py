"""Operators that join statistics of the training rows, or a side table, by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError, StorageError
from terarec.etl.columns import (
    ARROW_TYPES,
    ColumnType,
    Rows,
    array_of,
    flat,
    is_missing,
    kind_of,
    like,
    list_offsets,
    lookup_values,
    numbers_of,
)
from terarec.etl.ops.base import (
    ColumnsOperator,
    ColumnTypes,
    Operator,
    SpillOptions,
    Stage,
    State,
    check_column,
    check_columns,
    scalar_input,
)
from terarec.etl.ops.record_values import RecordFunction, joined, values_of_array
from terarec.etl.ops.states import read_table, table_path, write_table
from terarec.etl.value_counts import Aggregate, GroupSums, encoding_bytes
from terarec.etl.values import VALUE_TYPES, ValueIds, lookup_kind
from terarec.ragged import flat_values, like_values
from terarec.spec import checks, register

GroupStatistic = Literal["count", "sum", "mean", "std", "min", "max"]
_STATISTICS = ("count", "sum", "mean", "std", "min", "max")


class FittedGroups:
    """Statistics of the groups of one column.

    Attributes:
        rows: Column value (null: missing) and, for each output, its statistic (float64, NaN: missing).
        ids: Ids of the values.
        statistics: Output -> float64[ids].
    """

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        values = rows.column("value").combine_chunks()
        self.ids = ValueIds(VALUE_TYPES[values.type], values.drop_null())
        places = self.ids.find(values)
        self.statistics: dict[str, NDArray[np.float64]] = {}
        for output in rows.column_names[1:]:
            statistics = np.full(self.ids.num_ids, 0.0 if output.endswith("_count") else np.nan)
            statistics[places] = rows.column(output).to_numpy()
            self.statistics[output] = statistics


@dataclass(frozen=True, slots=True)
class JoinedGroups:
    """State of `JoinGroupby`: input column -> its groups."""

    columns: Mapping[str, FittedGroups]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>-<column>.parquet`` for each column: `FittedGroups.rows`."""
        for column, groups in self.columns.items():
            write_table(table_path(directory, name, column), groups.rows)


@register("join_groupby")
@dataclass(frozen=True, kw_only=True)
class JoinGroupby(ColumnsOperator):
    """Statistics of the training rows that have a row's value: ``<column>_count``, ``<column>_<value>_<statistic>``.

    Attributes:
        columns: Each is grouped by on its own (for several together, `Cross` them first).
        values: Number or integer columns of the statistics other than ``count``; never read at serving.
        statistics: Some of "count", "sum", "mean", "std" (the population's), "min", "max".
    """

    stage: ClassVar[Stage] = "fitted"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32", "id")
    values: tuple[str, ...] = ()
    statistics: tuple[GroupStatistic, ...] = ("count",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values:
            check_columns(self, "values")
        if not self.statistics or any(statistic not in _STATISTICS for statistic in self.statistics):
            checks.fail(self, "statistics", f"some of {', '.join(map(repr, _STATISTICS))}")
        checks.distinct(self, "statistics", self.statistics)
        if bool(self.values) is (self.statistics == ("count",)):
            checks.reject(self, "values", "expected columns exactly where a statistic other than 'count' is asked")
        checks.distinct(self, "columns", self.writes)

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return tuple(dict.fromkeys((*self.columns, *self.values)))

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds: column by column, ``count`` first, then value by value its statistics."""
        named: list[str] = []
        for column in self.columns:
            named += [f"{column}_count"] if "count" in self.statistics else []
            others = [statistic for statistic in self.statistics if statistic != "count"]
            named += [f"{column}_{value}_{statistic}" for value in self.values for statistic in others]
        return tuple(named)

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return numbers."""
        for name in self.columns:
            scalar_input(types, name, self.accepted)
        for name in self.values:
            scalar_input(types, name, ("number", "integer"))
        return dict.fromkeys(self.writes, ColumnType("number"))

    def outputs_of(self, column: str) -> tuple[str, ...]:
        """Return those of `writes` that are made of the input `column`."""
        each = len(self.writes) // len(self.columns)
        first = self.columns.index(column) * each
        return self.writes[first : first + each]

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Look the statistics up."""
        assert isinstance(state, JoinedGroups)
        made = {}
        for name in self.columns:
            groups = state.columns[name]
            ids = groups.ids.find(rows.columns[name])
            made.update({output: array_of(groups.statistics[output][ids]) for output in self.outputs_of(name)})
        return rows.with_columns(made)

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return a function for each input."""
        assert isinstance(state, JoinedGroups)
        return [
            RecordFunction((name,), self.outputs_of(name), partial(_lookup_groups, state.columns[name]), takes="raw")
            for name in self.columns
        ]

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> GroupbyStatistic:
        """Return a statistic that sums the values by group."""
        return GroupbyStatistic(self, types, memory)

    def load_state(self, directory: Path, name: str) -> JoinedGroups:
        """Read the state."""
        columns = {}
        for column in self.columns:
            statistics = dict.fromkeys(self.outputs_of(column), (pa.float64(),))
            path = table_path(directory, name, column)
            table = read_table(path, {"value": tuple(VALUE_TYPES), **statistics}, nullable=("value",))
            columns[column] = FittedGroups(table.select(["value", *statistics]))
        return JoinedGroups(columns)


def _lookup_groups(groups: FittedGroups, values: Any) -> Sequence[Any]:
    ids = groups.ids.find_values(values)
    return [statistics[ids] for statistics in groups.statistics.values()]


_AGGREGATES: dict[str, Aggregate] = {
    "present": "sum",
    "sum": "sum",
    "gap": "sum",
    "square": "sum",
    "min": "min",
    "max": "max",
}
"""Sums over the numbers x of a column: their count, x, x - origin, its square; and the extremes."""


_Partial: TypeAlias = tuple[Mapping[str, pa.Array], Mapping[str, NDArray[np.float64]]]


def _first_numbers(values: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return the first number of each column that has one."""
    present = {name: np.flatnonzero(~np.isnan(x)) for name, x in values.items()}
    return {name: float(values[name][found[0]]) for name, found in present.items() if len(found)}


class GroupbyStatistic:
    """Sums the values of a `JoinGroupby` by group.

    Deviations are taken from squares of distances to one origin, the first number in training, which keeps their
    digits where numbers lie far from 0 (times, prices).

    Args:
        op: The step.
        types: Types of the columns before it.
        memory: Bound of the sums of all columns together, and of the statistics made of them.
    """

    def __init__(self, op: JoinGroupby, types: ColumnTypes, memory: SpillOptions) -> None:
        self._op = op
        self._memory_bytes = memory.memory_bytes
        bound = None if memory.memory_bytes is None else memory.memory_bytes // len(op.columns)
        aggregates: dict[str, Aggregate] = {"count": "sum"}
        for number in range(len(op.values)):
            aggregates.update({f"{name}{number}": function for name, function in _AGGREGATES.items()})
        counts = {name for name in aggregates if name.startswith(("count", "present"))}
        numbers = [(name, pa.int64() if name in counts else pa.float64()) for name in aggregates]
        self._sums: dict[str, GroupSums] = {}
        for number, name in enumerate(op.columns):
            schema = pa.schema([("value", ARROW_TYPES[lookup_kind(types[name].kind)]), *numbers])
            self._sums[name] = GroupSums(name, schema, aggregates, memory.directory / f"sums-{number:03d}", bound)
        self._origins: dict[str, float] = {}

    def observe(self, rows: Rows) -> _Partial:
        """Return the groups and the numbers of some training rows."""
        groups = {name: lookup_values(rows.columns[name]) for name in self._op.columns}
        return groups, {name: numbers_of(rows.columns[name]) for name in self._op.values}

    def merge(self, partial: _Partial) -> None:
        """Add the partial state of a block."""
        groups, values = partial
        self.merge_rest(_first_numbers(values))
        summed = self._summands(list(values.values()))
        for name, group in groups.items():
            counts = pa.array(np.ones(len(group), dtype=np.int64))
            self._sums[name].add(pa.table({"value": group, "count": counts, **summed}))

    in_order = True

    def split(self, partial: _Partial) -> tuple[Mapping[str, pa.Table], Mapping[str, float]]:
        """Return the numbers by group, and the first number of each column."""
        groups, values = partial
        numbers = {f"number{place}": pa.array(x) for place, x in enumerate(values.values())}
        rows = {name: pa.table({"value": group, **numbers}) for name, group in groups.items()}
        return rows, _first_numbers(values)

    def merge_rest(self, rest: Mapping[str, float]) -> None:
        """Take first numbers as the origins of columns that have none yet."""
        self._origins = {**rest, **self._origins}

    def merge_rows(self, rows: Mapping[str, pa.Table]) -> None:
        """Add numbers by group, or the sums of groups."""
        for name, table in rows.items():
            if "count" not in table.column_names:
                numbers = [table.column(f"number{place}").to_numpy() for place in range(len(self._op.values))]
                counts = pa.array(np.ones(table.num_rows, dtype=np.int64))
                table = pa.table({"value": table.column("value"), "count": counts, **self._summands(numbers)})
            self._sums[name].add(table)

    def reduced(self, name: str) -> pa.Table:
        """Return the sums of the groups of column `name`."""
        return self._sums[name].sums()

    def _summands(self, values: Sequence[NDArray[np.float64]]) -> dict[str, pa.Array]:
        """Return the columns that are summed, made of the numbers of each column."""
        summed: dict[str, pa.Array] = {}
        for place, (name, x) in enumerate(zip(self._op.values, values, strict=True)):
            present = ~np.isnan(x)
            gap = x - self._origins.get(name, 0.0)
            parts = {"present": present.astype(np.int64), "sum": x, "gap": gap, "square": gap * gap, "min": x, "max": x}
            summed.update({f"{part}{place}": pa.array(array, from_pandas=True) for part, array in parts.items()})
        return summed

    def finish(self) -> JoinedGroups:
        """Return the statistics of each group.

        Raises:
            StorageError: They would not fit in memory; names the column, its size, and what helps.
            OSError: The disk is full.
        """
        columns, left = {}, self._memory_bytes
        for name, sums in self._sums.items():
            rows = sums.result(partial(self._statistics_of, name), left)
            left = None if left is None else left - encoding_bytes(rows)
            columns[name] = FittedGroups(rows)
        return JoinedGroups(columns)

    def _statistics_of(self, column: str, table: pa.Table) -> pa.Table:
        """Compute the value and the outputs of `column` from sums by its values."""
        op = self._op
        made = [table.column("count").to_numpy().astype(np.float64)] if "count" in op.statistics else []
        for number in range(len(op.values)):
            part = {name: table.column(f"{name}{number}").to_numpy().astype(np.float64) for name in _AGGREGATES}
            present = np.where(part["present"] > 0.0, part["present"], np.nan)
            variance = part["square"] / present - (part["gap"] / present) ** 2
            varies = part["min"] != part["max"]
            statistics = {**part, "mean": part["sum"] / present, "std": np.sqrt(np.maximum(variance, 0.0)) * varies}
            made += [statistics[statistic] for statistic in op.statistics if statistic != "count"]
        return pa.table([table.column("value"), *made], names=["value", *self._op.outputs_of(column)])


_TYPES = (*VALUE_TYPES, ARROW_TYPES["number"])
"""Types of the values of a side table."""


class SideTable:
    """State of `JoinTable`: the rows of the side table that have a key.

    Attributes:
        rows: The key, then the columns that are joined.
        ids: Ids of the keys.
        columns: Columns that are joined; row i belongs to key i, the last row is missing throughout.
    """

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        keys = rows.column(0).combine_chunks()
        self.ids = ValueIds(VALUE_TYPES[keys.type], keys)
        self.columns: dict[str, pa.Array] = {}
        for name in rows.column_names[1:]:
            column = rows.column(name)
            last = pa.array([[] if pa.types.is_large_list(column.type) else None], column.type)
            self.columns[name] = pa.concat_arrays([*column.chunks, last])

    def positions(self, keys: pa.Array) -> NDArray[np.int64]:
        """Return the rows of `columns` of the m values of `keys`, int64[m]."""
        found = self.ids.find(keys) - self.ids.first_id
        return np.where(found < 0, len(self.ids.values), found)

    def positions_of_values(self, keys: list[Any]) -> list[int]:
        """Return the rows of `columns` of a few Python values."""
        missing, first = len(self.ids.values), self.ids.first_id
        return [missing if found < first else found - first for found in self.ids.find_values(keys).tolist()]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>-<key>.parquet``: `rows`."""
        write_table(table_path(directory, name, self.rows.column_names[0]), self.rows)


@register("join_table")
@dataclass(frozen=True, kw_only=True)
class JoinTable(Operator):
    """Adds `columns` of the row of a side table whose `on` equals the row's; missing where there is none.

    Attributes:
        table: Name in ``WorkflowSpec.tables``.
        on: Column of that name, of one type, on both sides; distinct in the side table.
        columns: Columns of the side table.
    """

    stage: ClassVar[Stage] = "fitted"
    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32")
    table: str
    on: str
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        checks.name(self, "table")
        check_column(self, "on")
        check_columns(self, "columns")
        if self.on in self.columns:
            checks.fail(self, "columns", f"columns other than {self.on!r}, which both sides have")

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the step reads while a data set is prepared."""
        return (self.on,)

    @property
    def serving_reads(self) -> tuple[str, ...]:
        """Columns that the step reads when a record is served."""
        return (self.on,)

    @property
    def writes(self) -> tuple[str, ...]:
        """Columns that the step adds or replaces."""
        return self.columns

    @property
    def side_table(self) -> str | None:
        """The table."""
        return self.table

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Return those of the side table, in lists where the key is in lists."""
        key = self.input_type(types, self.on)
        made = {}
        for name in self.columns:
            found = types[name]
            if key.is_list and found.is_list:
                raise ConfigError(
                    f"column {name!r} of table {self.table!r}",
                    f"holds {found}, expected one value a row to be joined to lists of {self.on!r}",
                )
            lists = key if key.is_list else found
            made[name] = ColumnType(found.kind, lists.is_list, lists.max_length)
        return made

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """Return nothing: a side table holds no ids."""
        return {}

    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Look the keys up."""
        assert isinstance(state, SideTable)
        keys = rows.columns[self.on]
        positions = array_of(state.positions(keys))
        return rows.with_columns({name: like(keys, state.columns[name].take(positions)) for name in self.columns})

    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        """Return functions of single values."""
        assert isinstance(state, SideTable)
        call = partial(_join_values, state, self.columns)
        return [RecordFunction((self.on,), self.columns, call, takes="raw")]

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SideTableStatistic:
        """Return a statistic that keeps the side table, whose columns are of these `types`."""
        return SideTableStatistic(self.table, (self.on, *self.columns), types, memory.memory_bytes)

    def load_state(self, directory: Path, name: str) -> SideTable:
        """Read the state."""
        return read_side_table(directory, name, self.on, self.columns)


def read_side_table(directory: Path, name: str, key: str, columns: Sequence[str]) -> SideTable:
    """Read what `SideTable.save` wrote.

    Raises:
        DataNotFoundError: No such file.
        FormatError: Other columns or types, or a key that occurs twice.
    """
    path = table_path(directory, name, key)
    values = [*_TYPES, *map(pa.large_list, _TYPES)]
    types: dict[str, Sequence[pa.DataType]] = dict.fromkeys(columns, values)
    table = read_table(path, {key: tuple(VALUE_TYPES), **types}, nullable=columns)
    return _checked(SideTable(table.select([key, *columns])), str(path))


FEW_ROWS = 16
"""Up to this many texts are taken from a side table one by one: Arrow takes 10 us for one, and 11 for 20 (Zen 3)."""


def _join_values(side: SideTable, names: Sequence[str], keys: Any) -> Sequence[Any]:
    """Return the columns `names` of the rows of a few keys."""
    positions = side.positions_of_values(flat_values(keys))
    return [like_values(keys, _values_at(side.columns[name], positions)) for name in names]


def _values_at(array: pa.Array, positions: list[int]) -> Any:
    if kind_of(array) != "text" or len(positions) > FEW_ROWS:
        return values_of_array(array.take(pa.array(positions, type=pa.int64())))
    texts, offsets = flat(array), list_offsets(array)
    if offsets is None:
        return [texts[position].as_py() for position in positions]
    ends = [offsets[position : position + 2].tolist() for position in positions]
    return joined([[texts[place].as_py() for place in range(*pair)] for pair in ends], "text")


_PEAK = 4
"""Bytes of the process for a byte of a table's columns, at most: 3.6 of 2 M rows of an integer key, a text of 15
characters and an integer, 3.7 with a key of 15 characters, too (143 and 201 bytes a row)."""


def _checked(side: SideTable, where: str) -> SideTable:
    try:
        _ = side.ids.table
    except ValueError:
        keys = side.ids.values.value_counts()
        twice = keys.filter(pc.greater(keys.field("counts"), 1)).field("values")[0].as_py()
        raise FormatError(
            where, f"got several rows with {side.rows.column_names[0]} {twice!r}, expected at most one for each"
        ) from None
    return side


class SideTableStatistic:
    """Keeps the rows of a side table.

    Args:
        table: Name of the table.
        names: Its key, and the other columns to keep.
        types: Types of its columns.
        memory_bytes: Bound of the rows; None for no bound.
    """

    def __init__(self, table: str, names: Sequence[str], types: ColumnTypes, memory_bytes: int | None) -> None:
        self._table, self._names = table, tuple(names)
        self._memory_bytes = memory_bytes
        self._held = 0
        empty = {}
        for name in self._names:
            values = pa.array([], ARROW_TYPES[types[name].kind])
            offsets = pa.array([0], pa.int64())
            empty[name] = pa.LargeListArray.from_arrays(offsets, values) if types[name].is_list else values
        self._rows = [pa.table(empty)]

    def observe(self, rows: Rows) -> pa.Table:
        """Return those rows of the side table that have a key."""
        kept = rows.filter(~is_missing(rows.columns[self._names[0]]))
        return pa.Table.from_batches([kept.select(self._names).batch])

    def merge(self, partial: pa.Table) -> None:
        """Take in those of a block.

        Raises:
            StorageError: The table passes the bound of memory.
        """
        self._rows.append(partial)
        self._held += partial.nbytes
        if self._memory_bytes is not None and _PEAK * self._held > self._memory_bytes:
            raise StorageError(
                f"table {self._table!r}",
                f"takes more than {self._memory_bytes / 2**20:.1f} MiB, the bound of "
                "memory; fewer columns or more memory would help",
            )

    def finish(self) -> SideTable:
        """Return the table.

        Raises:
            FormatError: A key occurs twice.
        """
        rows = pa.concat_tables(self._rows).combine_chunks()
        self._rows = []
        return _checked(SideTable(rows), f"table {self._table!r}")
