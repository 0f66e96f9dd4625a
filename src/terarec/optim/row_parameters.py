"""The modules with tables that a row optimizer trains, and how they are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from terarec.errors import ConfigError
from terarec.ops import BagGradient
from terarec.storage import Arena, DynamicArena, DynamicTable, StaticTable

AnyTable = StaticTable | DynamicTable


class PendingRows(Protocol):
    """What a row optimizer asks of the gradients that wait, apart from taking them.

    Attributes:
        parameter: the parameter that stands for the rows in ``param_groups``.
        table_lr: float32[T] of each arena or None; tables with the factor 0 do not count in a norm.
        is_unscaled: whether a `torch.amp.GradScaler` has divided them by its scale.
        was_dropped: whether a ``zero_grad()`` had dropped them all when they were taken last.
    """

    parameter: nn.Parameter
    table_lr: list[Tensor | None]
    is_unscaled: bool
    was_dropped: bool

    def unscale_(self, inverse_scale: float) -> None:
        """Multiply the gradients by the inverse of a loss scale, unless that was done."""


@runtime_checkable
class RowParameters(Protocol):
    """A module with tables, such as `terarec.embedding.EmbeddingCollection`.

    Attributes:
        arenas: the arenas of the tables.
        tables: the tables by name.
        pending: the gradients that wait for a step.
    """

    arenas: tuple[Arena | DynamicArena, ...]
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
        raise ConfigError(f"row optimizer: got {got}, expected 'params' and, if its rate is its own, 'lr'")
    roots = group["params"]
    roots = [roots] if isinstance(roots, nn.Module) else list(roots)
    for root in roots:
        if not isinstance(root, nn.Module):
            raise ConfigError(
                f"row optimizer: got {type(root).__name__}, expected modules with tables, or groups "
                '{"params": modules, "lr": rate}; parameters alone do not tell their tables'
            )
    return roots


def owners_of(roots: Sequence[nn.Module]) -> list[RowParameters]:
    """Return the modules with tables among `roots` and in them, each once."""
    found = {id(child): child for root in roots for child in root.modules() if isinstance(child, RowParameters)}
    return list(found.values())


def check_distinct(per_group: Sequence[Sequence[RowParameters]]) -> None:
    """Raise `ConfigError` if groups share a table, or the name of one."""
    seen: set[int] = set()
    for owners in per_group:
        mine = {id(arena) for owner in owners for arena in owner.arenas}
        if mine & seen:
            raise ConfigError("row optimizer: got a module whose tables are in an earlier group, expected each in one")
        seen |= mine
    every = [owner for owners in per_group for owner in owners]
    if every:
        check_names(every)


def check_names(owners: Sequence[RowParameters]) -> None:
    """Raise `ConfigError` if `owners` have no tables, or two of one name."""
    if not any(owner.arenas for owner in owners):
        raise ConfigError("row optimizer: got a module without embedding tables, expected an EmbeddingCollection in it")
    counts = Counter(name for owner in owners for name in owner.tables)
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError(f"row optimizer: {count} tables are named {name!r}, expected distinct names")
