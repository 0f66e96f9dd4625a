"""Specs of row optimizers -> arguments of kernels: a `RowRule`, and a factor of the learning rate for each table."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from types import UnionType
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.ops import RowRule, row_rule
from terarec.spec import AdamSpec, RowOptions, SparseOptimizerSpec
from terarec.spec.quoting import did_you_mean
from terarec.spec.tables import DEFAULT_OPTIMIZER

_RULE_NAMES = {"momentum": "beta1", "decay": "beta2"}
"""Fields of specs that have another name in the row rule."""
_NO_NUMBERS = ("rows", "initial_accumulator")
"""Fields of specs that the row rule does not have: options of all rules, and the first value of a state."""


def check_spec(what: str, spec: object, accepted: UnionType) -> None:
    """Raise `ConfigError` unless `spec` is of one of the classes `accepted`; `what` is made by it."""
    if not isinstance(spec, accepted):
        names = [kind.__name__ for kind in get_args(accepted)]
        got = repr(spec) if isinstance(spec, str) else type(spec).__name__
        raise ConfigError(what, f"got {got}, expected {', '.join(names[:-1])} or {names[-1]}")


class TableRule(NamedTuple):
    """A spec in the forms that a row optimizer needs.

    Attributes:
        spec: The spec.
        options: Its options for rows.
        row_rule: Rule in the form that kernels take.
    """

    spec: SparseOptimizerSpec
    options: RowOptions
    row_rule: RowRule


def table_rules(spec: SparseOptimizerSpec | Mapping[str, SparseOptimizerSpec]) -> dict[str, TableRule]:
    """Return the rules by name; one spec is the rule "default".

    Raises:
        ConfigError: No rule, or what is not the spec of one.
    """
    specs = spec if isinstance(spec, Mapping) else {DEFAULT_OPTIMIZER: spec}
    if not specs:
        raise ConfigError("row optimizer", "got no rule, expected at least one, such as {'default': AdamSpec()}")
    for name, each in specs.items():
        what = f"row optimizer: rule {name!r}" if isinstance(spec, Mapping) else "row optimizer"
        check_spec(what, each, SparseOptimizerSpec)
    return {name: TableRule(each, row_options(each), _rule_of(each)) for name, each in specs.items()}


def row_options(spec: SparseOptimizerSpec) -> RowOptions:
    """Return the options of `spec`, or those that hold without any."""
    return RowOptions() if spec.rows is None else spec.rows


def _rule_of(spec: SparseOptimizerSpec) -> RowRule:
    options = row_options(spec)
    numbers = {"l1": options.l1, "l2": options.l2}
    for field in fields(spec):
        if field.name not in _NO_NUMBERS:
            numbers[_RULE_NAMES.get(field.name, field.name)] = getattr(spec, field.name)
    if isinstance(spec, AdamSpec) and spec.eps_hat:
        numbers |= {"eps": 0.0, "eps_hat": spec.eps}
    return row_rule(
        spec.kind,
        mode=options.mode,
        grad_scale=1.0 / options.loss_scale,
        clip_value=math.inf if options.clip_value is None else options.clip_value,
        clip_norm=math.inf if options.clip_norm is None else options.clip_norm,
        **numbers,
    )


def table_factors(options: RowOptions, tables: Sequence[str], frozen: Collection[str] = ()) -> Tensor | None:
    """Return float32[T], factors of the learning rate for `tables`, 0 for frozen ones; None if all are 1."""
    if not (options.frozen or options.table_lr or frozen):
        return None
    stay = {*options.frozen, *frozen}
    factors = [0.0 if table in stay else options.table_lr.get(table, 1.0) for table in tables]
    return None if all(factor == 1.0 for factor in factors) else torch.tensor(factors)


def check_options(options: RowOptions, tables: Sequence[str]) -> None:
    """Raise `ConfigError` if `options` name a table that is not among `tables`, which they are for."""
    check_tables("rows.table_lr", options.table_lr, tables)
    check_tables("rows.frozen", options.frozen, tables)


def check_tables(what: str, names: Collection[str], tables: Sequence[str]) -> None:
    """Raise `ConfigError` if `names`, given as `what`, has one that is not among `tables`."""
    for name in names:
        if name not in tables:
            known = f"one of {', '.join(map(repr, tables))}" if tables else "none, as no weight is a table"
            raise ConfigError(what, f"got table {name!r}{did_you_mean(name, tables)}, expected {known}")
