"""Checks of what tables that share an arena have in common, of where it moves, and of rows that come into a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError
from terarec.spec import DynamicTableSpec, TableSpec
from terarec.storage.protocol import Rows


def shared_row_type(specs: Sequence[TableSpec | DynamicTableSpec]) -> tuple[int, torch.dtype, str]:
    """The width, element type and optimizer's name of all tables of an arena.

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
