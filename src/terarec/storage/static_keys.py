# SPDX-License-Identifier: Apache-2.0
"""Bases of the arenas and tables in which the row of a key never changes, wherever the rows are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch
from torch import Tensor

from terarec.errors import KeyOutOfRangeError
from terarec.spec import TableSpec
from terarec.storage.changes import ChangedRows, ChangingArena, changes_since, follow_changes
from terarec.storage.store import RowValues, shared_row_type


class FixedRows:
    """Base of arenas in which the row of a key never changes.

    It has what a `DynamicArena` does where rows are allocated and freed, without effect, so that callers treat all
    arenas alike.

    Attributes:
        is_dynamic: False, since no keys are inserted and evicted.
        generation: 0, since no row gets another key.
        num_defaults: 0, the number of default rows.
        lock: A context without effect, since no rows are allocated or freed.
        transaction: A context without effect, since no keys change.
        changes: Rows that changed since a checkpoint; None until a table asks for them.
        row_numbers: Numbers of the rows on which the rounding of 16 bits depends, int64[S, 3] by segments as in
            `terarec.ops.row_update.row_update_`; None for the rows themselves.
    """

    is_dynamic = False
    generation = num_defaults = 0
    lock = transaction = nullcontext()
    changes: ChangedRows | None = None
    row_numbers: Tensor | None = None
    dtype: torch.dtype

    def number_by(self, segments: Sequence[tuple[int, int, int]]) -> None:
        """Set `row_numbers`, if the rows have 16 bits."""
        if self.dtype.itemsize < 4:
            self.row_numbers = torch.tensor(segments)

    def move_notes(self, device: torch.device) -> None:
        """Move what is known of the rows to their device."""
        if self.changes is not None:
            self.changes.move(device)
        if self.row_numbers is not None:
            self.row_numbers = self.row_numbers.to(device)

    def pin(self) -> None:
        """Do nothing: no row is freed while gradients for it may be pending."""

    def unpin(self) -> None:
        """Do nothing; see `pin`."""

    def reset_defaults(self) -> None:
        """Do nothing: there are no default rows."""


class StaticArena(FixedRows):
    """Base of arenas of static tables, table after table.

    Attributes:
        specs: The tables, all of one width, element type and optimizer.
        width: Length D of a vector.
        dtype: Element type of the weights: float32, bfloat16 or float16.
        optimizer: Name of the optimizer that updates the tables.
        num_rows: Rows V of all tables together.
        table_names: The tables' names.
        table_base: Arena row of each table's first row.
        table_rows: Rows of each table.
        attached: Token of the row optimizer that the state belongs to.

    Args:
        specs: The tables.

    Raises:
        ConfigError: No table, or tables of several widths, element types or optimizers.
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self.specs = tuple(specs)
        self.width, self.dtype, self.optimizer = shared_row_type(specs)
        self.table_names = tuple(spec.name for spec in specs)
        self.table_rows = tuple(spec.rows for spec in specs)
        self.table_base = (0, *accumulate(self.table_rows))[:-1]
        self.num_rows = sum(self.table_rows)
        self.attached: object = None


class StaticKeys(ABC):
    """Base of tables whose keys are always ``0 <= key < spec.rows``, wherever their rows are stored.

    Attributes:
        spec: Name, rows, width and initial weights.
        arena: Arena of the rows.
        base: Arena row of key 0.
    """

    is_dynamic = is_part = False
    keyed = None
    spec: TableSpec
    arena: ChangingArena
    base: int

    @abstractmethod
    def export(self, keys: Tensor) -> RowValues:
        """Return copies of the rows of ``keys int64[n]``."""

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.spec.name

    @property
    def width(self) -> int:
        """Length D of a vector."""
        return self.spec.width

    def __len__(self) -> int:
        return self.spec.rows

    def keys(self) -> Tensor:
        """Return all keys, int64[rows], in ascending order."""
        return torch.arange(len(self), device=self.arena.device)

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return arena rows int64[n] of ``keys int64[n]``."""
        outside = (keys < 0) | (keys >= self.spec.rows)
        if outside.any():
            key = int(keys[outside][0])
            raise KeyOutOfRangeError(
                f"table {self.name!r}", f"got key {key}, expected 0 <= key < {self.spec.rows} (its rows)"
            )
        return keys + self.base

    @property
    def changes_since(self) -> str | None:
        """Id of the checkpoint after which all changes of rows are known; None if they are not."""
        return changes_since(self.arena)

    def follow_changes(self, since: str) -> None:
        """Begin to note which rows change; see `Store.follow_changes`."""
        follow_changes(self.arena, since)

    @property
    def num_since(self) -> int:
        """Rows that changed after `changes_since`."""
        changes = self.arena.changes
        if changes is None:
            return 0
        return sum(rows.numel() for rows in changes.between(self.base, self.base + self.spec.rows))

    def export_since(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return the rows that changed after `changes_since`; see `Store.export_since`."""
        if self.arena.changes is not None:
            for rows in self.arena.changes.between(self.base, self.base + self.spec.rows):
                for part in torch.split(rows, chunk_rows):
                    yield self.export(part - self.base)
