# SPDX-License-Identifier: Apache-2.0
"""The store protocol in parts, by what callers need of a table of rows; and checks of imported rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError
from terarec.spec import DynamicTableSpec, EvictionSpec, TableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RowValues:
    """Keys with their weights, optimizer state and uses, as stores export and import them.

    Attributes:
        keys: int64[n], distinct.
        weights: [n, D] of the table's element type.
        state: Name of an optimizer state ("sum", "exp_avg", ...) -> float32[n, D] or float32[n].
        uses: Use of each row of a dynamic table, where tracked: "count" int64[n], "last_step" int32[n].
    """

    keys: Tensor
    weights: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    uses: Mapping[str, Tensor] = field(default_factory=dict)


class TableRows(Protocol):
    """The rows of a table by their keys: what reads or writes rows needs."""

    @property
    def name(self) -> str:
        """Name of the table."""

    @property
    def width(self) -> int:
        """Length D of a vector."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors; empty until an optimizer is attached."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, optimizer state and uses."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, optimizer state and index."""

    @property
    def is_dynamic(self) -> bool:
        """Whether keys are inserted and evicted; a static table always holds the keys ``0 <= key < len``."""

    @property
    def is_part(self) -> bool:
        """Whether other processes have further rows of the table."""

    def __len__(self) -> int:
        """Return the number of keys."""

    def keys(self) -> Tensor:
        """Return all keys, int64[n], in ascending order."""

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return arena rows int64[n] of ``keys int64[n]``; with `train`, a dynamic table may insert new keys.

        Raises:
            KeyOutOfRangeError: A key that this table cannot hold.
        """

    def export(self, keys: Tensor) -> RowValues:
        """Return copies of the rows of ``keys int64[n]``, which may be on another device than the table.

        Raises:
            KeyOutOfRangeError: A key that is not in the table.
        """

    def export_chunks(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return all rows, at most `chunk_rows` at a time; a chunk may share memory with the table.

        There is at least one chunk; it is empty for an empty table.
        """

    def import_(self, rows: RowValues) -> None:
        """Overwrite the rows of ``rows.keys``, all or none of them; they may be on another device than the table.

        Empty ``rows.state`` does not change the optimizer state.

        Raises:
            KeyOutOfRangeError: A key that this table cannot hold.
            StorageError: Weights or state of another shape, or other state names than ``state_names``.
        """


class SavedRows(Protocol):
    """The rows that a checkpoint holds, and files of them."""

    @property
    def initial_seed(self) -> int | None:
        """Seed of the initial weights of the rows that `export_changed` leaves out; None if it returns all rows."""

    @property
    def num_changed(self) -> int:
        """Rows that `export_changed` returns."""

    def export_changed(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return the rows that a checkpoint has to hold, at most `chunk_rows` at a time, at least one chunk.

        All others have the initial weights of `initial_seed`, and initial state.
        """

    def restart(self, seed: int) -> None:
        """Give all rows of a static table the initial weights of `seed`, and initial state.

        Raises:
            StorageError: A dynamic table.
        """

    def snapshot(self, directory: Path) -> bool:
        """Write the rows that were trained or imported to a new directory as a row file, which shares those of a tier.

        Returns:
            Whether the rows lie in files; if not, nothing is written.

        Raises:
            StorageError: The disk is full or cannot be written.
        """

    def adopt(self, directory: Path) -> bool:
        """Hold the rows of a row file that `snapshot` wrote in place of all rows, without reading them.

        A dynamic table has their keys already, and no others.

        Returns:
            Whether that is possible; if not, nothing changes.

        Raises:
            StorageError: The file is damaged, or the disk is full.
        """


class ChangedSince(Protocol):
    """The rows that changed since a checkpoint, as a delta holds them."""

    @property
    def changes_since(self) -> str | None:
        """Id of the checkpoint after which all changes of rows are known; None if they are not."""

    def follow_changes(self, since: str) -> None:
        """Begin to note which rows change, now that the checkpoint `since` holds all of the tables of the arena.

        Changes that are made to tensors of weights or state directly are not noticed.

        Raises:
            StorageError: Not enough memory: a bit for each row.
        """

    @property
    def num_since(self) -> int:
        """Rows that `export_since` returns."""

    def export_since(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return the rows that changed after `changes_since`, at most `chunk_rows` at a time."""


class KeyedRows(Protocol):
    """The keys of a table that gets and loses them, which a static one does not."""

    def evict(self, by: EvictionSpec | None = None, *, keep_at_least: int | None = None) -> Tensor:
        """Evict rows by a policy and return their keys int64[n]; see `DynamicTable.evict`."""

    def take_evicted(self) -> Tensor:
        """Return the keys int64[n] that were evicted since the last call and have no row now."""

    def clear(self) -> None:
        """Remove all keys, with their uses and admission counts."""

    def remove(self, keys: Tensor) -> None:
        """Remove ``keys int64[n]``; absent keys are ignored."""

    def removed_since(self) -> Tensor:
        """Return the keys int64[n], rising, that were removed after `changes_since` and have no row now."""

    def export_keys(self, chunk_keys: int) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Return the keys int64[n] and their uses, about `chunk_keys` at a time."""

    def import_keys(self, keys: Tensor, uses: Mapping[str, Tensor]) -> None:
        """Insert ``keys int64[n]``, with their initial values and those uses that the table tracks.

        Raises:
            StorageError: The table or memory is full, and nothing has changed.
        """

    def export_memory(self, chunk_keys: int) -> Iterator[Mapping[str, Tensor]]:
        """Return the state other than rows, such as admission counts, at most `chunk_keys` keys at a time."""

    def import_memory(self, piece: Mapping[str, Tensor]) -> None:
        """Import a piece that `export_memory` returned.

        Raises:
            StorageError: A piece of a table of another kind.
        """


@runtime_checkable
class Store(TableRows, SavedRows, ChangedSince, Protocol):
    """A table: maps keys to rows of an arena."""

    @property
    def keyed(self) -> KeyedRows | None:
        """The keys of a dynamic table; None for a static one, which always has all of them."""


def shared_row_type(specs: Sequence[TableSpec | DynamicTableSpec]) -> tuple[int, torch.dtype, str]:
    """Return the width, element type and optimizer's name of all tables of an arena.

    Raises:
        ConfigError: No table, or tables of several widths, element types or optimizers.
    """
    kinds = {(spec.width, spec.dtype) for spec in specs}
    if len(kinds) != 1:
        # Sorted, so that each run says the same.
        raise ConfigError("arena", f"got tables of widths and types {sorted(kinds)}, expected tables of one of them")
    optimizers = {spec.optimizer for spec in specs}
    if len(optimizers) != 1:
        raise ConfigError("arena", f"got tables of the optimizers {sorted(optimizers)}, expected one optimizer")
    width, dtype = kinds.pop()
    return width, getattr(torch, dtype), optimizers.pop()


def check_import(
    table: str, rows: RowValues, weights: Tensor, state: Mapping[str, Tensor], uses: Mapping[str, Tensor] | None = None
) -> None:
    """Raise `StorageError` unless `rows` fit arena tensors ``weights [V, D]``, ``state [V, ...]`` and ``uses [V]``.

    `rows` may have no state at all. `uses` has the tensors of ``rows.uses`` to import.
    """
    # Without state an import keeps that of the table, as where weights alone are loaded.
    if rows.state and set(rows.state) != set(state):
        raise StorageError(f"table {table!r}", f"got optimizer states {sorted(rows.state)}, expected {sorted(state)}")
    tracked = uses or {}
    tensors = {"weights": weights, **state, **tracked}
    imported = {name: rows.uses[name] for name in tracked}
    for what, values in {"weights": rows.weights, **rows.state, **imported}.items():
        expected = (rows.keys.numel(), *tensors[what].shape[1:])
        if tuple(values.shape) != expected or values.dtype != tensors[what].dtype:
            raise StorageError(
                f"table {table!r}",
                f"got {what} {values.dtype}{list(values.shape)}, expected {tensors[what].dtype}{list(expected)}",
            )
