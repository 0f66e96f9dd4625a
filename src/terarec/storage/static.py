# SPDX-License-Identifier: Apache-2.0
"""Static tables: a fixed number of rows, where the key is the row number, and `Arena`, the memory of many of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from terarec.errors import NoSpaceError
from terarec.kernels import memory
from terarec.kernels.rows import allocate_rows
from terarec.memory.growing_rows import check_has_memory
from terarec.memory.initial_values import initial_rows, initialise
from terarec.memory.shared import mapped_rows
from terarec.ops.row_update import state_dtype
from terarec.spec import TableSpec
from terarec.storage.changes import DirectWrites, discard_changes, mark_changes
from terarec.storage.static_keys import StaticArena, StaticKeys
from terarec.storage.store import RowValues, check_import


class Arena(StaticArena):
    """Rows of several tables, table after table.

    Attributes:
        weights: dtype[V, D].
        state: Name -> optimizer state float32[V, D] or [V]; empty until `attach_state`.
        direct: Writes to weights and states that are not updates.

    Args:
        specs: The tables.
        seed: Seed of the initial weights, which depend on table name, row and seed only; 16-bit weights are those of a
            float32 table, rounded to nearest.

    Raises:
        ConfigError: No table, or tables of several widths, element types or optimizers.
        StorageError: Not enough memory; nothing is allocated.
    """

    def __init__(self, specs: Sequence[TableSpec], *, seed: int = 0) -> None:
        super().__init__(specs)
        self.state: dict[str, Tensor] = {}
        self._fills: Mapping[str, float] = {}
        self.direct = DirectWrites()
        self.weights = self._allocate("weights", (self.num_rows, self.width), torch.device("cpu"), self.dtype)
        for spec, base in zip(self.specs, self.table_base, strict=True):
            initialise(self.weights[base : base + spec.rows], spec, seed)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.weights.device

    @property
    def tiers(self) -> None:
        """None: all rows are in the memory that kernels read (see `TieredArena`)."""
        return None

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.weights, *self.state.values()))

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Allocate an optimizer's state in place of any former one.

        Args:
            shapes: Name and shape of each state tensor, as ``ops.row_update.state_shapes`` returns them.
            fills: State -> its initial value; 0 for other states.

        Raises:
            StorageError: Not enough memory.
        """
        # All rows have other state now, which a delta of some rows could not hold.
        discard_changes(self)
        # Freed before the new one is allocated: memory may not hold both.
        self.state = {}
        self._fills = dict(fills or {})
        for name, shape in shapes:
            self.state[name] = self._allocate(f"optimizer state {name!r}", shape, self.device, state_dtype(name))
            if fill := (fills or {}).get(name, 0.0):
                self.state[name].fill_(fill)

    def restart(self, table: int, seed: int) -> None:
        """Give the rows of table number `table` the initial weights of `seed`, and initial state."""
        discard_changes(self)
        spec, base = self.specs[table], self.table_base[table]
        for name, values in self.state.items():
            values[base : base + spec.rows] = self._fills.get(name, 0.0)
        values = self.weights[base : base + spec.rows]
        if spec.initializer == "zeros":
            values.zero_()
        elif values.device.type == "cpu":
            initialise(values, spec, seed)
        else:
            # Drawn in host memory, which gives all devices the same values.
            values.copy_(initial_rows(spec, values.dtype, seed))

    def move(self, device: torch.device) -> None:
        """Move weights and state to `device`.

        Raises:
            ConfigError: A device without memory.
            StorageError: Not enough memory there.
        """
        if device == self.device:
            return
        check_has_memory(device)
        tensors = {"weights": self.weights, **self.state}
        # All are copied before any is replaced: if the device has too little memory, everything stays where it is.
        moved = {
            name: self._allocate(name, tuple(tensor.shape), device, tensor.dtype).copy_(tensor)
            for name, tensor in tensors.items()
        }
        self.weights = moved.pop("weights")
        self.state = moved
        self.move_notes(device)

    def share_weights(self, path: Path) -> None:
        """Read the weights, which must not change any more, from a file that other processes map, too."""
        self.weights = mapped_rows(self.weights, path)

    def _allocate(
        self, purpose: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return zeros dtype[shape], on huge pages in host memory."""
        wanted = math.prod(shape) * dtype.itemsize
        purpose = f"{purpose} {str(dtype).removeprefix('torch.')}{list(shape)} of {_list_tables(self.table_names)}"
        if device.type == "cpu":
            # Checked here: the system gives out more memory than it has, and ends a process that writes to it.
            memory.require(wanted, purpose)
            if dtype == torch.float32:
                return torch.from_numpy(allocate_rows(shape))
            floats = allocate_rows((-(-wanted // torch.float32.itemsize),))  # NumPy has no bfloat16
            return torch.from_numpy(floats).view(dtype)[: math.prod(shape)].view(shape)
        try:
            return torch.zeros(shape, device=device, dtype=dtype)
        except torch.OutOfMemoryError as error:
            raise NoSpaceError(
                purpose, f"{wanted:,} bytes requested on {device}, which has too little memory"
            ) from error


def _list_tables(names: Sequence[str]) -> str:
    """Return the tables by name; of many, the first three and their number."""
    if len(names) == 1:
        return f"table {names[0]!r}"
    shown = ", ".join(repr(name) for name in names[:3])
    return f"tables {shown}" if len(names) <= 3 else f"{len(names)} tables ({shown}, ...)"


class StaticTable(StaticKeys):
    """The rows ``base <= row < base + spec.rows`` of an arena. Implements `Store`.

    Attributes:
        spec: Name, rows, width and initial weights.
        arena: Arena of the rows.
        base: Arena row of key 0.
    """

    def __init__(self, spec: TableSpec, arena: Arena, base: int) -> None:
        self.spec = spec
        self.arena: Arena = arena
        self.base = base

    @property
    def weights(self) -> Tensor:
        """The rows [rows, D] of the arena's element type, sharing memory with it.

        After a write to them the next checkpoint is a complete one, not a delta.
        """
        return self._part(self.arena.direct.alias("weights", self.arena.weights))

    @property
    def state(self) -> dict[str, Tensor]:
        """Optimizer states of this table, sharing memory with the arena; see `weights`."""
        direct = self.arena.direct
        return {name: self._part(direct.alias(f"state {name}", values)) for name, values in self.arena.state.items()}

    @property
    def changes_since(self) -> str | None:
        """Id of the checkpoint after which all changes of rows are known; None if they are not."""
        # Direct writes name no rows, so it is not known which ones changed.
        if self.arena.direct.taken():
            discard_changes(self.arena)
        return super().changes_since

    def follow_changes(self, since: str) -> None:
        """Begin to note which rows change; see `Store.follow_changes`."""
        # The checkpoint has the direct writes so far: they are forgotten.
        self.arena.direct.taken()
        super().follow_changes(since)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors; empty until an optimizer is attached."""
        return tuple(self.arena.state)

    @property
    def initial_seed(self) -> int | None:
        """None: `export_changed` returns all rows."""
        return None

    @property
    def num_changed(self) -> int:
        """Rows that `export_changed` returns: all."""
        return len(self)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights and optimizer state."""
        return self.memory_bytes // len(self)

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(part.numel() * part.element_size() for part in (self.weights, *self.state.values()))

    def export(self, keys: Tensor) -> RowValues:
        """Return copies of the rows of ``keys int64[n]``."""
        keys = keys.to(self.arena.device)
        rows = self.rows(keys, train=False)
        state = {name: tensor[rows] for name, tensor in self.arena.state.items()}
        return RowValues(keys=keys, weights=self.arena.weights[rows], state=state)

    def export_chunks(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return all rows in key order, `chunk_rows` at a time, without copying."""
        weights, state = self.weights, self.state
        for start in range(0, len(self), chunk_rows):
            part = slice(start, min(start + chunk_rows, len(self)))
            keys = torch.arange(part.start, part.stop, device=weights.device)
            yield RowValues(
                keys=keys, weights=weights[part], state={name: tensor[part] for name, tensor in state.items()}
            )

    def export_changed(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return all rows; see `export_chunks`."""
        return self.export_chunks(chunk_rows)

    def import_(self, rows: RowValues) -> None:
        """Overwrite the rows of ``rows.keys``; empty ``rows.state`` does not change the optimizer state."""
        # Keys and shapes are checked before a row changes: all rows are imported, or none.
        target = self.rows(rows.keys.to(self.arena.device), train=True)
        check_import(self.name, rows, self.arena.weights, self.arena.state)
        mark_changes(self.arena, target)
        _write(self.arena.weights, target, rows.weights)
        for name, values in rows.state.items():
            _write(self.arena.state[name], target, values)

    def restart(self, seed: int) -> None:
        """Give all rows the initial weights of `seed`, and initial state."""
        self.arena.restart(self.arena.table_names.index(self.name), seed)

    def snapshot(self, directory: Path) -> bool:
        """Return False: the rows are in memory."""
        return False

    def adopt(self, directory: Path) -> bool:
        """Return False: the rows are in memory."""
        return False

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor[self.base : self.base + self.spec.rows]


def static_tables(arena: Arena) -> list[StaticTable]:
    """Return a store for each table of `arena`."""
    return [StaticTable(spec, arena, base) for spec, base in zip(arena.specs, arena.table_base, strict=True)]


def _write(rows: Tensor, target: Tensor, values: Tensor) -> None:
    """Write `values` to the rows `target`; consecutive rows, as in checkpoints, are one plain copy."""
    count = target.numel()
    # The two ends first: they rule most other lists out without a pass over all rows.
    if count and int(target[-1]) - int(target[0]) == count - 1 and bool((target.diff() == 1).all()):
        rows[int(target[0]) : int(target[0]) + count].copy_(values)
    else:
        rows.index_copy_(0, target, values.to(rows.device))
