# SPDX-License-Identifier: Apache-2.0
"""Static tables whose rows are in tiers, and their arena."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels import memory
from terarec.memory.tiered_rows import TieredRows
from terarec.spec import TableSpec
from terarec.storage.changes import discard_changes, mark_changes
from terarec.storage.static_keys import StaticArena, StaticKeys
from terarec.storage.store import RowValues, check_import

_KEYS_AT_ONCE = 1 << 20


class TieredArena(StaticArena):
    """Rows of several static tables, table after table, of which only some are in the memory that kernels read.

    Attributes:
        data: Weights and optimizer state of the rows.

    Args:
        specs: The tables, of the same tiers.
        seed: Seed of the initial weights, which depend on table name, row and seed only.

    Raises:
        ConfigError: No table, tables of several widths, element types or optimizers, or a table without tiers.
    """

    def __init__(self, specs: Sequence[TableSpec], *, seed: int = 0) -> None:
        super().__init__(specs)
        tiers = specs[0].tiers
        if tiers is None or any(spec.tiers != tiers for spec in specs):
            raise ConfigError("arena", "got tables without tiers or with several, expected the same tiers for all")
        self.data = TieredRows(specs, tiers, seed=seed)
        # Tiers ask for rows by their keys when they are made anew.
        self.data.find_rows = {number: partial(torch.add, base) for number, base in enumerate(self.table_base)}

    @property
    def device(self) -> torch.device:
        """Device of the fast tier."""
        return self.data.device

    @property
    def tiers(self) -> TieredRows:
        """The rows in their tiers."""
        return self.data

    @property
    def weights(self) -> Tensor:
        """Rows [C, D] of the fast tier."""
        return self.data.weights

    @property
    def state(self) -> dict[str, Tensor]:
        """Name -> optimizer state [C, D] or [C] of the fast tier."""
        return self.data.state

    @property
    def memory_bytes(self) -> int:
        """Bytes of host and device memory of all tiers."""
        return self.data.memory_bytes

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Replace the optimizer state; see `TieredRows.attach_state`."""
        discard_changes(self)
        self.data.attach_state(shapes, fills=fills)

    def share_weights(self, path: Path) -> None:
        """Do nothing: each process has a fast tier of its own."""

    def move(self, device: torch.device) -> None:
        """Move the fast tier to `device`; see `TieredRows.move`."""
        self.data.move(device)
        self.move_notes(self.device)


class TieredTable(StaticKeys):
    """The rows ``base <= row < base + spec.rows`` of a `TieredArena`. Implements `Store`; it always has all its keys.

    Attributes:
        spec: Name, rows, width, initial weights and tiers.
        arena: Arena of the rows.
        number: Number of the table in its arena.
        base: Arena row of key 0.
    """

    def __init__(self, spec: TableSpec, arena: TieredArena, number: int) -> None:
        self.spec = spec
        self.arena: TieredArena = arena
        self.number = number
        self.base = arena.table_base[number]

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer states; empty until an optimizer is attached."""
        return self.arena.data.state_names

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights and optimizer state."""
        return self.arena.data.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tiers in memory, in the proportion of this table's rows in its arena."""
        return self.arena.memory_bytes * len(self) // self.arena.num_rows

    @property
    def initial_seed(self) -> int:
        """Seed of the initial weights of the rows that `export_changed` leaves out."""
        return self.arena.data.initial_seed(self.number)

    @property
    def num_changed(self) -> int:
        """Rows that `export_changed` returns."""
        return self.arena.data.count(self.number)

    def copied_weights(self) -> Tensor:
        """Return a copy of all weights [rows, D]."""
        num_bytes = len(self) * self.width * self.arena.dtype.itemsize
        memory.require(2 * num_bytes, f"a copy of table {self.name!r}, which is in tiers")
        weights = torch.empty(len(self), self.width, dtype=self.arena.dtype, device=self.arena.device)
        for rows in self.export_chunks(_KEYS_AT_ONCE):
            weights[rows.keys] = rows.weights
        return weights

    def export(self, keys: Tensor) -> RowValues:
        """Return copies of the rows of ``keys int64[n]``, without moving them between tiers."""
        keys = keys.to(self.arena.device)
        weights, state = self.arena.data.read(self.number, self.rows(keys, train=False), keys)
        return RowValues(keys=keys, weights=weights, state=state)

    def export_chunks(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return all rows in key order, `chunk_rows` at a time, without moving them between tiers."""
        for start in range(0, len(self), chunk_rows):
            yield self.export(torch.arange(start, min(start + chunk_rows, len(self)), device=self.arena.device))

    def export_changed(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return the rows that were trained or imported, `chunk_rows` at a time; without any, one chunk without rows.

        All other rows have initial weights, which depend on table, key and `initial_seed`, and initial state.
        """
        is_empty = True
        for keys, weights, state in self.arena.data.items(self.number, chunk_rows):
            is_empty = False
            yield RowValues(keys=keys, weights=weights, state=state)
        # A chunk without rows names the states of the optimizer.
        if is_empty:
            yield self.export(torch.empty(0, dtype=torch.int64, device=self.arena.device))

    def import_(self, rows: RowValues) -> None:
        """Overwrite the rows of ``rows.keys``; empty ``rows.state`` does not change the optimizer state."""
        keys = rows.keys.to(self.arena.device)
        # Keys and shapes are checked before a row changes: all rows are imported, or none.
        target = self.rows(keys, train=True)
        check_import(self.name, rows, self.arena.weights, self.arena.state)
        mark_changes(self.arena, target)
        self.arena.data.write(self.number, target, keys, rows.weights, rows.state)

    def restart(self, seed: int) -> None:
        """Give all rows the initial weights of `seed`, and initial state."""
        discard_changes(self.arena)
        data = self.arena.data
        # All keys first: forgetting rows changes what `items` reads.
        chunks = [keys for keys, _, _ in data.items(self.number, _KEYS_AT_ONCE)]
        for keys in chunks:
            keys = keys.to(self.arena.device)
            data.forget(self.number, keys + self.base, keys)
        data.restart(self.number, seed)

    def snapshot(self, directory: Path) -> bool:
        """Write the rows that were trained or imported as a row file; see `Store.snapshot`."""
        return self.arena.data.snapshot(self.number, directory)

    def adopt(self, directory: Path) -> bool:
        """Hold the rows of a row file in place of all rows; see `Store.adopt`."""
        # Which rows of the file differ from those before is not known.
        discard_changes(self.arena)
        return self.arena.data.adopt(self.number, directory)


def tiered_tables(arena: TieredArena) -> list[TieredTable]:
    """Return a store for each table of `arena`."""
    return [TieredTable(spec, arena, number) for number, spec in enumerate(arena.specs)]
