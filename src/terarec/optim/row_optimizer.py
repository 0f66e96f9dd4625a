"""`RowOptimizer`: applies the gradients that embedding collections gathered to the rows they belong to."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, overload, runtime_checkable

import torch
from torch import Tensor, nn, optim

from terarec.errors import ConfigError, TrainingError
from terarec.ops import BagGradient, RowRule, row_gradient_norm, row_update_, state_shapes
from terarec.ops.finite import find_non_finite
from terarec.optim.rules import check_spec, check_tables, row_options, row_rule, table_factors
from terarec.spec import SparseOptimizerSpec
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


class RowOptimizer(optim.Optimizer):
    """Updates the rows of every embedding collection in a module.

    Each row moves once a step, by the sum of its gradients over all its occurrences and over all backward passes since
    the last step. It is a `torch.optim.Optimizer`: learning-rate schedulers, `torch.amp.GradScaler`, hooks and
    ``state_dict()`` work as for any other. docs/torch.md lists what differs.

    The state of each row lies beside the weights, so a table has one row optimizer: a later one starts with fresh
    state, and the earlier one raises from then on.

    Attributes:
        spec: the update rule and what gradients go through.
        param_groups: one dict for each group with "lr" and with "params", the parameters that stand for the tables.
        num_steps: steps done.
        num_skipped: steps dropped because a gradient was not finite.
        is_skipped: whether the last step was dropped so.

    Args:
        module: a model or collection, or several of them, or groups of them as dicts
            ``{"params": module or modules, "lr": rate}``.
        spec: the update rule; its `lr` is that of the groups without one.
        seed: Seed of the random bits with which rows of 16 bits are rounded.

    Raises:
        ConfigError: `spec` is no such rule, no tables in `module`, two tables of one name, or options for a table that
            is not there.
        StorageError: not enough memory for the state.
    """

    # `torch.amp.GradScaler` then leaves it to `step` to divide by the scale and to skip where a gradient is not finite.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        module: nn.Module | Iterable[nn.Module | Mapping[str, Any]],
        spec: SparseOptimizerSpec,
        *,
        seed: int = 0,
    ) -> None:
        check_spec("row optimizer", spec, SparseOptimizerSpec)
        self.spec = spec
        self.num_steps = self.num_skipped = 0
        self.is_skipped = False
        self._seed = seed
        self._rule = row_rule(spec)
        self._options = row_options(spec)
        self._owners: list[RowParameters] = []
        self._group_of: list[int] = []  # the number of each owner's group
        self._tokens: list[tuple[Arena | DynamicArena, object]] = []  # which arenas are this optimizer's
        groups = _groups(module)
        # Before an arena gets new state: what is refused here leaves an earlier optimizer as it was.
        per_group = [_owners(_roots(group)) for group in groups]
        for owners in per_group:
            _check_names(owners)
        _check_distinct(per_group)
        check_tables(self._options, [name for owners in per_group for owner in owners for name in owner.tables])
        super().__init__(groups, {"lr": spec.lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further tables.

        Args:
            param_group: "params", a module with tables or several; "lr" if it is not that of the spec.

        Raises:
            ConfigError: no tables, tables that are trained already or of such a name, or an unknown option.
            StorageError: not enough memory for the state.
        """
        owners = _owners(_roots(param_group))
        _check_names(owners)
        _check_distinct([self._owners, owners])
        parameters = {id(owner.pending.parameter): owner.pending.parameter for owner in owners if owner.arenas}
        super().add_param_group({**param_group, "params": list(parameters.values())})
        self._owners += owners
        self._group_of += [len(self.param_groups) - 1] * len(owners)
        for owner in owners:
            for arena in owner.arenas:
                if any(arena is held for held, _ in self._tokens):
                    continue  # modules may share a weight
                shapes = state_shapes(self._rule.kind, arena.num_rows, arena.width, mode=self._rule.mode)
                arena.attach_state(shapes, fills={"sum": getattr(self.spec, "initial_accumulator", 0.0)})
                arena.attached = object()
                self._tokens.append((arena, arena.attached))
            owner.pending.table_lr = [table_factors(self._options, arena.table_names) for arena in owner.arenas]

    @property
    def lr(self) -> float:
        """The learning rate of the next step, that of the first group; setting it sets that of all groups."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = float(value)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the rows by the gradients that came, and forget these; without any, nothing happens.

        Args:
            closure: Function that computes the loss and its gradients anew.

        Returns:
            What `closure` returned. `is_skipped` tells whether the step was skipped because a gradient is not finite,
            as ``spec.rows.non_finite`` or a `torch.amp.GradScaler` asks for.

        Raises:
            TrainingError: a gradient is not finite and ``spec.rows.non_finite`` is "raise"; nothing is changed.
            ConfigError: a later row optimizer trains the tables, or several ranks do. Nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_is_owner()
        _check_is_alone()
        scales = [1.0 if owner.pending.is_unscaled else self._loss_scale() for owner in self._owners]
        taken = [owner.take_gradients() for owner in self._owners]
        gradients = [mine for lists, _ in taken for mine in lists]
        self.is_skipped = False
        if not any(gradients):
            if any(owner.pending.was_dropped for owner in self._owners):
                warnings.warn(
                    "RowOptimizer.step(): the gradients of the last backward pass were dropped by zero_grad() before "
                    "the step, no row is updated; call zero_grad() before backward() or after step()",
                    stacklevel=3,
                )
            return loss
        if self._found_inf() or not self._accepts(gradients):
            self.num_skipped += 1
            self.is_skipped = True
            return loss
        self.num_steps += 1
        arenas = self._arenas()
        rules = [
            self._rule_of(group, factor / scale)
            for group, scale, (lists, factor) in zip(self._group_of, scales, taken, strict=True)
            for _ in lists
        ]
        clipping = self._clipping(arenas, gradients, rules)
        for index, (arena, mine, rule) in enumerate(zip(arenas, gradients, rules, strict=True)):
            row_update_(
                arena.weights,
                tuple(arena.state.values()),
                mine,
                rule if clipping == 1.0 else replace(rule, grad_scale=rule.grad_scale * clipping),
                step=self.num_steps,
                table_lr=table_factors(self._options, arena.table_names),
                rounding_seed=(self._seed * 2**16 + index) % 2**63,
            )
            if mine and isinstance(arena, DynamicArena):
                arena.settle()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        for owner in self._owners:
            owner.pending.parameter.grad = None  # of another use of a weight, too
            if owner.arenas and all(arena.attached is not None for arena in owner.arenas):
                owner.take_gradients()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Refuse to be copied or pickled: the state lies in the tables of the modules.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "row optimizer: it is not copied or pickled, since its state lies beside the rows; expected a RowOptimizer "
            "made for the copy of the model, with load_state_dict(optimizer.state_dict())"
        )

    def step_state(self) -> dict[str, Any]:
        """Return kind, learning rates and numbers of steps as JSON data, without the state of rows.

        A checkpoint of `terarec.checkpoint` holds this, and the state of rows with the tables.
        """
        rates = [float(group["lr"]) for group in self.param_groups]
        steps = {"num_steps": self.num_steps, "num_skipped": self.num_skipped}
        return {"kind": self.spec.kind, "lr": rates[0] if len(rates) == 1 else rates, **steps}

    def load_step_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `step_state` returned.

        Raises:
            ConfigError: the state of another kind of optimizer, or of other groups.
        """
        missing = {"kind", "lr", "num_steps", "num_skipped"} - set(state)
        if missing:
            raise ConfigError(f"row optimizer: got a state without {', '.join(sorted(missing))}, expected all of them")
        if state["kind"] != self.spec.kind:
            raise ConfigError(f"row optimizer: got the state of {state['kind']!r}, expected {self.spec.kind!r}")
        rates = state["lr"] if isinstance(state["lr"], list) else [state["lr"]]
        if len(rates) != len(self.param_groups):
            raise ConfigError(f"row optimizer: got {len(rates)} groups, expected {len(self.param_groups)}")
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = float(rate)
        self.num_steps, self.num_skipped = int(state["num_steps"]), int(state["num_skipped"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of all rows, in the form of `torch.optim.Optimizer.state_dict`.

        "state" holds for each parameter, by its number, "tables": name of each table -> its optimizer states
        [rows, D] or [rows], sharing memory with static tables; of a dynamic table copies of "keys int64[n]", rising,
        and of their states. Of a weight without a table, such as `terarec.EmbeddingBag`'s, it holds the states
        themselves.

        Raises:
            ConfigError: a later row optimizer has replaced the state.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._check_is_owner()
        state = {number: _state_of(owner) for number, owner in self._numbered()}
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
        """Continue from what `state_dict` returned. The keys of dynamic tables must be there: load the model first.

        Raises:
            ConfigError: the state of another kind of optimizer, of other tables or other keys. Nothing is changed.
        """
        state: Mapping[str, Any] = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, dict(state))
            state = state if changed is None else changed
        missing = {"state", "param_groups", "row_optimizer"} - set(state)
        if missing:
            raise ConfigError(
                f"row optimizer: got a state without {', '.join(sorted(missing))}, expected what state_dict() returned "
                "(load_step_state() takes what step_state() returned)"
            )
        self._check_is_owner()
        if len(state["param_groups"]) != len(self.param_groups):
            got = len(state["param_groups"])
            raise ConfigError(f"row optimizer: got {got} groups, expected {len(self.param_groups)}")
        writes = [write for number, owner in self._numbered() for write in _writes(owner, state["state"].get(number))]
        self.load_step_state(state["row_optimizer"])
        for target, rows, values in writes:
            if rows is None:
                target.copy_(values)
            else:
                target.index_copy_(0, rows, values.to(target.device, target.dtype))
        for group, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        for done in self._optimizer_load_state_dict_post_hooks.values():
            done(self)

    def _numbered(self) -> list[tuple[int, RowParameters]]:
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        keyed = [(id(owner.pending.parameter), owner) for owner in self._owners]
        return [(numbers[key], owner) for key, owner in keyed if key in numbers]

    def _rule_of(self, group: int, factor: float) -> RowRule:
        """Return the rule of a group, for gradients that are to be multiplied by `factor`."""
        rule, rate = self._rule, float(self.param_groups[group]["lr"])
        if rate == rule.lr and factor == 1.0:  # a new rule is checked, which takes as long as a small update
            return rule
        return replace(rule, lr=rate, grad_scale=rule.grad_scale * factor)

    # `torch.amp.GradScaler` sets the two attributes around a step.
    def _loss_scale(self) -> float:
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _found_inf(self) -> bool:
        found: Tensor | None = getattr(self, "found_inf", None)
        return found is not None and bool(found)

    def _check_is_owner(self) -> None:
        for arena, token in self._tokens:
            if arena.attached is not token:
                names = ", ".join(map(repr, arena.table_names[:3])) or f"of a weight {[arena.num_rows, arena.width]}"
                raise ConfigError(
                    f"row optimizer: the tables {names} were given to a later RowOptimizer, which replaced their "
                    "state; expected one row optimizer for each collection: options for single tables are table_lr and "
                    "frozen"
                )

    def _accepts(self, gradients: Sequence[Sequence[BagGradient]]) -> bool:
        """Whether the step is to be done; asks no more of the gradients than the spec asks for."""
        if self._options.non_finite == "pass":
            return True
        found = next(filter(None, map(find_non_finite, gradients)), None)
        if found is not None and self._options.non_finite == "raise":
            raise TrainingError(f"step {self.num_steps + 1}: {found}, expected finite numbers")
        return found is None

    def _clipping(
        self,
        arenas: Sequence[Arena | DynamicArena],
        gradients: Sequence[Sequence[BagGradient]],
        rules: Sequence[RowRule],
    ) -> float:
        """What the gradients are multiplied by for ``clip_global_norm``, as `torch.nn.utils.clip_grad_norm_` does."""
        bound = self._options.clip_global_norm
        if bound is None:
            return 1.0
        norms = [
            row_gradient_norm(
                arena.weights,
                mine,
                rule,
                table_lr=table_factors(self._options, arena.table_names),
                first_row=arena.num_defaults,
            )
            for arena, mine, rule in zip(arenas, gradients, rules, strict=True)
        ]
        norm = math.hypot(*norms)
        return min(1.0, bound / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def _arenas(self) -> list[Arena | DynamicArena]:
        return [arena for owner in self._owners for arena in owner.arenas]


def _groups(module: nn.Module | Iterable[nn.Module | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups that the optimizer is made for, each a dict with "params"."""
    if isinstance(module, nn.Module):
        return [{"params": module}]
    parts = list(module)
    if parts and all(isinstance(part, Mapping) for part in parts):
        return [dict(part) for part in parts if isinstance(part, Mapping)]
    return [{"params": parts}]


def _roots(group: Mapping[str, Any]) -> list[nn.Module]:
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


def _owners(roots: Sequence[nn.Module]) -> list[RowParameters]:
    found = {id(child): child for root in roots for child in root.modules() if isinstance(child, RowParameters)}
    return list(found.values())


def _state_of(owner: RowParameters) -> dict[str, Any]:
    """Return the state of the rows of `owner` for ``state_dict()``."""
    if not owner.tables:
        return {name: tensor for arena in owner.arenas for name, tensor in arena.state.items()}
    return {"tables": {name: _state_of_table(table) for name, table in owner.tables.items()}}


def _state_of_table(table: AnyTable) -> dict[str, Tensor]:
    pieces = list(table.export_chunks(max(1, len(table))))
    if not table.is_dynamic:
        return dict(pieces[0].state)
    # An index lists keys in an order of its own, which differs from process to process.
    keys, order = torch.cat([piece.keys for piece in pieces]).sort()
    states = {name: torch.cat([piece.state[name] for piece in pieces])[order] for name in table.state_names}
    return {"keys": keys, **states}


def _writes(owner: RowParameters, loaded: Any) -> list[tuple[Tensor, Tensor | None, Tensor]]:
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
    return [write for name, table in owner.tables.items() for write in _writes_of_table(table, found[name])]


def _writes_of_table(table: AnyTable, loaded: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    what = f"table {table.name!r}"
    held = _state_of_table(table)
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


def _check_is_alone() -> None:
    """Raise `ConfigError` in a group of several processes: nothing would bring their tables together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world_size = torch.distributed.get_world_size()
        if world_size > 1:
            raise ConfigError(
                f"row optimizer: got a process group of {world_size} ranks, expected one: the gradients of rows are "
                "not exchanged between ranks (DistributedDataParallel exchanges those of dense parameters alone), so "
                "each rank would train tables of its own"
            )


def _check_distinct(per_group: Sequence[Sequence[RowParameters]]) -> None:
    """Raise `ConfigError` if groups share a table, or the name of one."""
    seen: set[int] = set()
    for owners in per_group:
        mine = {id(arena) for owner in owners for arena in owner.arenas}
        if mine & seen:
            raise ConfigError("row optimizer: got a module whose tables are in an earlier group, expected each in one")
        seen |= mine
    every = [owner for owners in per_group for owner in owners]
    if every:
        _check_names(every)


def _check_names(owners: Sequence[RowParameters]) -> None:
    if not any(owner.arenas for owner in owners):
        raise ConfigError("row optimizer: got a module without embedding tables, expected an EmbeddingCollection in it")
    counts = Counter(name for owner in owners for name in owner.tables)
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError(f"row optimizer: {count} tables are named {name!r}, expected distinct names")
