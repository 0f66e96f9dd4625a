# SPDX-License-Identifier: Apache-2.0
"""`RowOptimizer`, which applies the gradients of embedding collections to rows."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn, optim

from terarec.errors import ConfigError, TrainingError
from terarec.ops.row_update import BagGradient, RowRule, find_non_finite, state_shapes
from terarec.optim.row_parameters import (
    RowParameters,
    check_distinct,
    check_table_names,
    groups_of,
    owners_of,
    roots_of,
    state_of,
    state_writes,
)
from terarec.optim.rules import (
    ArenaStep,
    RowRules,
    check_options,
    check_tables,
    described,
    gradient_norm,
    split_columns_of,
    update_arenas,
)
from terarec.spec import SparseOptimizerSpec
from terarec.storage.kinds import AnyArena


class RowOptimizer(optim.Optimizer):
    """Updates the rows of every embedding collection in a module.

    Each row is updated once a step, by the sum of its gradients over all its occurrences and over all backward passes
    since the last step. It is a `torch.optim.Optimizer`: learning-rate schedulers, `torch.amp.GradScaler`, hooks and
    ``state_dict()`` work as for any other. docs/torch.md lists what differs.

    The state of each row is stored with the weights, so a table has one row optimizer: a later one starts with fresh
    state, and the earlier one raises from then on.

    One rule updates all tables, or several rules by name those whose specs name them as their `optimizer`. Several
    rules in one optimizer do what as many optimizers would, each for the tables of one rule: options, counts of steps
    and ``clip_global_norm`` are those of a rule. But a step that one rule skips or rejects, because a gradient is not
    finite, is no step of any rule.

    Attributes:
        spec: The update rule and what gradients go through; or several such rules by name.
        param_groups: One dict for each group and rule with "lr", with "params", the parameters that represent the
            tables, and for rules by name with "optimizer", the name. The parameter of a collection whose tables follow
            several rules is in the group of its first table; the other groups may be without parameters.
        num_steps: Steps done.
        num_skipped: Steps dropped because a gradient was not finite.
        is_skipped: Whether the last step was dropped so.

    Args:
        module: A model or collection, or several of them, or groups of them as dicts
            ``{"params": module or modules, "lr": rate}``.
        spec: The update rule, or rules by name; the `lr` of a rule is that of the groups without one.
        seed: Seed of the random bits with which rows of 16 bits are rounded.

    Raises:
        ConfigError: `spec` is no such rule, no tables in `module`, two tables of one name, a table of a rule that is
            not there, or options for a table that the rule does not move.
        StorageError: Not enough memory for the state.
    """

    # `torch.amp.GradScaler` then leaves it to `step` to divide by the scale and to skip where a gradient is not finite.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        module: nn.Module | Iterable[nn.Module | Mapping[str, Any]],
        spec: SparseOptimizerSpec | Mapping[str, SparseOptimizerSpec],
        *,
        seed: int = 0,
    ) -> None:
        self._rules = RowRules(spec)
        self.spec = spec
        self.num_steps = self.num_skipped = 0
        self.is_skipped = False
        self._seed = seed
        self._rule_steps: Counter[str] = Counter()
        self._frozen: frozenset[str] = frozenset()
        self._owners: list[RowParameters] = []
        self._groups_of: list[Mapping[str, int]] = []  # for each owner: name of a rule -> number of the group
        self._tokens: list[tuple[AnyArena, object]] = []  # which arenas are this optimizer's
        groups = groups_of(module)
        # Before an arena gets new state: an error here does not change an earlier optimizer.
        per_group = [owners_of(roots_of(group)) for group in groups]
        for owners in per_group:
            check_table_names(owners)
        check_distinct(per_group)
        tables = self._rules.tables([owner for owners in per_group for owner in owners])
        for name, rule in self._rules.by_name.items():
            check_options(rule.options, tables.get(name, []))
        # torch calls `add_param_group` for each group, which attaches the state.
        super().__init__(groups, {"lr": next(iter(self._rules.by_name.values())).spec.lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further tables.

        Args:
            param_group: "params", a module with tables or several; "lr", the rate of all of them, if it is not that of
                their rules.

        Raises:
            ConfigError: No tables, tables that are trained already or of such a name, a table of a rule that is not
                there, or an unknown option.
            StorageError: Not enough memory for the state.
        """
        owners = owners_of(roots_of(param_group))
        check_table_names(owners)
        check_distinct([self._owners, owners])
        for owner in owners:
            for arena in owner.arenas:
                self._rules.check(owner, arena)
        numbers: dict[str, int] = {}
        for name in self._rules.tables(owners):
            first = [owner for owner in owners if owner.arenas and self._rules.name_of(owner.arenas[0]) == name]
            parameters = {id(owner.pending.parameter): owner.pending.parameter for owner in first}
            group = {"lr": self._rules.by_name[name].spec.lr, **param_group, "params": list(parameters.values())}
            super().add_param_group(group | ({"optimizer": name} if self._rules.are_named else {}))
            numbers[name] = len(self.param_groups) - 1
        self._owners += owners
        self._groups_of += [numbers] * len(owners)
        for arena in (arena for owner in owners for arena in owner.arenas):
            if any(arena is known for known, _ in self._tokens):
                continue  # modules may share a weight
            spec, _, rule = self._rules.by_name[self._rules.name_of(arena)]
            shapes = state_shapes(rule.kind, arena.num_rows, arena.width, mode=rule.mode)
            arena.attach_state(shapes, fills={"sum": getattr(spec, "initial_accumulator", 0.0)})
            # A later optimizer puts another token there, by which this one knows that its state is gone.
            arena.attached = object()
            self._tokens.append((arena, arena.attached))
        self._update_factors()

    @property
    def lr(self) -> float:
        """The learning rate of the next step, that of the first group.

        Setting it sets that of all groups, and so of all rules.
        """
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = float(value)

    @property
    def frozen(self) -> frozenset[str]:
        """The tables that are not updated, besides those that the rules' options freeze.

        It may be set before any step. A rule whose tables are all frozen does not count the step. ``state_dict()`` does
        not hold it.

        Raises:
            ConfigError: Set to a table that is not there.
        """
        return self._frozen

    @frozen.setter
    def frozen(self, tables: Collection[str]) -> None:
        check_tables("row optimizer: frozen", tables, [name for owner in self._owners for name in owner.tables])
        self._frozen = frozenset(tables)
        self._update_factors()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the rows by the gradients since the last step, and drop these; do nothing without gradients.

        Args:
            closure: Function that computes the loss and its gradients again.

        Returns:
            What `closure` returned. `is_skipped` tells whether the step was skipped because a gradient is not finite,
            as ``spec.rows.non_finite`` of its rule or a `torch.amp.GradScaler` requires.

        Raises:
            TrainingError: A gradient is not finite and ``spec.rows.non_finite`` is "raise"; nothing is changed.
            ConfigError: A later row optimizer trains the tables, or several ranks do. Nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Before gradients are taken, which forgets them: a rejected step leaves them for another try.
        self._check_is_owner()
        self._check_gradients_meet()
        taken = self._take()
        self.is_skipped = False
        if not any(each.gradients for each in taken):
            if any(owner.pending.was_dropped for owner in self._owners):
                warnings.warn(
                    "RowOptimizer.step(): the gradients of the last backward pass were dropped by zero_grad() before "
                    "the step, no row is updated; call zero_grad() before backward() or after step()",
                    stacklevel=3,
                )
            return loss
        if self._found_inf() or not self._accepts([(each.rule, each.gradients) for each in taken]):
            self.num_skipped += 1
            self.is_skipped = True
            return loss
        # All rules have accepted the gradients by now: a step that one of them skips is no step of any.
        by_rule: dict[str, list[ArenaStep]] = {}
        for each in taken:
            by_rule.setdefault(each.rule, []).append(self._arena_step(each))
        moved = False
        for name, parts in by_rule.items():
            moved |= self._move(name, parts)
        self.num_steps += moved
        return loss

    def accepts(self) -> bool:
        """Return whether `step` would use the gradients since the last step, and not skip them; they stay.

        Where tables are on several ranks, all of these call it and get the same.

        Raises:
            TrainingError: As `step`.
        """
        gradients = [
            (self._rules.name_of(arena), of_arena)
            for owner in self._owners
            for arena, of_arena in zip(owner.arenas, owner.pending.gradients(), strict=False)
        ]
        return not self._found_inf() and self._accepts(gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step."""
        for owner in self._owners:
            owner.pending.parameter.grad = None  # of another use of a weight, too
            if owner.arenas and all(arena.attached is not None for arena in owner.arenas):
                owner.take_gradients()

    def unscale_(self, scale: float) -> None:
        """Divide the gradients since the last step by the `scale` of their loss, unless that was done already."""
        for owner in self._owners:
            owner.pending.unscale_(1.0 / scale)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refuse to be copied or pickled: the state lies in the tables of the modules.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "row optimizer",
            "it is not copied or pickled, since its state is stored with the rows; expected a RowOptimizer "
            "made for the copy of the model, with load_state_dict(optimizer.state_dict())",
        )

    def step_state(self) -> dict[str, Any]:
        """Return kind, learning rates and numbers of steps as JSON data, without the state of rows.

        A checkpoint of `terarec.checkpoint` holds this, and the state of rows with the tables.
        """
        kinds, rates = self._kinds(), [float(group["lr"]) for group in self.param_groups]
        state: dict[str, Any] = {
            "kind": kinds if len(kinds) > 1 else next(iter(kinds.values())),
            "lr": rates if len(rates) > 1 else rates[0],
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
        }
        return state | ({"rule_steps": {name: self._rule_steps[name] for name in kinds}} if len(kinds) > 1 else {})

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `step_state`.

        Raises:
            ConfigError: The state of other kinds of optimizers, or of other groups. Nothing is changed.
        """
        missing = {"kind", "lr", "num_steps", "num_skipped"} - set(state)
        if missing:
            raise ConfigError(
                "row optimizer", f"got a state without {', '.join(sorted(missing))}, expected all of them"
            )
        mine, kinds = self._kinds(), state["kind"]
        if (dict.fromkeys(mine, kinds) if isinstance(kinds, str) else kinds) != mine:
            raise ConfigError("row optimizer", f"got the state of {_listed(kinds)}, expected {_listed(mine)}")
        # All is checked before anything is set.
        rates = state["lr"] if isinstance(state["lr"], list) else [state["lr"]]
        if len(rates) != len(self.param_groups):
            raise ConfigError("row optimizer", f"got {len(rates)} groups, expected {len(self.param_groups)}")
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = float(rate)
        self.num_steps, self.num_skipped = int(state["num_steps"]), int(state["num_skipped"])
        steps = state.get("rule_steps", {})
        # A state of one rule has no counts of rules: its steps are those of every rule.
        self._rule_steps = Counter({name: int(steps.get(name, self.num_steps)) for name in mine})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of all rows, in the form of `torch.optim.Optimizer.state_dict`.

        "state" holds for each parameter, by its number, "tables": name of each table -> its optimizer states
        [rows, D] or [rows], sharing memory with static tables; of a dynamic table copies of "keys int64[n]", rising,
        and of their states. Of a weight without a table, such as `terarec.EmbeddingBag`'s, it holds the states
        themselves.

        Raises:
            ConfigError: A later row optimizer has replaced the state.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            # `torch.optim.Optimizer` runs hooks in its own methods, which these replace.
            hook(self)
        self._check_is_owner()
        state = {number: state_of(owner) for number, owner in self._numbered()}
        groups, first = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            groups.append({**group, "params": list(range(first, first + count))})
            first += count
        result: dict[str, Any] = {"state": state, "param_groups": groups, "row_optimizer": self.step_state()}
        for change in self._optimizer_state_dict_post_hooks.values():
            changed = change(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`. The keys of dynamic tables must be there: load the model first.

        Raises:
            ConfigError: The state of another kind of optimizer, of other tables or other keys. Nothing is changed.
        """
        state: Mapping[str, Any] = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, dict(state))
            state = state if changed is None else changed
        missing = {"state", "param_groups", "row_optimizer"} - set(state)
        if missing:
            raise ConfigError(
                "row optimizer",
                f"got a state without {', '.join(sorted(missing))}, expected what state_dict() returned "
                "(load_step_state() takes what step_state() returned)",
            )
        self._check_is_owner()
        if len(state["param_groups"]) != len(self.param_groups):
            got = len(state["param_groups"])
            raise ConfigError("row optimizer", f"got {got} groups, expected {len(self.param_groups)}")
        # All tables are checked before the first is written.
        writes = [
            write for number, owner in self._numbered() for write in state_writes(owner, state["state"].get(number))
        ]
        self.load_step_state(state["row_optimizer"])
        for write in writes:
            write()
        for group, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def _numbered(self) -> list[tuple[int, RowParameters]]:
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        keyed = [(id(owner.pending.parameter), owner) for owner in self._owners]
        return [(numbers[key], owner) for key, owner in keyed if key in numbers]

    def _kinds(self) -> dict[str, str]:
        """Return the kind of each rule that updates tables."""
        names = dict.fromkeys(name for groups in self._groups_of for name in groups)
        return {name: self._rules.by_name[name].row_rule.kind for name in names}

    def _update_factors(self) -> None:
        """Let the joint norm of `torch.nn.utils.clip_grad_norm_` leave out the frozen tables."""
        for owner in self._owners:
            owner.pending.table_lr = [self._rules.table_lr(arena, self._frozen) for arena in owner.arenas]

    def _take(self) -> list[_Taken]:
        """Take the gradients since the last step from all owners, arena by arena."""
        # Of all owners before any gradient is taken, which resets `is_unscaled`: owners may share a weight.
        scales = [1.0 if owner.pending.is_unscaled else self._loss_scale() for owner in self._owners]
        taken = []
        for owner, groups, scale in zip(self._owners, self._groups_of, scales, strict=True):
            lists, factor = owner.take_gradients()
            # A weight that is frozen has no arena, but its pending gradients: one entry of `counted` more.
            for arena, gradients, counted in zip(owner.arenas, lists, owner.pending.counted, strict=False):
                rule = self._rules.name_of(arena)
                taken.append(_Taken(owner, arena, gradients, rule, groups[rule], factor / scale, counted))
        return taken

    def _arena_step(self, taken: _Taken) -> ArenaStep:
        return ArenaStep(
            taken.arena,
            taken.gradients,
            self._row_rule(taken.rule, taken.group, taken.factor),
            self._rules.table_lr(taken.arena, self._frozen),
            taken.counted,
            split_columns_of(taken.owner, taken.arena),
        )

    def _row_rule(self, name: str, group: int, factor: float) -> RowRule:
        """Return the rule `name` at the rate of a group, for gradients that are to be multiplied by `factor`."""
        rule, rate = self._rules.by_name[name].row_rule, float(self.param_groups[group]["lr"])
        if rate == rule.lr and factor == 1.0:  # a new rule is checked, which takes as long as a small update
            return rule
        return replace(rule, lr=rate, grad_scale=rule.grad_scale * factor)

    def _move(self, name: str, parts: Sequence[ArenaStep]) -> bool:
        """Move the arenas of the rule `name`; return whether there was anything to move."""
        if not any(part.gradients and part.is_trained for part in parts):
            return False
        self._rule_steps[name] += 1
        clipping = self._clipping(self._rules.by_name[name].options.clip_global_norm, parts)
        update_arenas(parts, clipping=clipping, step=self._rule_steps[name], seed=self._seed)
        return True

    # `torch.amp.GradScaler` sets the two attributes around a step.
    def _loss_scale(self) -> float:
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _found_inf(self) -> bool:
        flag: Tensor | None = getattr(self, "found_inf", None)
        return flag is not None and bool(flag)

    def _check_is_owner(self) -> None:
        for arena, token in self._tokens:
            if arena.attached is not token:
                raise ConfigError(
                    "row optimizer",
                    f"{described(arena)} were given to a later RowOptimizer, which replaced their "
                    "state; expected one row optimizer for each collection: options for single tables are table_lr and "
                    "frozen",
                )

    def _check_gradients_meet(self) -> None:
        """Raise `ConfigError` in a group of several processes if the gradients of tables do not reach all of them."""
        if all(getattr(owner, "is_exchanged", False) for owner in self._owners):
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world_size = torch.distributed.get_world_size()
            if world_size > 1:
                raise ConfigError(
                    "row optimizer",
                    f"got a process group of {world_size} ranks and tables on one of them, expected tables that "
                    "terarec.dist.shard has placed on all: DistributedDataParallel exchanges the gradients of dense "
                    "parameters alone, so each rank would train tables of its own",
                )

    def _accepts(self, taken: Sequence[tuple[str, Sequence[BagGradient]]]) -> bool:
        """Return whether a step by the gradients of rules is to be done; scan only those of rules that need it."""
        policies = [self._rules.by_name[rule].options.non_finite for rule, _ in taken]
        if not {"raise", "skip"} & set(policies):
            return True
        # A scan of all gradients, only for the rules that need it.
        parameters = [
            None if policy == "pass" else find_non_finite(gradients)
            for policy, (_, gradients) in zip(policies, taken, strict=True)
        ]
        is_raised = [place for place, policy in zip(parameters, policies, strict=True) if place and policy == "raise"]
        # A sum over ranks, so that all of them raise: a rank that continued would wait for the others forever.
        raised = self._sum_over_ranks(float(bool(is_raised)))
        if raised:
            where = is_raised[0] if is_raised else "got a gradient on another rank"
            raise TrainingError(f"step {self.num_steps + 1}", f"{where}, expected finite numbers")
        return self._sum_over_ranks(float(any(parameters))) == 0.0

    def _clipping(self, bound: float | None, parts: Sequence[ArenaStep]) -> float:
        """Return the factor of the gradients for a global norm of at most `bound`.

        The formula is that of `torch.nn.utils.clip_grad_norm_`.
        """
        if bound is None:
            return 1.0
        norm = gradient_norm(parts)
        # Squares add up over ranks, norms do not.
        if any(owner.pending.over_ranks is not None for owner in self._owners):
            norm = math.sqrt(self._sum_over_ranks(norm * norm))
        return min(1.0, bound / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def _sum_over_ranks(self, value: float) -> float:
        """Return the sum over the ranks that have further rows of the tables."""
        sums = [owner.pending.over_ranks for owner in self._owners if owner.pending.over_ranks is not None]
        return sums[0](value) if sums else value


class _Taken(NamedTuple):
    """The gradients of an arena that a step has taken.

    Attributes:
        owner: Module of the arena.
        arena: The arena.
        gradients: Gradients of its bags.
        rule: Name of the rule that the arena follows.
        group: Number of the group that has its rate.
        factor: Factor of the gradients: what clipping and the scale of the loss left to the update.
        counted: float32[T], 0 for tables whose rows are counted on another rank; None for 1.
    """

    owner: RowParameters
    arena: AnyArena
    gradients: Sequence[BagGradient]
    rule: str
    group: int
    factor: float
    counted: Tensor | None


def _listed(kinds: Any) -> str:
    """Return the names of kinds of optimizers for an error."""
    if not isinstance(kinds, Mapping):
        return repr(kinds)
    distinct = set(kinds.values())
    return repr(distinct.pop()) if len(distinct) == 1 else ", ".join(f"{name} {kind!r}" for name, kind in kinds.items())
