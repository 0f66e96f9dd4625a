"""The store protocol: what every table of rows can do, and checks of what comes into one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError
from terarec.spec import DynamicTableSpec, EvictionSpec, TableSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Keys with what a table holds for them: the form in which rows leave a store and come back.

    Attributes:
        keys: int64[n], distinct.
        weights: [n, D] of the table's element type.
        state: name of an optimizer state ("sum", "exp_avg", ...) -> float32[n, D] or float32[n].
        uses: what a dynamic table notes of a row's use: "count" int64[n], "last_step" int32[n].
    """

    keys: Tensor
    weights: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    uses: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Store(Protocol):
    """A table that turns keys into rows of an arena."""

    @property
    def name(self) -> str:
        """Name of the table."""

    @property
    def width(self) -> int:
        """Length D of a vector."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer states beside the weights; empty until an optimizer is attached."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, optimizer state and index."""

    @property
    def is_dynamic(self) -> bool:
        """Whether keys come and go; else all keys ``0 <= key < len`` are held for good."""

    def __len__(self) -> int:
        """Return the number of keys held."""

    def keys(self) -> Tensor:
        """Return the keys held, int64[n], rising."""

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return arena rows int64[n] of ``keys int64[n]``; with `train`, a store that grows may insert unseen keys.

        Raises:
            KeyOutOfRangeError: a key that this store can never hold.
        """

    def export(self, keys: Tensor) -> Rows:
        """Return copies of what is held for ``keys int64[n]``.

        Raises:
            KeyOutOfRangeError: a key that is not held.
        """

    def export_chunks(self, chunk_rows: int) -> Iterator[Rows]:
        """Return everything held, at most `chunk_rows` rows at a time; a chunk may share memory with the table.

        At least one chunk, which is empty if nothing is held.
        """

    def import_(self, rows: Rows) -> None:
        """Overwrite what is held for ``rows.keys``, all of it or nothing.

        Empty ``rows.state`` leaves the optimizer state as it is.

        Raises:
            KeyOutOfRangeError: a key that this store can never hold.
            StorageError: weights or state of another shape, or other state names than ``state_names``.
        """

    def evict(self, by: EvictionSpec | None = None, *, keep_at_least: int | None = None) -> Tensor:
        """Evict rows by a policy and return their keys int64[n]; see `DynamicTable.evict`.

        Raises:
            StorageError: a table whose keys are held for good.
        """

    def take_evicted(self) -> Tensor:
        """Return the keys int64[n] that were evicted since the last call and have no row now."""

    def clear(self) -> None:
        """Forget every key that is not held for good, and all that was noted of keys."""

    def export_memory(self, chunk_keys: int) -> Iterator[Mapping[str, Tensor]]:
        """Return what is remembered besides the rows, as named tensors, at most `chunk_keys` keys at a time."""

    def import_memory(self, piece: Mapping[str, Tensor]) -> None:
        """Take over a piece that `export_memory` gave.

        Raises:
            StorageError: a piece of a table that remembers other things.
        """


def shared_row_type(specs: Sequence[TableSpec | DynamicTableSpec]) -> tuple[int, torch.dtype, str]:
    """Return the width, element type and optimizer's name of all tables of an arena.

    Raises:
        ConfigError: no table, or tables of several widths, element types or optimizers.
    """
    kinds = {(spec.width, spec.dtype) for spec in specs}
    if len(kinds) != 1:
        raise ConfigError(f"arena: got tables of widths and types {sorted(kinds)}, expected tables of one of them")
    optimizers = {spec.optimizer for spec in specs}
    if len(optimizers) != 1:
        raise ConfigError(f"arena: got tables of the optimizers {sorted(optimizers)}, expected one optimizer")
    width, dtype = kinds.pop()
    return width, getattr(torch, dtype), optimizers.pop()


def check_has_memory(device: torch.device) -> None:
    """Raise `ConfigError` for a device on which tensors have no elements."""
    if device.type == "meta":
        raise ConfigError("arena: got device 'meta', expected one with memory such as 'cpu' or 'cuda'")


def check_import(
    table: str, rows: Rows, weights: Tensor, state: Mapping[str, Tensor], uses: Mapping[str, Tensor] | None = None
) -> None:
    """Raise `StorageError` unless `rows` fit arena tensors ``weights [V, D]``, ``state [V, ...]`` and ``uses [V]``.

    No state at all fits, too. `uses` are those that are taken over of ``rows.uses``.
    """
    if rows.state and set(rows.state) != set(state):
        raise StorageError(f"table {table!r}: got optimizer states {sorted(rows.state)}, expected {sorted(state)}")
    noted = uses or {}
    held = {"weights": weights, **state, **noted}
    coming = {name: rows.uses[name] for name in noted}
    for what, values in {"weights": rows.weights, **rows.state, **coming}.items():
        expected = (rows.keys.numel(), *held[what].shape[1:])
        if tuple(values.shape) != expected or values.dtype != held[what].dtype:
            raise StorageError(
                f"table {table!r}: got {what} {values.dtype}{list(values.shape)}, "
                f"expected {held[what].dtype}{list(expected)}"
            )
