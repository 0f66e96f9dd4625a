# SPDX-License-Identifier: Apache-2.0
"""Modules with tables that a row optimizer trains: how they are found, and their state in ``state_dict()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from terarec.errors import ConfigError
from terarec.ops.row_update import BagGradient
from terarec.storage.kinds import AnyArena, AnyTable
from terarec.storage.static import StaticTable


class PendingRows(Protocol):
    """Operations of a row optimizer on pending gradients, apart from taking them.

    Attributes:
        parameter: The parameter that represents the rows in ``param_groups``.
        table_lr: float32[T] of each arena or None; tables with the factor 0 do not count in a norm.
        is_unscaled: Whether a `torch.amp.GradScaler` has divided them by its scale.
        was_dropped: Whether a ``zero_grad()`` had dropped them all when they were taken last.
        over_ranks: Function that adds up a number over the ranks that have further rows; None for none.
        counted: float32[T] of each arena or None; the rows of tables with the factor 0 are counted on another rank.
    """

    parameter: nn.Parameter
    table_lr: list[Tensor | None]
    is_unscaled: bool
    was_dropped: bool
    over_ranks: Callable[[float], float] | None
    counted: list[Tensor | None]

    def gradients(self) -> list[list[BagGradient]]:
        """Return the gradients of each arena, which stay."""

    def unscale_(self, inverse_scale: float) -> None:
        """Multiply the gradients by the inverse of a loss scale, unless that was done."""


@runtime_checkable
class RowParameters(Protocol):
    """A module with tables, such as `terarec.embedding.EmbeddingCollection`."""

    arenas: tuple[AnyArena, ...]
    tables: Mapping[str, AnyTable]
    pending: PendingRows

    def take_gradients(self) -> tuple[list[list[BagGradient]], float]:
        """Return the gradients since the last step, one list per arena, and a factor for them; and forget them."""


def groups_of(module: nn.Module | Iterable[nn.Module | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups that the optimizer is made for, each a dict with "params"."""
    if isinstance(module, nn.Module):
        return [{"params": module}]
    parts = list(module)
    if parts and all(isinstance(part, Mapping) for part in parts):
        return [dict(part) for part in parts if isinstance(part, Mapping)]
    return [{"params": parts}]


def roots_of(group: Mapping[str, Any]) -> list[nn.Module]:
    """Return the modules of a group."""
    unknown = sorted(set(group) - {"params", "lr"})
    if unknown or "params" not in group:
        got = f"a group with {unknown[0]!r}" if unknown else "a group without 'params'"
        raise ConfigError("row optimizer", f"got {got}, expected 'params' and, if its rate is its own, 'lr'")
    roots = group["params"]
    roots = [roots] if isinstance(roots, nn.Module) else list(roots)
    for root in roots:
        if not isinstance(root, nn.Module):
            raise ConfigError(
                "row optimizer",
                f"got {type(root).__name__}, expected modules with tables, or groups "
                '{"params": modules, "lr": rate}; a parameter alone does not identify its tables',
            )
    return roots


def owners_of(roots: Sequence[nn.Module]) -> list[RowParameters]:
    """Return the modules with tables among `roots` and in them, each once."""
    # By identity: a module that is reached by two paths is one owner.
    owners = {id(child): child for root in roots for child in root.modules() if isinstance(child, RowParameters)}
    return list(owners.values())


def check_distinct(per_group: Sequence[Sequence[RowParameters]]) -> None:
    """Raise `ConfigError` if groups share a table, or the name of one."""
    seen: set[int] = set()
    for owners in per_group:
        mine = {id(arena) for owner in owners for arena in owner.arenas}
        if mine & seen:
            raise ConfigError(
                "row optimizer", "got a module whose tables are in an earlier group, expected each in one"
            )
        seen |= mine
    every = [owner for owners in per_group for owner in owners]
    if every:
        check_table_names(every)


def check_table_names(owners: Sequence[RowParameters]) -> None:
    """Raise `ConfigError` if `owners` have no tables, or two of one name."""
    if not any(owner.arenas for owner in owners):
        raise ConfigError(
            "row optimizer", "got a module without embedding tables, expected an EmbeddingCollection in it"
        )
    counts = Counter(name for owner in owners for name in owner.tables)
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError("row optimizer", f"{count} tables are named {name!r}, expected distinct names")


def state_of(owner: RowParameters) -> dict[str, Any]:
    """Return the state of the rows of `owner` for ``state_dict()``."""
    if not owner.tables:
        # A weight that is a parameter has no table, and one arena.
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


def state_writes(owner: RowParameters, loaded: Any) -> list[Callable[[], object]]:
    """Return the calls that set the state of `owner` to `loaded`, which is checked by then."""
    if not isinstance(loaded, Mapping):
        raise ConfigError("row optimizer", "got no state for a parameter, expected that of each collection")
    if not owner.tables:
        own = {name: tensor for arena in owner.arenas for name, tensor in arena.state.items()}
        _check_shapes("a weight", own, loaded)
        return [partial(tensor.copy_, loaded[name]) for name, tensor in own.items()]
    saved = loaded.get("tables", {})
    if set(saved) != set(owner.tables):
        raise ConfigError(
            "row optimizer",
            f"got the state of tables {', '.join(sorted(saved)) or 'none'}, expected {', '.join(sorted(owner.tables))}",
        )
    return [write for name, table in owner.tables.items() for write in _table_writes(table, saved[name])]


def _table_writes(table: AnyTable, loaded: Mapping[str, Tensor]) -> list[Callable[[], object]]:
    what = f"table {table.name!r}"
    own = _table_state(table)
    if isinstance(table, StaticTable):
        _check_shapes(what, own, loaded)
        return [partial(tensor.copy_, loaded[name]) for name, tensor in own.items()]
    if not table.is_dynamic:
        _check_shapes(what, own, loaded)
        return [partial(_import_state, table, table.keys(), loaded)]
    keys = loaded.get("keys")
    if not isinstance(keys, Tensor) or not torch.equal(keys.to(own["keys"].device), own["keys"]):
        got = keys.numel() if isinstance(keys, Tensor) else 0
        raise ConfigError(
            "row optimizer",
            f"{what}: got the state of {got:,} keys, expected that of the {own['keys'].numel():,} keys "
            "which the table holds: load the model's state_dict() first",
        )
    _check_shapes(what, own, loaded)
    return [partial(_import_state, table, own["keys"], loaded)]


def _import_state(table: AnyTable, keys: Tensor, loaded: Mapping[str, Tensor]) -> None:
    """Set the states of the rows of ``keys int64[n]``."""
    rows = table.export(keys)
    state = {name: loaded[name].to(values.device, values.dtype) for name, values in rows.state.items()}
    # Without counts of uses, which belong to the eviction policy and not to the optimizer.
    table.import_(replace(rows, state=state, uses={}))


def _check_shapes(what: str, own: Mapping[str, Tensor], loaded: Mapping[str, Any]) -> None:
    got = {name: list(value.shape) if isinstance(value, Tensor) else None for name, value in loaded.items()}
    expected = {name: list(tensor.shape) for name, tensor in own.items()}
    if got != expected:
        raise ConfigError("row optimizer", f"{what}: got state of {got}, expected {expected}")
