"""Figures of the training rows that share a row's value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import ARROW_TYPES, Block, Column, ColumnType, from_arrow, to_arrow
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.plain_function import PlainFunction
from terarec.etl.operators.scalar_input import scalar_input
from terarec.etl.operators.state_files import read_table, table_path, write_table
from terarec.etl.operators.step_code import StepCode
from terarec.etl.values.group_sums import Aggregate, GroupSums
from terarec.etl.values.value_counts import encoding_bytes
from terarec.etl.values.value_ids import ValueIds
from terarec.etl.values.value_kind import VALUE_TYPES, as_values, lookup_kind
from terarec.spec import JoinGroupby


class GroupFigures:
    """What `JoinGroupby` learnt of one column.

    Attributes:
        rows: columns value (null: missing) and, for each output, its figure (float64, NaN: missing).
        ids: of the values.
        figures: output -> float64[ids].
    """

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        values = rows.column("value").combine_chunks()
        kind = VALUE_TYPES[values.type]
        self.ids = ValueIds(kind, values.drop_null())
        places = self.ids.find(from_arrow(values, kind))
        self.figures: dict[str, NDArray[np.float64]] = {}
        for output in rows.column_names[1:]:
            figures = np.full(self.ids.num_ids, 0.0 if output.endswith("_count") else np.nan)
            figures[places] = rows.column(output).to_numpy()
            self.figures[output] = figures


@dataclass(frozen=True, slots=True)
class JoinedGroups:
    """The state of `JoinGroupby`: input column -> its groups."""

    columns: Mapping[str, GroupFigures]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>-<column>.parquet`` for each column: `GroupFigures.rows`."""
        for column, groups in self.columns.items():
            write_table(table_path(directory, name, column), groups.rows)


class JoinGroupbyCode(StepCode[JoinGroupby]):
    """Code of `JoinGroupby`."""

    stage: Stage = "fitted"
    accepted = ("text", "integer", "hex32", "id")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Numbers."""
        for name in self.spec.columns:
            scalar_input(types, name, self.accepted)
        for name in self.spec.values:
            scalar_input(types, name, ("number", "integer"))
        return dict.fromkeys(self.writes, ColumnType("number"))

    def outputs_of(self, column: str) -> tuple[str, ...]:
        """Those of `writes` that are made of the input `column`."""
        each = len(self.writes) // len(self.spec.columns)
        first = self.spec.columns.index(column) * each
        return self.writes[first : first + each]

    def apply(self, block: Block, state: State | None) -> Block:
        """Look the figures up."""
        assert isinstance(state, JoinedGroups)
        made = {}
        for name in self.spec.columns:
            groups = state.columns[name]
            ids = groups.ids.find(block.columns[name])
            made.update({output: Column("number", groups.figures[output][ids]) for output in self.outputs_of(name)})
        return block.with_columns(made)

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The figures of plain values, input by input."""
        assert isinstance(state, JoinedGroups)
        return [
            PlainFunction((name,), self.outputs_of(name), partial(_figures_of, state.columns[name]), takes="raw")
            for name in self.spec.columns
        ]

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> GroupStatistic:
        """Sums the values by group."""
        return GroupStatistic(self, types, memory)

    def load_state(self, directory: Path, name: str) -> JoinedGroups:
        """Read what `JoinedGroups.save` wrote."""
        columns = {}
        for column in self.spec.columns:
            figures = dict.fromkeys(self.outputs_of(column), (pa.float64(),))
            path = table_path(directory, name, column)
            table = read_table(path, {"value": tuple(VALUE_TYPES), **figures}, nullable=("value",))
            columns[column] = GroupFigures(table.select(["value", *figures]))
        return JoinedGroups(columns)


def _figures_of(groups: GroupFigures, values: Any) -> Sequence[Any]:
    ids = groups.ids.find_plain(values)
    return [figures[ids] for figures in groups.figures.values()]


_AGGREGATES: dict[str, Aggregate] = {
    "present": "sum",
    "sum": "sum",
    "gap": "sum",
    "square": "sum",
    "min": "min",
    "max": "max",
}
"""What is summed of the numbers x of a column: how many there are, x, x - origin, its square; and the extremes."""

_Partial: TypeAlias = tuple[Mapping[str, pa.Array], Mapping[str, NDArray[np.float64]]]


class GroupStatistic:
    """Sums the values of a `JoinGroupby` by group.

    Deviations are taken from squares of distances to one origin, the first number in training, which keeps their
    digits where numbers lie far from 0 (times, prices).

    Args:
        code: of the step.
        types: of the columns before it.
        memory: bound of the sums of all columns together, and of the figures made of them.
    """

    def __init__(self, code: JoinGroupbyCode, types: ColumnTypes, memory: SpillOptions) -> None:
        self._code = code
        self._memory_bytes = memory.memory_bytes
        spec = code.spec
        bound = None if memory.memory_bytes is None else memory.memory_bytes // len(spec.columns)
        aggregates: dict[str, Aggregate] = {"count": "sum"}
        for number in range(len(spec.values)):
            aggregates.update({f"{name}{number}": function for name, function in _AGGREGATES.items()})
        counts = {name for name in aggregates if name.startswith(("count", "present"))}
        numbers = [(name, pa.int64() if name in counts else pa.float64()) for name in aggregates]
        self._sums: dict[str, GroupSums] = {}
        for number, name in enumerate(spec.columns):
            schema = pa.schema([("value", ARROW_TYPES[lookup_kind(types[name].kind)]), *numbers])
            self._sums[name] = GroupSums(name, schema, aggregates, memory.directory / f"sums-{number:03d}", bound)
        self._origins: dict[str, float] = {}

    def observe(self, block: Block) -> _Partial:
        """The groups and the numbers of a block of training rows."""
        spec = self._code.spec
        groups = {name: to_arrow(as_values(block.columns[name])) for name in spec.columns}
        return groups, {name: block.columns[name].numbers() for name in spec.values}

    def merge(self, partial: _Partial) -> None:
        """Take in those of a block."""
        groups, values = partial
        summed: dict[str, pa.Array] = {}
        for number, (name, x) in enumerate(values.items()):
            present = ~np.isnan(x)
            if name not in self._origins and present.any():
                self._origins[name] = float(x[np.argmax(present)])
            gap = x - self._origins.get(name, 0.0)
            parts = {"present": present.astype(np.int64), "sum": x, "gap": gap, "square": gap * gap, "min": x, "max": x}
            summed.update({f"{part}{number}": pa.array(array, from_pandas=True) for part, array in parts.items()})
        for name, group in groups.items():
            counts = pa.array(np.ones(len(group), dtype=np.int64))
            self._sums[name].add(pa.table({"value": group, "count": counts, **summed}))

    def finish(self) -> JoinedGroups:
        """The figures of each group.

        Raises:
            StorageError: they would not fit in memory; names the column, its size, and what helps.
            OSError: the disk is full.
        """
        columns, left = {}, self._memory_bytes
        for name, sums in self._sums.items():
            rows = sums.result(partial(self._figures, name), left)
            left = None if left is None else left - encoding_bytes(rows)
            columns[name] = GroupFigures(rows)
        return JoinedGroups(columns)

    def _figures(self, column: str, table: pa.Table) -> pa.Table:
        """The value and the outputs of `column`, of sums by its values."""
        spec = self._code.spec
        made = [table.column("count").to_numpy().astype(np.float64)] if "count" in spec.statistics else []
        for number in range(len(spec.values)):
            part = {name: table.column(f"{name}{number}").to_numpy().astype(np.float64) for name in _AGGREGATES}
            present = np.where(part["present"] > 0.0, part["present"], np.nan)
            variance = part["square"] / present - (part["gap"] / present) ** 2
            varies = part["min"] != part["max"]
            figures = {**part, "mean": part["sum"] / present, "std": np.sqrt(np.maximum(variance, 0.0)) * varies}
            made += [figures[statistic] for statistic in spec.statistics if statistic != "count"]
        return pa.table([table.column("value"), *made], names=["value", *self._code.outputs_of(column)])
