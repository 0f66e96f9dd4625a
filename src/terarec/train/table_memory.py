# SPDX-License-Identifier: Apache-2.0
"""Memory of the tables of a run: rows that will be used, and where each table's rows are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.embedding.tables import RecordedTables, arena_groups
from terarec.errors import ConfigError, DataNotFoundError
from terarec.formats.parts import read_part_keys, read_parts
from terarec.kernels.row_rules import RowRule
from terarec.kernels.slots import SLOT_BYTES
from terarec.memory.budget import TierBudget, filled, read_buffer_bytes
from terarec.memory.row_format import RowFormat
from terarec.memory.row_store import KEY_BYTES
from terarec.ops.row_update import state_dtype, state_shapes
from terarec.optim.rules import table_rules
from terarec.spec import DatasetSpec, DynamicTableSpec, RunSpec, TableSpec, Tiers
from terarec.spec.checks import did_you_mean
from terarec.storage.dynamic_arena import NUMBER_BYTES
from terarec.storage.key_rows import USES, needed_uses

INDEX_BYTES = 20.1
"""Bytes of the hash index for a key: 20.0 to 20.6 measured from 300,000 to 3,000,000 keys."""
FILE_INDEX_BYTES = 16
"""Most bytes of host memory that a row file's index takes for a row."""
FILE_SPACE = 1.5
"""Most space of a row file in proportion to its rows."""

RowsFrom = Literal["table", "keysets", "column", "samples", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMemory:
    """Memory of a table.

    Attributes:
        name: Its name.
        kind: "static" or "dynamic".
        rows: Rows that training gives memory or space: all of a static table in memory, else those of the keys in the
            data.
        rows_from: Source of `rows`: the "table" itself, the distinct keys of the "keysets", the ids of the "column", a
            bound by the number of "samples", or "given".
        width: Length D of a vector.
        row_bytes: Bytes of a row's weights and optimizer state.
        weight_bytes: Bytes of the weights of all these rows.
        state_bytes: Bytes of their optimizer state.
        index_bytes: Bytes of indexes and of what is tracked of each row, in host memory.
        device_bytes: Bytes in the memory of the device.
        host_bytes: Bytes in host memory, with the indexes.
        buffer_bytes: Bytes of host memory, besides these, in which rows are read from files and wait to be written.
        file_bytes: Maximum bytes on the disk.
        resident_share: Share of the rows that the fastest tier holds at once. Where not all rows of an arena fit, its
            tables get equal room as far as they can use it: rows of small tables are used most.
    """

    name: str
    kind: str
    rows: int
    rows_from: RowsFrom
    width: int
    row_bytes: int
    weight_bytes: int
    state_bytes: int
    index_bytes: int
    device_bytes: int
    host_bytes: int
    buffer_bytes: int
    file_bytes: int
    resident_share: float


class KeyCounts:
    """Distinct keys of columns in the training data that are known without reading it."""

    def __init__(self, spec: RunSpec, dataset: DatasetSpec, *, reads_keysets: bool) -> None:
        self._columns = {column.name: column for column in dataset.categorical}
        self._samples = dataset.num_rows("train") if "train" in dataset.splits else 0
        self._keysets: list[Mapping[str, NDArray[np.int64]]] = []
        directory = Path(spec.data)
        if not reads_keysets:
            return
        with suppress(DataNotFoundError):  # most data sets have no keysets
            self._keysets = [read_part_keys(directory, "train", part) for part in read_parts(directory, "train")]

    def of(self, columns: Sequence[str]) -> tuple[int, RowsFrom]:
        """Return how many distinct keys some columns have together, or a bound, and where the number is from."""
        known = [self._columns[name] for name in columns if name in self._columns]
        if self._keysets and known:
            # Columns that share a table share its keys, which are counted once.
            pieces = [keys[column.name] for keys in self._keysets for column in known if column.name in keys]
            return len(np.unique(np.concatenate(pieces))) if pieces else 0, "keysets"
        # No sample has more keys than the column allows, which bounds the distinct keys of the column.
        seen = sum(self._samples * column.hotness for column in known)
        ids = [column.rows for column in known]
        if known and None not in ids:
            most = max(rows for rows in ids if rows is not None)
            return (most, "column") if most <= seen or not seen else (seen, "samples")
        return seen, "samples"


class _Rows:
    """Rows of a table, and the bytes of each.

    Attributes:
        spec: The table.
        format: Weights and state of a row.
        count: Rows that will be used.
        source: Origin of `count`.
        index_bytes: Bytes for each row besides.
    """

    def __init__(
        self,
        spec: TableSpec | DynamicTableSpec,
        of: RowRule,
        sizes: Mapping[str, int],
        counts: KeyCounts,
        readers: Sequence[str],
    ) -> None:
        states = {
            name: (state_dtype(name), tuple(shape[1:]))
            for name, shape in state_shapes(of.kind, 1, spec.width, mode=of.mode)
        }
        self.spec = spec
        self.format = RowFormat(spec.width, getattr(torch, spec.dtype), states)
        self.weight_bytes = spec.width * self.format.dtype.itemsize
        self.state_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in states.values())
        self.count, self.source = _rows_of(spec, sizes, counts, readers)
        self.index_bytes = _index_bytes(spec)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: in tiers, where its parts are aligned, or in an arena in memory."""
        return self.format.num_bytes if self.spec.tiers is not None else self.weight_bytes + self.state_bytes


class _ArenaInTiers:
    """The tables of an arena in tiers: a member of their budget, as `TieredRows` is in a run."""

    def __init__(self, tables: Sequence[_Rows], tiers: Tiers) -> None:
        self.tables = tuple(tables)
        self.tiers = tiers
        self.slot_bytes = tables[0].format.num_bytes + SLOT_BYTES
        most = [table.spec.rows if isinstance(table.spec, TableSpec) else table.spec.max_rows for table in tables]
        self._most = math.inf if None in most else sum(rows for rows in most if rows is not None)

    @property
    def full_bytes(self) -> float:
        """Bytes of the slots of all rows; infinite where a table has no maximum."""
        return self._most * self.slot_bytes

    @property
    def bytes_of_a_row_each(self) -> int:
        """Bytes of one slot of each table."""
        return len(self.tables) * self.slot_bytes

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self.tables)

    @property
    def index_bytes(self) -> float:
        """Bytes of the indexes of the rows that will be used."""
        return sum(table.count * table.index_bytes for table in self.tables)

    def placed(self, budget: TierBudget, *, is_gpu: bool) -> dict[str, tuple[int, int]]:
        """Return the rows of each table that the fastest tier, and host memory below it, hold at once."""
        share = budget.share(self, self.tiers.fast_bytes)
        counts = [table.count for table in self.tables]
        host = self.tiers.host_bytes_below
        # Indexes beyond their allowance take host memory from rows, from those below the fast tier if there are any.
        excess = budget.given_up(self, self.tiers.fast_bytes)
        fast = self._filled(self.tiers.fast_bytes * share - (0 if is_gpu or host is not None else excess), counts)
        below = [0] * len(counts)
        if host is not None and sum(fast) < sum(counts):
            below = self._filled(host * share - excess, counts)
        names = [table.spec.name for table in self.tables]
        return dict(zip(names, zip(fast, below, strict=True), strict=True))

    def buffers(self, budget: TierBudget) -> dict[str, int]:
        """Return the bytes of buffers of each table; none without files."""
        if self.tiers.file is None:
            return {}
        options = budget.file_options(direct=self.tiers.direct)
        reads = read_buffer_bytes(options) // len(self.tables)
        return {
            table.spec.name: reads + min(options.queue_bytes, table.count * table.row_bytes) for table in self.tables
        }

    def _filled(self, num_bytes: float, counts: Sequence[int]) -> list[int]:
        return [int(rows) for rows in filled(max(1, int(num_bytes) // self.slot_bytes), counts)]


def planned_tables(
    spec: RunSpec, records: Sequence[RecordedTables], *, counts: KeyCounts, sizes: Mapping[str, int], is_gpu: bool
) -> list[TableMemory]:
    """Return the memory of each table of a run."""
    rules = table_rules({"default": spec.sparse_optimizer, **spec.row_optimizers})
    tables: dict[str, _Rows] = {}
    arenas: list[_ArenaInTiers] = []
    for record in records:
        for table in record.tables:
            readers = [feature.name for feature in record.features if feature.table == table.name]
            tables[table.name] = _Rows(table, rules[table.optimizer].row_rule, sizes, counts, readers)
        arenas += [
            _ArenaInTiers([tables[table.name] for table in group], group[0].tiers)
            for group in arena_groups(record.tables)
            if group[0].tiers is not None
        ]
    for name in sizes:
        if name not in tables:
            raise ConfigError(
                "rows",
                f"got table {name!r}{did_you_mean(name, list(tables))}, expected one of {', '.join(map(repr, tables))}",
            )
    budgets: dict[Tiers, TierBudget] = {}
    for arena in arenas:
        budgets.setdefault(arena.tiers, TierBudget()).add(arena)
    placed: dict[str, tuple[int, int]] = {}
    buffers: dict[str, int] = {}
    for arena in arenas:
        placed |= arena.placed(budgets[arena.tiers], is_gpu=is_gpu)
        buffers |= arena.buffers(budgets[arena.tiers])
    return [
        _table_memory(table, *placed.get(name, (table.count, 0)), buffers.get(name, 0), is_gpu=is_gpu)
        for name, table in tables.items()
    ]


def _rows_of(
    table: TableSpec | DynamicTableSpec, rows: Mapping[str, int], counts: KeyCounts, readers: Sequence[str]
) -> tuple[int, RowsFrom]:
    if isinstance(table, TableSpec) and table.tiers is None:
        return table.rows, "table"  # all of them have memory, for any data
    most = table.rows if isinstance(table, TableSpec) else table.max_rows
    count, source = (rows[table.name], "given") if table.name in rows else counts.of(readers)
    # A table never has more rows than its maximum, however many keys the data have.
    if most is not None and most <= count:
        return most, "table"
    return count, source  # type: ignore[return-value]  # mypy widens the literals of the conditional expression


def _index_bytes(table: TableSpec | DynamicTableSpec) -> float:
    """Return the bytes for each row of a table besides weights and state, in host memory."""
    in_file = FILE_INDEX_BYTES if table.tiers is not None and table.tiers.file is not None else 0
    if isinstance(table, TableSpec):
        return in_file
    tracked = sum(USES[name].itemsize for name in (tuple(USES) if table.track_uses else needed_uses(table.evict)))
    numbers = NUMBER_BYTES if getattr(torch, table.dtype).itemsize < 4 else 0
    return INDEX_BYTES + tracked + numbers + in_file


def _table_memory(table: _Rows, fast: int, below: int, buffer_bytes: int, *, is_gpu: bool) -> TableMemory:
    """Return the memory of a table with these numbers of rows in the fastest tier and in host memory below it."""
    tiers, rows = table.spec.tiers, table.count
    slot_bytes = table.row_bytes + (SLOT_BYTES if tiers is not None else 0)
    index_bytes = int(rows * table.index_bytes)
    in_file = 0
    if tiers is not None and tiers.file is not None:
        in_file = int(FILE_SPACE * rows * (table.row_bytes + KEY_BYTES))
    return TableMemory(
        name=table.spec.name,
        kind=table.spec.kind,
        rows=rows,
        rows_from=table.source,
        width=table.spec.width,
        row_bytes=table.row_bytes,
        weight_bytes=rows * table.weight_bytes,
        state_bytes=rows * table.state_bytes,
        index_bytes=index_bytes,
        device_bytes=fast * slot_bytes if is_gpu else 0,
        host_bytes=index_bytes + below * slot_bytes + (0 if is_gpu else fast * slot_bytes),
        buffer_bytes=buffer_bytes,
        file_bytes=in_file,
        resident_share=fast / rows if rows else 1.0,
    )
