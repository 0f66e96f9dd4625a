# SPDX-License-Identifier: Apache-2.0
"""Freezing and unfreezing parts of a model by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn

from terarec.errors import ConfigError
from terarec.optim.row_optimizer import RowOptimizer
from terarec.optim.row_parameters import RowParameters
from terarec.spec.checks import did_you_mean


def freeze(model: nn.Module, patterns: Iterable[str], *, rows: RowOptimizer | None = None) -> list[str]:
    """Freeze the parameters and tables that `patterns` match, with their optimizer states.

    A pattern, such as "bottom.*" or "item*", matches names of parameters (``model.named_parameters()``) and of tables;
    a table also by its name in ``model.state_dict()``. Where all tables of a collection are frozen, no gradient of
    their rows is computed, and dynamic ones insert no keys.

    Args:
        model: The model.
        patterns: Patterns of names, with ``*``, ``?`` and ``[...]``; upper and lower case differ.
        rows: The optimizer of the tables; needed where a part of a collection's tables is frozen.

    Returns:
        The names of the parameters and tables that are matched, in the order of the model.

    Raises:
        ConfigError: A pattern that matches nothing, or a part of a collection without `rows`. Nothing is changed.
    """
    return _set_frozen(model, patterns, rows, is_frozen=True)


def unfreeze(model: nn.Module, patterns: Iterable[str], *, rows: RowOptimizer | None = None) -> list[str]:
    """Unfreeze the parameters and tables that match `patterns`; arguments, result and errors are those of `freeze`."""
    return _set_frozen(model, patterns, rows, is_frozen=False)


def _set_frozen(model: nn.Module, patterns: Iterable[str], rows: RowOptimizer | None, *, is_frozen: bool) -> list[str]:
    collections = [
        (prefix, module)
        for prefix, module in model.named_modules()
        if isinstance(module, RowParameters) and module.tables
    ]
    # The parameters that represent tables are frozen by table names, not by their own.
    of_tables = {id(module.pending.parameter) for _, module in collections}
    parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in of_tables}
    tables = {table: _path(prefix, table) for prefix, module in collections for table in module.tables}
    patterns = list(patterns)
    _check_patterns(patterns, [*parameters, *tables, *tables.values()])
    found_parameters = [name for name in parameters if _matches(patterns, name)]
    matching = [table for table, path in tables.items() if _matches(patterns, table) or _matches(patterns, path)]
    # A collection has one flag for all tables; which of them stay is known to the row optimizer.
    if rows is None:
        _check_whole(collections, matching)
    else:
        rows.frozen = rows.frozen | set(matching) if is_frozen else rows.frozen - set(matching)
    for name in found_parameters:
        parameters[name].requires_grad_(not is_frozen)
        if is_frozen:
            parameters[name].grad = None  # optimizers skip parameters without a gradient
    frozen = rows.frozen if rows is not None else set(matching) if is_frozen else set()
    for _, module in collections:
        if not set(matching).isdisjoint(module.tables):
            module.pending.parameter.requires_grad_(not frozen.issuperset(module.tables))
    return [*found_parameters, *matching]


def _path(prefix: str, table: str) -> str:
    """Return the name of a table in ``state_dict()``."""
    return ".".join(part for part in (prefix, "tables", table) if part)


def _matches(patterns: Collection[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(patterns: Collection[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                "freeze",
                f"got {pattern!r}{did_you_mean(pattern, names)}, which matches no parameter and no table, "
                f"expected patterns of {', '.join(map(repr, list(names)[:5]))}{', ...' if len(names) > 5 else ''}",
            )


def _check_whole(collections: Iterable[tuple[str, RowParameters]], matching: Collection[str]) -> None:
    for _, module in collections:
        mine = [table for table in module.tables if table in matching]
        if mine and len(mine) < len(module.tables):
            raise ConfigError(
                "freeze",
                f"got {', '.join(map(repr, mine))} of the tables {', '.join(map(repr, module.tables))} without "
                "a row optimizer, expected rows=..., or all tables of the collection",
            )
