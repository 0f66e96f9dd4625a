"""`RowOptimizer`: applies the gradients that embedding collections gathered to the rows they belong to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from terarec.errors import ConfigError, TrainingError
from terarec.ops import BagGradient, row_gradient_norm, row_update_, state_shapes
from terarec.optim.finite import find_non_finite
from terarec.optim.rules import check_spec, check_tables, row_options, row_rule, table_factors
from terarec.spec import SparseOptimizerSpec
from terarec.storage import Arena, DynamicArena


@runtime_checkable
class RowParameters(Protocol):
    """A module with tables, such as `terarec.embedding.EmbeddingCollection`."""

    arenas: tuple[Arena | DynamicArena, ...]

    def take_gradients(self) -> list[list[BagGradient]]:
        """Hand over, and forget, the gradients gathered so far: one list per arena."""


class RowOptimizer:
    """Updates the rows of every embedding collection in a module.

    Each row moves once a step, by the sum of its gradients over all its occurrences and over all backward passes since
    the last step. The optimizer's state per row lives beside the weights and travels with the tables
    (`terarec.storage.Store`); ``state_dict()`` holds the rest.

    Attributes:
        spec: the update rule and what gradients go through.
        num_steps: steps done.
        num_skipped: steps dropped because a gradient was not finite.

    Args:
        module: a model or collection, or several of them.
        spec: the update rule.
        seed: of the random bits with which rows of 16 bits are rounded.

    Raises:
        ConfigError: `spec` is no such rule, no tables in `module`, two tables of one name, or options for a table that
            is not there.
        StorageError: not enough memory for the state.
    """

    def __init__(self, module: nn.Module | Sequence[nn.Module], spec: SparseOptimizerSpec, *, seed: int = 0) -> None:
        check_spec("row optimizer", spec, SparseOptimizerSpec)
        roots = [module] if isinstance(module, nn.Module) else list(module)
        found = {id(child): child for root in roots for child in root.modules() if isinstance(child, RowParameters)}
        self._owners: list[RowParameters] = list(found.values())
        _check_names(self._owners)
        self.spec = spec
        self.num_steps = self.num_skipped = 0
        self._seed = seed
        self._rule = row_rule(spec)
        self._options = row_options(spec)
        check_tables(self._options, [name for arena in self._arenas() for name in arena.table_names])
        for arena in self._arenas():
            shapes = state_shapes(self._rule.kind, arena.num_rows, arena.width, mode=self._rule.mode)
            arena.attach_state(shapes, fills={"sum": getattr(spec, "initial_accumulator", 0.0)})

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._rule.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._rule = replace(self._rule, lr=float(value))

    def step(self) -> bool:
        """Update the rows by the gradients that came and forget these; without any, nothing happens.

        Returns:
            False if the step was skipped, as ``spec.rows.non_finite`` asks for, because a gradient is not finite.

        Raises:
            TrainingError: a gradient is not finite and ``spec.rows.non_finite`` is "raise"; nothing is changed.
        """
        taken = [owner.take_gradients() for owner in self._owners]
        gradients = [per_arena for per_owner in taken for per_arena in per_owner]
        if not any(gradients):
            return True
        if not self._accepts(gradients):
            self.num_skipped += 1
            return False
        self.num_steps += 1
        rule, clipping = self._rule, self._clipping(gradients)
        if clipping != 1.0:  # a new rule is checked again, which costs as much as a small update
            rule = replace(rule, grad_scale=rule.grad_scale * clipping)
        for index, (arena, mine) in enumerate(zip(self._arenas(), gradients, strict=True)):
            row_update_(
                arena.weights,
                tuple(arena.state.values()),
                mine,
                rule,
                step=self.num_steps,
                table_lr=table_factors(self._options, arena.table_names),
                rounding_seed=(self._seed * 2**16 + index) % 2**63,
            )
            if mine and isinstance(arena, DynamicArena):
                arena.settle()
        return True

    def zero_grad(self) -> None:
        """Forget the gradients gathered since the last step."""
        for owner in self._owners:
            owner.take_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Kind, learning rate and numbers of steps; the state per row is in the tables.

        That of weights without a table, such as `terarec.EmbeddingBag`'s, is here: "rows" lists it in the order of
        their modules.
        """
        steps = {"num_steps": self.num_steps, "num_skipped": self.num_skipped}
        rows = [dict(arena.state) for arena in self._arenas_without_tables()]
        return {"kind": self.spec.kind, "lr": self.lr, **steps, **({"rows": rows} if rows else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ConfigError: the state of another kind of optimizer, or of other weights.
        """
        missing = {"kind", "lr", "num_steps", "num_skipped"} - set(state)
        if missing:
            raise ConfigError(f"row optimizer: got a state without {', '.join(sorted(missing))}, expected all of them")
        if state["kind"] != self.spec.kind:
            raise ConfigError(f"row optimizer: got the state of {state['kind']!r}, expected {self.spec.kind!r}")
        held = [dict(arena.state) for arena in self._arenas_without_tables()]
        loaded = state.get("rows", [])
        if _shapes(held) != _shapes(loaded):
            raise ConfigError(f"row optimizer: got rows of {_shapes(loaded)}, expected {_shapes(held)}")
        for mine, theirs in zip(held, loaded, strict=True):
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])
        self.lr = state["lr"]
        self.num_steps = int(state["num_steps"])
        self.num_skipped = int(state["num_skipped"])

    def _accepts(self, gradients: Sequence[Sequence[BagGradient]]) -> bool:
        """Whether the step is to be done; asks no more of the gradients than the spec asks for."""
        if self._options.non_finite == "pass":
            return True
        found = next(filter(None, map(find_non_finite, gradients)), None)
        if found is not None and self._options.non_finite == "raise":
            raise TrainingError(f"step {self.num_steps + 1}: {found}, expected finite numbers")
        return found is None

    def _clipping(self, gradients: Sequence[Sequence[BagGradient]]) -> float:
        """What the gradients are multiplied by for ``clip_global_norm``, as `torch.nn.utils.clip_grad_norm_` does."""
        bound = self._options.clip_global_norm
        if bound is None:
            return 1.0
        norms = [
            row_gradient_norm(
                arena.weights,
                mine,
                self._rule,
                table_lr=table_factors(self._options, arena.table_names),
                first_row=arena.num_defaults,
            )
            for arena, mine in zip(self._arenas(), gradients, strict=True)
        ]
        norm = math.hypot(*norms)
        return min(1.0, bound / (norm + 1e-6)) if math.isfinite(norm) else 1.0

    def _arenas_without_tables(self) -> list[Arena | DynamicArena]:
        """Each once, though modules may share it."""
        return list({id(arena): arena for arena in self._arenas() if not arena.table_names}.values())

    def _arenas(self) -> list[Arena | DynamicArena]:
        return [arena for owner in self._owners for arena in owner.arenas]


def _shapes(states: Sequence[Mapping[str, Tensor]]) -> list[dict[str, list[int]]]:
    return [{name: list(tensor.shape) for name, tensor in state.items()} for state in states]


def _check_names(owners: Sequence[RowParameters]) -> None:
    counts = Counter(name for owner in owners for arena in owner.arenas for name in arena.table_names)
    if not any(owner.arenas for owner in owners):
        raise ConfigError("row optimizer: got a module without embedding tables, expected an EmbeddingCollection in it")
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError(f"row optimizer: {count} tables are named {name!r}, expected distinct names")
