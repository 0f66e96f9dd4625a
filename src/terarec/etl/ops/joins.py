# SPDX-License-Identifier: Apache-2.0
"""Operators on side tables: the join by a key, and negative examples drawn from a table of candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import ConfigError, FormatError, NoSpaceError
from terarec.etl.columns import ARROW_TYPES, ColumnType, Rows, array_of, flat, is_missing, kind_of, like, list_offsets
from terarec.etl.ops.base import ColumnTypes, Operator, Stage, scalar_input
from terarec.etl.ops.sequences import ITEM_BITS, MAX_ITEMS
from terarec.etl.ops.states import SpillOptions, State, Statistic, read_table, table_path, write_table
from terarec.etl.ops.values import RecordFunction, joined, values_of_array
from terarec.etl.values import VALUE_TYPES, ValueIds
from terarec.kernels.cpu.encoding import HASH_SEED, xxh64_int64
from terarec.ragged import flat_values, like_values
from terarec.reports.text import byte_text
from terarec.spec import checks
from terarec.spec.registry import register

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
            # A key that the table lacks joins this row, so that `take` needs no mask.
            last = pa.array([[] if pa.types.is_large_list(column.type) else None], column.type)
            self.columns[name] = pa.concat_arrays([*column.chunks, last])

    def positions(self, keys: pa.Array) -> NDArray[np.int64]:
        """Return the rows of `columns` of the m values of `keys`, int64[m]."""
        places = self.ids.find(keys) - self.ids.first_id
        return np.where(places < 0, len(self.ids.values), places)

    def positions_of_values(self, keys: list[Any]) -> list[int]:
        """Return the rows of `columns` of a few Python values."""
        missing, first = len(self.ids.values), self.ids.first_id
        return [missing if number < first else number - first for number in self.ids.find_values(keys).tolist()]

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
    table: checks.Name
    on: checks.ColumnName
    columns: checks.ColumnNames

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.on in self.columns:
            checks.fail(self, "columns", f"columns other than {self.on!r}, which both sides have")

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return (self.on,)

    @property
    @override
    def serving_reads(self) -> tuple[str, ...]:
        return (self.on,)

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return self.columns

    @property
    @override
    def side_table(self) -> str | None:
        return self.table

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        key = self.input_type(types, self.on)
        types_of_outputs = {}
        for name in self.columns:
            column_type = types[name]
            if key.is_list and column_type.is_list:
                raise ConfigError(
                    f"column {name!r} of table {self.table!r}",
                    f"holds {column_type}, expected one value a row to be joined to lists of {self.on!r}",
                )
            lists = key if key.is_list else column_type
            types_of_outputs[name] = ColumnType(column_type.kind, lists.is_list, lists.max_length)
        return types_of_outputs

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        return {}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        assert isinstance(state, SideTable)
        keys = rows.columns[self.on]
        positions = array_of(state.positions(keys))
        return rows.with_columns({name: like(keys, state.columns[name].take(positions)) for name in self.columns})

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        assert isinstance(state, SideTable)
        call = partial(_join_values, state, self.columns)
        return [RecordFunction((self.on,), self.columns, call, takes="raw")]

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SideTableStatistic:
        return SideTableStatistic(self.table, (self.on, *self.columns), types, memory.memory_bytes)

    @override
    def load_state(self, directory: Path, name: str) -> SideTable:
        return read_side_table(directory, name, self.on, self.columns)


def read_side_table(directory: Path, name: str, key: str, columns: Sequence[str]) -> SideTable:
    """Read the file of `SideTable.save`.

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
        # Making the table finds a key that occurs twice.
        _ = side.ids.table
    except ValueError:
        keys = side.ids.values.value_counts()
        twice = keys.filter(pc.greater(keys.field("counts"), 1)).field("values")[0].as_py()
        raise FormatError(
            where, f"got several rows with {side.rows.column_names[0]} {twice!r}, expected at most one for each"
        ) from None
    return side


class SideTableStatistic(Statistic):
    """Keeps the rows of a side table."""

    def __init__(self, table: str, names: Sequence[str], types: ColumnTypes, memory_bytes: int | None) -> None:
        self._table, self._names = table, tuple(names)
        self._memory_bytes = memory_bytes
        self._num_bytes = 0
        empty = {}
        for name in self._names:
            values = pa.array([], ARROW_TYPES[types[name].kind])
            offsets = pa.array([0], pa.int64())
            empty[name] = pa.LargeListArray.from_arrays(offsets, values) if types[name].is_list else values
        # So that a table of no rows has columns of the right types.
        self._rows = [pa.table(empty)]

    @override
    def observe(self, rows: Rows) -> pa.Table:
        kept = rows.filter(~is_missing(rows.columns[self._names[0]]))
        return pa.Table.from_batches([kept.select(self._names).batch])

    @override
    def merge(self, partial: pa.Table) -> None:
        """Take in those of a block."""
        self._rows.append(partial)
        self._num_bytes += partial.nbytes
        if self._memory_bytes is not None and _PEAK * self._num_bytes > self._memory_bytes:
            raise NoSpaceError(
                f"table {self._table!r}",
                f"takes more than {byte_text(self._memory_bytes)}, the bound of "
                "memory; fewer columns or more memory would help",
            )

    @override
    def finish(self) -> SideTable:
        """Return the table."""
        rows = pa.concat_tables(self._rows).combine_chunks()
        self._rows = []
        return _checked(SideTable(rows), f"table {self._table!r}")


@register("negative_sampling")
@dataclass(frozen=True, kw_only=True)
class NegativeSampling(Operator):
    """Each row, then `negatives` copies of it with other values of `column`, drawn from a side table.

    Draw i of row r has the row id ``r << 16 | i``, and takes value ``hash(row id) mod m`` of the m values of the side
    table other than the row's own, in the order of the table: draws are uniform, with replacement, and
    independent of blocks and threads. Served and scored records have no draws.

    Attributes:
        table: Name in ``WorkflowSpec.tables`` of the table of candidates, one row each.
        column: Column of that name, of one type, on both sides; distinct in the side table, not missing in the rows.
        negatives: Number of draws for each row.
        label: Name of the number column that the step adds: 1 for the row itself, 0 for its draws.
        seed: Seed of the hash.
    """

    stage: ClassVar[Stage] = "rows"
    explodes: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    table: checks.Name
    column: checks.ColumnName
    negatives: checks.Width
    label: checks.ColumnName = "label"
    seed: checks.NonNegativeInt64 = HASH_SEED

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.label == self.column:
            checks.fail(self, "label", "a name other than that of column")
        if self.negatives >= MAX_ITEMS:
            checks.fail(self, "negatives", f"less than {MAX_ITEMS}")

    @property
    @override
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return (self.column, self.label)

    @property
    @override
    def side_table(self) -> str | None:
        return self.table

    @property
    @override
    def side_columns(self) -> tuple[str, ...]:
        return (self.column,)

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        column_type = scalar_input(types, self.column, ("text", "integer", "hex32"))
        return {self.column: column_type, self.label: ColumnType("number")}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        """Add the draws.

        Raises:
            ConfigError: The side table has less than two rows.
        """
        assert isinstance(state, SideTable)
        candidates = state.ids.values
        if len(candidates) < 2:
            raise ConfigError(f"table {self.table!r}", f"got {len(candidates)} rows, expected at least 2 to draw from")
        each = self.negatives + 1
        source = np.repeat(np.arange(rows.num_rows), each)
        repeated = rows.take(source)
        place = np.tile(np.arange(each), rows.num_rows)
        # As the items of an exploded row: place 0 is the row itself.
        ids = (repeated.ids << ITEM_BITS) | place
        own = rows.columns[self.column]
        drawn = np.flatnonzero(place)
        positions = self._draw(ids[drawn], np.repeat(state.positions(own), self.negatives), len(candidates))
        # The values of the rows, and behind them those of the draws, put in the order of the rows.
        values = pa.concat_arrays([own, candidates.take(array_of(positions))])
        source[drawn] = rows.num_rows + np.arange(len(drawn))
        outputs = {self.column: values.take(array_of(source)), self.label: array_of((place == 0).astype(np.float64))}
        return replace(repeated.with_columns(outputs), ids=ids)

    def _draw(self, rows: NDArray[np.int64], own: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return positions of candidates, other than `own`, which is `count` where a row's value is not a candidate."""
        # Unsigned, as the remainder of a negative hash would be no position.
        hashes = xxh64_int64(rows, self.seed).view(np.uint64)
        others = (count - (own < count)).astype(np.uint64)
        positions = (hashes % others).astype(np.int64)
        # One less to draw from, and the row's own value passed over: the others stay equally likely.
        return positions + (positions >= own)

    @override
    def for_scoring(self) -> Operator:
        return _WithoutDraws(label=self.label)

    @override
    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SideTableStatistic:
        return SideTableStatistic(self.table, (self.column,), types, memory.memory_bytes)

    @override
    def load_state(self, directory: Path, name: str) -> SideTable:
        return read_side_table(directory, name, self.column, ())


@dataclass(frozen=True, kw_only=True)
class _WithoutDraws(Operator):
    """`NegativeSampling` of rows that are only scored: each stays as it is, and counts as no draw."""

    label: str

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return (self.label,)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        return rows.with_columns({self.label: array_of(np.ones(rows.num_rows))})
