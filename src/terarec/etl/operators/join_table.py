"""Columns of a side table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError, StorageError
from terarec.etl.columns import ARROW_TYPES, Block, Column, ColumnType, Kind, from_arrow, to_arrow
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.plain_arrow import plain_of_column
from terarec.etl.operators.plain_function import PlainFunction, PlainLists, joined
from terarec.etl.operators.state_files import read_table, table_path, write_table
from terarec.etl.operators.step_code import StepCode
from terarec.etl.values.value_ids import ValueIds
from terarec.etl.values.value_kind import VALUE_TYPES
from terarec.spec import JoinTable

_KINDS: dict[pa.DataType, Kind] = {**VALUE_TYPES, ARROW_TYPES["number"]: "number"}


class SideTable:
    """The state of `JoinTable`: the rows of the side table that have a key.

    Attributes:
        rows: the key, then the columns that are joined.
        ids: of the keys.
        columns: those that are joined; row i belongs to key i, the last row is missing throughout.
    """

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        keys = rows.column(0).combine_chunks()
        self.ids = ValueIds(VALUE_TYPES[keys.type], keys)
        self.columns: dict[str, Column] = {}
        for name in rows.column_names[1:]:
            values = pa.concat_arrays([*rows.column(name).chunks, pa.nulls(1, rows.column(name).type)])
            item = values.type.value_type if pa.types.is_large_list(values.type) else values.type
            self.columns[name] = from_arrow(values, _KINDS[item])

    def positions(self, keys: Column) -> NDArray[np.int64]:
        """The rows of `columns` that the m values of `keys` name, int64[m]."""
        found = self.ids.find(keys) - self.ids.first_id
        return np.where(found < 0, len(self.ids.values), found)

    def plain_positions(self, keys: list[Any]) -> list[int]:
        """The same of m plain values."""
        missing, first = len(self.ids.values), self.ids.first_id
        return [missing if found < first else found - first for found in self.ids.find_plain(keys).tolist()]

    def save(self, directory: Path, name: str) -> None:
        """Write ``<name>-<key>.parquet``: `rows`."""
        write_table(table_path(directory, name, self.rows.column_names[0]), self.rows)


class JoinTableCode(StepCode[JoinTable]):
    """Code of `JoinTable`."""

    stage: Stage = "fitted"
    accepted = ("text", "integer", "hex32")

    def __init__(self, spec: JoinTable) -> None:
        super().__init__(spec)
        self.table = spec.table

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Those of the side table, in lists where the key is in lists."""
        key = self.input_type(types, self.spec.on)
        made = {}
        for name in self.spec.columns:
            found = types[name]
            if key.is_list and found.is_list:
                raise ConfigError(
                    f"column {name!r} of table {self.spec.table!r} holds {found}, expected one value a row "
                    f"to be joined to lists of {self.spec.on!r}"
                )
            lists = key if key.is_list else found
            made[name] = ColumnType(found.kind, lists.is_list, lists.max_length)
        return made

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """None: a side table holds no ids."""
        return {}

    def apply(self, block: Block, state: State | None) -> Block:
        """Look the keys up."""
        assert isinstance(state, SideTable)
        keys = block.columns[self.spec.on]
        positions = state.positions(keys)
        return block.with_columns({name: keys.like(state.columns[name].take(positions)) for name in self.spec.columns})

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The same of plain values."""
        assert isinstance(state, SideTable)
        call = partial(_plain_rows, state, self.spec.columns)
        return [PlainFunction((self.spec.on,), self.spec.columns, call, takes="raw")]

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SideTableStatistic:
        """Reads the side table, whose columns are of these `types`."""
        return SideTableStatistic(self.spec, types, memory.memory_bytes)

    def load_state(self, directory: Path, name: str) -> SideTable:
        """Read what `SideTable.save` wrote."""
        path = table_path(directory, name, self.spec.on)
        values = [*_KINDS, *map(pa.large_list, _KINDS)]
        types: dict[str, Sequence[pa.DataType]] = dict.fromkeys(self.spec.columns, values)
        table = read_table(path, {self.spec.on: tuple(VALUE_TYPES), **types}, nullable=self.spec.columns)
        return _checked(SideTable(table.select([self.spec.on, *self.spec.columns])), str(path))


FEW_ROWS = 16
"""Up to so many texts are taken out of a side table one by one: Arrow takes 10 us for one, and 11 for 20 (Zen 3)."""


def _plain_rows(side: SideTable, names: Sequence[str], keys: Any) -> Sequence[Any]:
    """The columns `names` of the rows that plain keys name."""
    positions = side.plain_positions(keys.items if isinstance(keys, PlainLists) else keys)
    columns = [_plain_items(side.columns[name], positions) for name in names]
    if isinstance(keys, PlainLists):
        return [PlainLists(items, keys.offsets) for items in columns]
    return columns


def _plain_items(column: Column, positions: list[int]) -> Any:
    if column.type != "text" or len(positions) > FEW_ROWS:
        return plain_of_column(column.take(np.array(positions, dtype=np.int64)))
    texts, offsets = column.values, column.offsets
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
            f"{where}: got several rows with {side.rows.column_names[0]} {twice!r}, expected at most one for each"
        ) from None
    return side


class SideTableStatistic:
    """Keeps the rows of a side table.

    Args:
        spec: of the step.
        types: of the side table's columns.
        memory_bytes: bound of the rows; None: no bound.
    """

    def __init__(self, spec: JoinTable, types: ColumnTypes, memory_bytes: int | None) -> None:
        self._spec = spec
        self._memory_bytes = memory_bytes
        self._held = 0
        empty = {}
        for name in (spec.on, *spec.columns):
            values = pa.array([], ARROW_TYPES[types[name].kind])
            offsets = pa.array([0], pa.int64())
            empty[name] = pa.LargeListArray.from_arrays(offsets, values) if types[name].is_list else values
        self._rows = [pa.table(empty)]

    def observe(self, block: Block) -> pa.Table:
        """The rows of a block of the side table; those without a key are left out."""
        kept = block.keep(~block.columns[self._spec.on].is_missing())
        return pa.table({name: to_arrow(kept.columns[name]) for name in (self._spec.on, *self._spec.columns)})

    def merge(self, partial: pa.Table) -> None:
        """Take in those of a block.

        Raises:
            StorageError: the table passes the bound of memory.
        """
        self._rows.append(partial)
        self._held += partial.nbytes
        if self._memory_bytes is not None and _PEAK * self._held > self._memory_bytes:
            raise StorageError(
                f"table {self._spec.table!r}: takes more than {self._memory_bytes / 2**20:.1f} MiB, the bound of "
                "memory; fewer columns or more memory would help"
            )

    def finish(self) -> SideTable:
        """The table.

        Raises:
            FormatError: a key occurs twice.
        """
        rows = pa.concat_tables(self._rows).combine_chunks()
        self._rows = []
        return _checked(SideTable(rows), f"table {self._spec.table!r}")
