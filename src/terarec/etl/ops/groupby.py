# SPDX-License-Identifier: Apache-2.0
"""The operator that joins statistics of the training rows by value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from terarec.etl.columns import ColumnType, Rows, array_of, numbers_of
from terarec.etl.ops.base import ColumnsOperator, ColumnTypes, Stage, scalar_input
from terarec.etl.ops.states import SpillOptions, State, Statistic, read_table, table_path, write_table
from terarec.etl.ops.values import RecordFunction
from terarec.etl.partitions import Aggregate, sums_by_value
from terarec.etl.values import VALUE_TYPES, ValueIds, encoding_bytes, lookup_values
from terarec.spec import checks
from terarec.spec.registry import register

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
            # A value that training lacks occurred 0 times; its other statistics are missing.
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
    values: checks.AnyColumnNames = ()
    statistics: tuple[GroupStatistic, ...] = ("count",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.statistics or any(statistic not in _STATISTICS for statistic in self.statistics):
            checks.fail(self, "statistics", f"some of {', '.join(map(repr, _STATISTICS))}")
        checks.distinct(self, "statistics", self.statistics)
        if bool(self.values) is (self.statistics == ("count",)):
            checks.reject(self, "values", "expected columns exactly where statistics other than 'count' are requested")
        checks.distinct(self, "columns", self.writes)

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.columns, *self.values)))

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        # Column by column: `count` first, then value by value its statistics.
        named: list[str] = []
        for column in self.columns:
            named += [f"{column}_count"] if "count" in self.statistics else []
            others = [statistic for statistic in self.statistics if statistic != "count"]
            named += [f"{column}_{value}_{statistic}" for value in self.values for statistic in others]
        return tuple(named)

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        for name in self.columns:
            scalar_input(types, name, self.accepted)
        for name in self.values:
            scalar_input(types, name, ("number", "integer"))
        return dict.fromkeys(self.writes, ColumnType("number"))

    def outputs_of(self, column: str) -> tuple[str, ...]:
        """Return the outputs of the input `column`."""
        each = len(self.writes) // len(self.columns)
        first = self.columns.index(column) * each
        return self.writes[first : first + each]

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        assert isinstance(state, JoinedGroups)
        outputs = {}
        for name in self.columns:
            groups = state.columns[name]
            ids = groups.ids.find(rows.columns[name])
            outputs.update({output: array_of(groups.statistics[output][ids]) for output in self.outputs_of(name)})
        return rows.with_columns(outputs)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        assert isinstance(state, JoinedGroups)
        return [
            RecordFunction((name,), self.outputs_of(name), partial(_lookup_groups, state.columns[name]), takes="raw")
            for name in self.columns
        ]

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> GroupbyStatistic:
        return GroupbyStatistic(self, types, memory)

    @override
    def load_state(self, directory: Path, name: str) -> JoinedGroups:
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
    return {name: float(values[name][places[0]]) for name, places in present.items() if len(places)}


class GroupbyStatistic(Statistic):
    """Sums the values of a `JoinGroupby` by group.

    Deviations are taken from squares of distances to one origin, the first number in training, which keeps their
    digits where numbers lie far from 0 (times, prices).
    """

    def __init__(self, op: JoinGroupby, types: ColumnTypes, memory: SpillOptions) -> None:
        self._op = op
        self._memory_bytes = memory.memory_bytes
        aggregates: dict[str, Aggregate] = {"count": "sum"}
        for number in range(len(op.values)):
            aggregates.update({f"{name}{number}": function for name, function in _AGGREGATES.items()})
        counts = {name for name in aggregates if name.startswith(("count", "present"))}
        numbers = {name: pa.int64() if name in counts else pa.float64() for name in aggregates}
        self._sums = sums_by_value(
            {name: types[name] for name in op.columns}, numbers, aggregates, memory.directory, self._memory_bytes
        )
        self._origins: dict[str, float] = {}

    @override
    def observe(self, rows: Rows) -> _Partial:
        # Rows and not sums of the block: floats are added row by row, so that the size of blocks changes no bit.
        groups = {name: lookup_values(rows.columns[name]) for name in self._op.columns}
        return groups, {name: numbers_of(rows.columns[name]) for name in self._op.values}

    @override
    def merge(self, partial: _Partial) -> None:
        groups, values = partial
        self.merge_rest(_first_numbers(values))
        summed = self._summands(list(values.values()))
        for name, group in groups.items():
            counts = pa.array(np.ones(len(group), dtype=np.int64))
            self._sums[name].add(pa.table({"value": group, "count": counts, **summed}))

    # Sums of floats depend on the order of the rows, and origins are first numbers.
    in_order = True

    def split(self, partial: _Partial) -> tuple[Mapping[str, pa.Table], Mapping[str, float]]:
        """Return the numbers by group, and the first number of each column."""
        groups, values = partial
        numbers = {f"number{place}": pa.array(x) for place, x in enumerate(values.values())}
        rows = {name: pa.table({"value": group, **numbers}) for name, group in groups.items()}
        return rows, _first_numbers(values)

    def merge_rest(self, rest: Mapping[str, float]) -> None:
        """Take first numbers as the origins of columns that have none yet."""
        # The earliest wins: on a cluster rests come in the order of the sources, so origins are those of the local
        # engine.
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
        """Return the columns to sum, which are computed from the numbers of each column."""
        summed: dict[str, pa.Array] = {}
        for place, (name, x) in enumerate(zip(self._op.values, values, strict=True)):
            present = ~np.isnan(x)
            gap = x - self._origins.get(name, 0.0)
            parts = {"present": present.astype(np.int64), "sum": x, "gap": gap, "square": gap * gap, "min": x, "max": x}
            summed.update({f"{part}{place}": pa.array(array, from_pandas=True) for part, array in parts.items()})
        return summed

    @override
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
        columns = [table.column("count").to_numpy().astype(np.float64)] if "count" in op.statistics else []
        for number in range(len(op.values)):
            part = {name: table.column(f"{name}{number}").to_numpy().astype(np.float64) for name in _AGGREGATES}
            present = np.where(part["present"] > 0.0, part["present"], np.nan)
            variance = part["square"] / present - (part["gap"] / present) ** 2
            # Rounding may leave a variance above 0 where all numbers are one.
            varies = part["min"] != part["max"]
            statistics = {**part, "mean": part["sum"] / present, "std": np.sqrt(np.maximum(variance, 0.0)) * varies}
            columns += [statistics[statistic] for statistic in op.statistics if statistic != "count"]
        return pa.table([table.column("value"), *columns], names=["value", *self._op.outputs_of(column)])
