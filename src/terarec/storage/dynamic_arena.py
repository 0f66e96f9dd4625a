# SPDX-License-Identifier: Apache-2.0
"""`DynamicArena`: one growing block with the rows of all dynamic tables of one width and element type."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from terarec.errors import ConfigError, NoSpaceError, StorageError
from terarec.kernels import memory
from terarec.kernels.rows import key_stream
from terarec.memory.growing_rows import GrowingRows, GrowingTensor, check_has_memory
from terarec.memory.tiered_rows import TieredRows
from terarec.spec import DynamicTableSpec
from terarec.storage.changes import ChangedRows, discard_changes
from terarec.storage.store import shared_row_type

Change = Callable[[], object]

NUMBER_BYTES = torch.int64.itemsize
"""Bytes for each row of 16 bits besides weights, state and uses."""

_NUMBER = "number"  # beside the uses: what a rounding of the row depends on
_FEWEST_BYTES = 1 << 20  # at a time, so that a small arena does not grow in each batch
_GROWTH = 8  # an eighth more at a time: only address space until rows are written


class Transaction:
    """The changes of one batch in the tables of an arena, all or none of which are made.

    A context manager: changes made within the block are rolled back if the block raises. A nested block is a part of
    the outer one. Outside of blocks a change is final at once.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._depth = 0
        self._undo_steps: list[Change] = []
        self._commit_steps: list[Change] = []

    def __enter__(self) -> Transaction:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        try:
            if not self._depth:
                self._end(has_failed=kind is not None)
        finally:
            self._lock.release()

    def on_rollback(self, undo: Change) -> None:
        """Register `undo`, which reverts a change that was made, after all later changes are reverted."""
        if self._depth:
            self._undo_steps.append(undo)

    def on_commit(self, change: Change) -> None:
        """Make `change`, which cannot fail and cannot be undone, after all others, in the order of these calls."""
        if self._depth:
            self._commit_steps.append(change)
        else:
            change()

    def _end(self, *, has_failed: bool) -> None:
        undo_steps, commit_steps = self._undo_steps, self._commit_steps
        self._undo_steps, self._commit_steps = [], []
        # In reverse, so that each undo finds things as its change left them.
        for step in reversed(undo_steps) if has_failed else commit_steps:
            step()


class DynamicArena:
    """Allocates rows for the keys of several dynamic tables in order of insertion.

    `data` stores the weights and the optimizer state of these rows.

    Row t < T is the default row of table t: the vector of keys without a row. `reset_defaults` restores it after every
    update. The rows after those belong to keys, were freed, or were never used.

    Rows that are freed while gradients for them may be pending (`pin` to `unpin`), or within a `transaction`, are
    recycled only afterwards.

    Attributes:
        specs: The T tables, all of one width, element type and optimizer.
        width: Length D of a vector.
        dtype: Element type of the weights.
        optimizer: Name of the optimizer that updates the tables.
        is_dynamic: True, since keys are inserted and evicted.
        table_names: The tables' names.
        table_base: 0 for each table: lookups name rows of the whole arena.
        seed: Seed of the initial weights.
        num_rows: Rows V for which there is room.
        data: Weights and optimizer state of the rows.
        num_defaults: T, the rows at the start of the arena that belong to no key.
        next_row: First row that was never used.
        recycled: int64[n], rows that were freed, in the order in which they are allocated again.
        generation: Number that increases when rows that were freed while pinned can be allocated again.
        attached: Token of the row optimizer that the state belongs to.
        changes: Rows that changed since a checkpoint; None until a table asks for them.
        lock: Lock to hold while rows are allocated or freed, since tables share the recycled ones.
        transaction: Transaction of changes to the keys of the tables; it holds the lock.

    Args:
        specs: The tables.
        seed: Seed of the initial weights, which depend on table name, key and seed only.

    Raises:
        ConfigError: No table, or tables of several widths, element types or optimizers.
        StorageError: Not enough memory.
    """

    is_dynamic = True

    def __init__(self, specs: Sequence[DynamicTableSpec], *, seed: int = 0) -> None:
        self.specs = tuple(specs)
        self.width, self.dtype, self.optimizer = shared_row_type(specs)
        self.table_names = tuple(spec.name for spec in specs)
        self.table_base = (0,) * len(specs)
        self.seed = seed
        self.num_rows = 0
        self.num_defaults = len(specs)
        self.next_row = len(specs)
        self.recycled = torch.empty(0, dtype=torch.int64)
        self.generation = 0
        # Reentrant: a table holds it while its arena allocates or frees rows for it.
        self.lock = threading.RLock()
        self.transaction = Transaction(self.lock)
        self._is_pinned = False
        self.attached: object = None
        self.changes: ChangedRows | None = None
        self._freed_while_pinned: list[Tensor] = []
        memory.require(4 * self.num_defaults * self.width, f"default rows of dynamic tables {self._names()}")
        # Apart from their rows, which an update may change.
        self._defaults = torch.stack([torch.tensor(spec.default).expand(self.width) for spec in specs])
        tiers = specs[0].tiers
        if any(spec.tiers != tiers for spec in specs):
            raise ConfigError("arena", "got tables of several tiers, expected the same for all")
        self.data: GrowingRows | TieredRows = (
            GrowingRows(specs, seed=seed)
            if tiers is None
            else TieredRows(specs, tiers, seed=seed, num_defaults=self.num_defaults)
        )
        self._uses: dict[str, GrowingTensor] = {}
        if self.dtype.itemsize < 4:
            self.track(_NUMBER, torch.int64)
        self._grow(self.next_row, "the default rows")
        self.reset_defaults()

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.data.device

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows that a lookup in each table may name: all V."""
        return (self.num_rows,) * len(self.specs)

    @property
    def tiers(self) -> TieredRows | None:
        """The rows in their tiers; None where all are in the memory that kernels read."""
        return self.data if isinstance(self.data, TieredRows) else None

    @property
    def weights(self) -> Tensor:
        """Weights [V, D] of `dtype`; in host memory always at one address."""
        return self.data.weights

    @property
    def state(self) -> dict[str, Tensor]:
        """Name -> optimizer state [V, D] or [V]; empty until `attach_state`."""
        return self.data.state

    @property
    def uses(self) -> Mapping[str, Tensor]:
        """Name -> tracked use of each row [V]; has the names that `track` was called for."""
        return {name: use.tensor for name, use in self._uses.items() if name != _NUMBER}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, state and uses."""
        return self.data.row_bytes + sum(use.row_bytes for use in self._uses.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rows for which memory is allocated."""
        return self.num_rows * self.row_bytes

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Allocate an optimizer's state in place of any former one.

        Args:
            shapes: Name and shape [V, ...] of each state tensor, as ``ops.row_update.state_shapes`` returns them.
            fills: State -> its initial value, also of rows that are inserted later; 0 for other states.
        """
        discard_changes(self)
        self.data.attach_state(shapes, fills=fills)

    def track(self, name: str, dtype: torch.dtype) -> None:
        """Add ``uses[name]``: a number of `dtype` for each row, 0 at first."""
        if name not in self._uses:
            self._uses[name] = GrowingTensor((), dtype, self.device)
            self._uses[name].grow(self.num_rows)

    @property
    def row_numbers(self) -> Tensor | None:
        """Numbers int64[V] of the rows of 16 bits, on which their rounding depends; None for others.

        They depend on table and key alone: rows of a key differ between ranks, and after a checkpoint was loaded.
        """
        return self._uses[_NUMBER].tensor if _NUMBER in self._uses else None

    def number_by(self, segments: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing: rows are numbered by their keys."""

    def number_rows(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Note that rows int64[n] now have the keys int64[n] of table number `table`."""
        if self.row_numbers is not None:
            self.row_numbers[rows] = keys ^ key_stream(self.table_names[table])

    def allocate_rows(self, count: int, purpose: str) -> Tensor:
        """Allocate rows for the next `count` keys, whose initial values ``data.begin`` writes.

        Returns:
            int64[count]: from `recycled`, then from `next_row` on.

        Raises:
            StorageError: Not enough memory; nothing has changed.
        """
        # Recycled rows first: they have their memory already.
        reused = min(count, self.recycled.numel())
        end = self.next_row + count - reused
        # Before anything is taken, so that too little memory changes nothing.
        self._grow(end, purpose)
        recycled, first, again = self.recycled, self.next_row, self.recycled[:reused]
        self.recycled, self.next_row = recycled[reused:], end
        self.transaction.on_rollback(lambda: self._restore_rows(recycled, first))
        # Recycled rows have the uses of their former keys; rows that were never used are zero.
        for use in self._uses.values():
            use.tensor[again] = 0
        return torch.cat([again, torch.arange(first, end, device=self.device)])

    def make_room(self, count: int, *, freed: int, purpose: str) -> None:
        """Allocate memory for `count` rows after `freed` are freed.

        Raises:
            StorageError: Not enough memory; nothing has changed.
        """
        # While rows are pinned, those that are freed now can be recycled only later, so they make no room.
        reused = self.recycled.numel() + (0 if self._is_pinned else freed)
        self._grow(self.next_row + max(0, count - reused), purpose)

    def free_rows(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Free ``rows int64[n]`` of the keys int64[n], which were removed from a table."""
        # At the end, since a rollback gives the rows back to their keys with their values.
        self.transaction.on_commit(lambda: self._recycle(table, rows, keys))

    def pin(self) -> None:
        """Stop recycling freed rows once the `transaction` ends: a backward pass may still use them."""
        self.transaction.on_commit(self._begin_pin)

    def unpin(self) -> None:
        """Recycle the rows that were freed since `pin`: their gradients have been applied or dropped."""
        with self.lock:
            self._is_pinned = False
            if self._freed_while_pinned:
                self.recycled = torch.cat([self.recycled, *self._freed_while_pinned])
                self._freed_while_pinned = []
                # A backward pass compares it with that of its lookup: from now on the rows may belong to other keys.
                self.generation += 1

    def reset_defaults(self) -> None:
        """Restore the default rows and their state after an update changed them."""
        self.data.reset_defaults(self._defaults)

    def share_weights(self, path: Path) -> None:
        """Do nothing: rows are found by an index, which each process has for itself."""

    def move(self, device: torch.device) -> None:
        """Move all tensors to `device`.

        Raises:
            ConfigError: A device without memory.
            StorageError: Not enough memory there.
        """
        if device == self.device:
            return
        check_has_memory(device)
        # Copied before they are replaced: if the device has too little memory, all stay where they are.
        uses = {name: use.to(device) for name, use in self._uses.items()}
        self.data.move(device)
        self._uses = uses
        if self.changes is not None:
            self.changes.move(device)
        self._defaults, self.recycled = self._defaults.to(device), self.recycled.to(device)
        self._freed_while_pinned = [rows.to(device) for rows in self._freed_while_pinned]

    def __getstate__(self) -> dict[str, Any]:
        # Locks cannot be copied, and a copy has no transaction under way.
        return {name: value for name, value in vars(self).items() if name not in ("lock", "transaction")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        lock = threading.RLock()
        vars(self).update(state, lock=lock, transaction=Transaction(lock))

    def _restore_rows(self, recycled: Tensor, next_row: int) -> None:
        self.recycled, self.next_row = recycled, next_row

    def _recycle(self, table: int, rows: Tensor, keys: Tensor) -> None:
        self.data.forget(table, rows, keys)
        # A pending gradient names the row: another key there would be updated by it.
        if self._is_pinned:
            self._freed_while_pinned.append(rows)
        else:
            self.recycled = torch.cat([self.recycled, rows])

    def _begin_pin(self) -> None:
        self._is_pinned = True

    def _grow(self, rows: int, purpose: str) -> None:
        """Allocate memory for at least `rows` rows."""
        if rows <= self.num_rows:
            return
        # By a share of the rows, so that growing stays linear in their number.
        spare = max(self.num_rows // _GROWTH, _FEWEST_BYTES // self.row_bytes)
        target = max(rows, self.num_rows + spare)
        uses_bytes = sum(use.row_bytes for use in self._uses.values())
        # Checked before: address space is reserved for far more rows, so that growing itself succeeds, and writing rows
        # to memory that the machine lacks would end the process.
        self._require((target - self.num_rows) * (self.data.bytes_per_row + uses_bytes), purpose)
        try:
            for use in self._uses.values():
                use.grow(target)
            self.data.grow(target)
        except StorageError as error:
            # What has grown keeps its memory for the next attempt, but all have one length.
            for use in self._uses.values():
                use.tensor = use.tensor[: self.num_rows]
            raise NoSpaceError(purpose, error.where, error.problem) from None
        if self.changes is not None:
            self.changes.resize(target)
        self.num_rows = target

    def _require(self, num_bytes: int, purpose: str) -> None:
        if self.device.type == "cpu":
            memory.require(num_bytes, f"{purpose}, dynamic table{'s' * (len(self.specs) > 1)} {self._names()}")

    def _names(self) -> str:
        shown = ", ".join(repr(name) for name in self.table_names[:3])
        return shown if len(self.table_names) <= 3 else f"{shown}, ... ({len(self.table_names)})"
