"""The state of rows as ``RowOptimizer.state_dict()`` holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.optim.row_parameters import AnyTable, RowParameters


def state_of(owner: RowParameters) -> dict[str, Any]:
    """Return the state of the rows of `owner` for ``state_dict()``."""
    if not owner.tables:
        return {name: tensor for arena in owner.arenas for name, tensor in arena.state.items()}
    return {"tables": {name: _table_state(table) for name, table in owner.tables.items()}}


def _table_state(table: AnyTable) -> dict[str, Tensor]:
    pieces = list(table.export_chunks(max(1, len(table))))
    if not table.is_dynamic:
        return dict(pieces[0].state)
    # An index lists keys in an order of its own, which differs from process to process.
    keys, order = torch.cat([piece.keys for piece in pieces]).sort()
    states = {name: torch.cat([piece.state[name] for piece in pieces])[order] for name in table.state_names}
    return {"keys": keys, **states}


def state_writes(owner: RowParameters, loaded: Any) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """Return what `loaded` changes: a tensor, the rows of it or None for all, and their values."""
    if not isinstance(loaded, Mapping):
        raise ConfigError("row optimizer: got no state for a parameter, expected that of each collection")
    if not owner.tables:
        held = {name: tensor for arena in owner.arenas for name, tensor in arena.state.items()}
        _check_shapes("a weight", held, loaded)
        return [(tensor, None, loaded[name]) for name, tensor in held.items()]
    found = loaded.get("tables", {})
    if set(found) != set(owner.tables):
        raise ConfigError(
            f"row optimizer: got the state of tables {', '.join(sorted(found)) or 'none'}, expected "
            f"{', '.join(sorted(owner.tables))}"
        )
    return [write for name, table in owner.tables.items() for write in _table_writes(table, found[name])]


def _table_writes(table: AnyTable, loaded: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    what = f"table {table.name!r}"
    held = _table_state(table)
    if not table.is_dynamic:
        _check_shapes(what, held, loaded)
        return [(tensor, None, loaded[name]) for name, tensor in held.items()]
    keys = loaded.get("keys")
    if not isinstance(keys, Tensor) or not torch.equal(keys.to(held["keys"].device), held["keys"]):
        got = keys.numel() if isinstance(keys, Tensor) else 0
        raise ConfigError(
            f"row optimizer: {what}: got the state of {got:,} keys, expected that of the {held['keys'].numel():,} keys "
            "which the table holds: load the model's state_dict() first"
        )
    _check_shapes(what, held, loaded)
    rows = table.rows(held.pop("keys"), train=False)
    return [(table.arena.state[name], rows, loaded[name]) for name in held]


def _check_shapes(what: str, held: Mapping[str, Tensor], loaded: Mapping[str, Any]) -> None:
    got = {name: list(value.shape) if isinstance(value, Tensor) else None for name, value in loaded.items()}
    expected = {name: list(tensor.shape) for name, tensor in held.items()}
    if got != expected:
        raise ConfigError(f"row optimizer: {what}: got state of {got}, expected {expected}")
