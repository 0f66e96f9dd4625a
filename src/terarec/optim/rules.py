# SPDX-License-Identifier: Apache-2.0
"""The rules of a row optimizer: from their specs to arguments of kernels, and an update of arenas by them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from types import UnionType
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.ops.row_update import BagGradient, RowRule, row_gradient_norm, row_rule, row_update_
from terarec.ops.split_rows import SplitColumns, split_row_update_, takes_whole_rows
from terarec.optim.row_parameters import RowParameters
from terarec.spec import AdamSpec, RowOptions, SparseOptimizerSpec
from terarec.spec.checks import did_you_mean
from terarec.spec.tables import DEFAULT_OPTIMIZER
from terarec.storage.kinds import AnyArena

_RULE_NAMES = {"momentum": "beta1", "decay": "beta2"}
"""Fields of specs that have another name in the row rule."""
_NO_NUMBERS = ("rows", "initial_accumulator", "eps_hat")
"""Fields of specs that the row rule does not have: options of all rules, the first value of a state, and a flag."""


def check_spec(what: str, spec: object, accepted: UnionType) -> None:
    """Raise `ConfigError` unless `spec` is of one of the classes `accepted`; `what` names its purpose in the error."""
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
    """Return the rules by name; one spec is the rule "default"."""
    specs = spec if isinstance(spec, Mapping) else {DEFAULT_OPTIMIZER: spec}
    if not specs:
        raise ConfigError("row optimizer", "got no rule, expected at least one, such as {'default': AdamSpec()}")
    for name, each in specs.items():
        what = f"row optimizer: rule {name!r}" if isinstance(spec, Mapping) else "row optimizer"
        check_spec(what, each, SparseOptimizerSpec)
    return {name: TableRule(each, row_options(each), _rule_of(each)) for name, each in specs.items()}


def row_options(spec: SparseOptimizerSpec) -> RowOptions:
    """Return the options of `spec`, or the defaults if it has none."""
    return RowOptions() if spec.rows is None else spec.rows


def _rule_of(spec: SparseOptimizerSpec) -> RowRule:
    options = row_options(spec)
    numbers = {"l1": options.l1, "l2": options.l2}
    for field in fields(spec):
        if field.name not in _NO_NUMBERS:
            numbers[_RULE_NAMES.get(field.name, field.name)] = getattr(spec, field.name)
    if isinstance(spec, AdamSpec) and spec.eps_hat:
        # The spec has one epsilon and a flag for its place; the formula has both places.
        numbers |= {"eps": 0.0, "eps_hat": spec.eps}
    return row_rule(
        spec.kind,
        mode=options.mode,
        # Gradients of a scaled loss: the rule divides them first, so that bounds and regularisation see true ones.
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


class RowRules:
    """The rules of a row optimizer, and which of them each arena follows.

    Attributes:
        by_name: The rules by name.
        are_named: Whether arenas name the rule that they follow; otherwise one rule updates all.
    """

    def __init__(self, spec: SparseOptimizerSpec | Mapping[str, SparseOptimizerSpec]) -> None:
        self.by_name = table_rules(spec)
        self.are_named = isinstance(spec, Mapping)

    def name_of(self, arena: AnyArena) -> str:
        """Return the name of the rule of an arena."""
        return arena.optimizer if self.are_named else DEFAULT_OPTIMIZER

    def tables(self, owners: Sequence[RowParameters]) -> dict[str, list[str]]:
        """Return the tables of each rule that arenas of `owners` name, rules in the order of the arenas."""
        tables: dict[str, list[str]] = {}
        for arena in (arena for owner in owners for arena in owner.arenas):
            name = self.name_of(arena)
            if name not in self.by_name:
                raise ConfigError(
                    "row optimizer",
                    f"{described(arena)}: got the optimizer {name!r}"
                    f"{did_you_mean(name, self.by_name)}, expected one of {', '.join(map(repr, self.by_name))}",
                )
            tables.setdefault(name, [])
        for table in (table for owner in owners for table in owner.tables.values()):
            tables[self.name_of(table.arena)].append(table.name)
        return tables

    def table_lr(self, arena: AnyArena, frozen: Collection[str]) -> Tensor | None:
        """Return float32[T], factors of the rate for the tables of an arena; None if all are 1."""
        return table_factors(self.by_name[self.name_of(arena)].options, arena.table_names, frozen)

    def check(self, owner: RowParameters, arena: AnyArena) -> None:
        """Check that the rule of an arena of `owner` can update the rows in their memory.

        Raises:
            ConfigError: A rule that updates all rows in every step, for rows in tiers; one that needs what no rank has
                alone, for tables on several ranks.
        """
        rule = self.by_name.get(self.name_of(arena))
        if rule is None:
            return  # `tables` raises for it
        if rule.row_rule.updates_all_rows and arena.tiers is not None:
            raise ConfigError(
                "row optimizer: rows.mode",
                f"got 'global', which updates all rows in every step, for {described(arena)}, "
                "which are in tiers; expected 'local' or 'lazy_global'",
            )
        if not getattr(owner, "is_exchanged", False):
            return
        options = rule.options
        if options.clip_global_norm is not None and getattr(owner, "has_hot_rows", False):
            raise ConfigError(
                "row optimizer: rows.clip_global_norm",
                f"got {options.clip_global_norm} for {described(arena)}, of which some rows have copies on all ranks, "
                "expected another placement",
            )
        takes_all = rule.row_rule.updates_all_rows and takes_whole_rows(rule.row_rule)
        if takes_all and split_columns_of(owner, arena) is not None:
            what = "clip_norm" if options.clip_norm is not None else repr(rule.row_rule.kind)
            raise ConfigError(
                "row optimizer: rows.mode",
                f"got 'global' with {what}, which takes all columns of a row, for {described(arena)}, whose columns "
                "are on several ranks; expected 'local', or another placement",
            )


class ArenaStep(NamedTuple):
    """An arena in a step of a row optimizer.

    Attributes:
        arena: The arena.
        gradients: Gradients of its bags since the last step.
        rule: The rule at the rate of the step.
        table_lr: float32[T], factors of the rate for its tables; None for 1.
        counted: float32[T], 0 for tables whose rows are counted on another rank; None for 1.
        columns: Tables whose columns are on several ranks, if the arena has some; None for none.
    """

    arena: AnyArena
    gradients: Sequence[BagGradient]
    rule: RowRule
    table_lr: Tensor | None
    counted: Tensor | None
    columns: SplitColumns | None = None

    @property
    def is_trained(self) -> bool:
        """Whether any table of the arena is trained."""
        return self.table_lr is None or bool(self.table_lr.any())


def update_arenas(parts: Sequence[ArenaStep], *, clipping: float, step: int, seed: int) -> None:
    """Update the rows of arenas that follow one rule, and record the changes.

    Args:
        parts: The arenas.
        clipping: Factor of all gradients.
        step: Number of the step, from 1.
        seed: Seed with which rows of 16 bits are rounded.
    """
    for index, (arena, gradients, factors, table_lr, _, columns) in enumerate(parts):
        rule = factors if clipping == 1.0 else replace(factors, grad_scale=factors.grad_scale * clipping)
        # Arenas round with different bits, as long as there are fewer than 65,536.
        others_lr, rounding_seed = table_lr, (seed * 2**16 + index) % 2**63
        if gradients and columns is not None and takes_whole_rows(rule):
            others_lr = split_row_update_(
                arena.weights,
                arena.state,
                gradients,
                rule,
                columns,
                step=step,
                table_lr=table_lr,
                rounding_seed=rounding_seed,
                row_numbers=arena.row_numbers,
            )
        row_update_(
            arena.weights,
            tuple(arena.state.values()),
            gradients,
            rule,
            step=step,
            table_lr=others_lr,
            rounding_seed=rounding_seed,
            row_numbers=arena.row_numbers,
        )
        _note_changes(arena, gradients, rule, table_lr)
        if gradients:
            # Keys without a row read the default row of their table, which an update must not train.
            arena.reset_defaults()
            if arena.tiers is not None:
                arena.tiers.placement.updated([gradient.places for gradient in gradients], table_lr)


def gradient_norm(parts: Sequence[ArenaStep]) -> float:
    """Return the norm of the gradients of the trained rows that are counted on this rank."""
    norms = []
    for arena, mine, rule, table_lr, counted, _ in parts:
        rates = table_lr if counted is None else counted if table_lr is None else table_lr * counted
        norms.append(row_gradient_norm(arena.weights, mine, rule, table_lr=rates, first_row=arena.num_defaults))
    return math.hypot(*norms)


def split_columns_of(owner: RowParameters, arena: AnyArena) -> SplitColumns | None:
    """Return the tables of `owner` whose columns are on several ranks, if `arena` has some; None for none."""
    columns: SplitColumns | None = getattr(owner, "split_columns", None)
    return None if columns is None or columns.widths.keys().isdisjoint(arena.table_names) else columns


def _note_changes(arena: AnyArena, gradients: Sequence[BagGradient], rule: RowRule, table_lr: Tensor | None) -> None:
    """Record which rows an update by `gradients` changed, if delta checkpoints need them."""
    changes = arena.changes
    if changes is None:
        return
    if rule.updates_all_rows:
        # Every row changes: a delta would be the whole table.
        changes.discard()
        return
    is_trained = [True] * len(arena.table_names) if table_lr is None else (table_lr != 0.0).tolist()
    for gradient in gradients:
        layout, ends = gradient.layout, gradient.feature_ends
        for table, begin, end in zip(layout.feature_table, ends, ends[1:], strict=False):
            if is_trained[table]:
                changes.mark(gradient.keys[begin:end] + layout.table_base[table])


def described(arena: AnyArena) -> str:
    """Return a name of the first tables of `arena` for an error."""
    return "the tables " + (
        ", ".join(map(repr, arena.table_names[:3])) or f"of a weight {[arena.num_rows, arena.width]}"
    )
