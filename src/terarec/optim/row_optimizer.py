"""`RowOptimizer`: applies the gradients that embedding collections gathered to the rows they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import nn

from terarec.errors import ConfigError
from terarec.ops.row_update import BagGradient, RowRule, row_update_, state_shapes
from terarec.spec import AdaGradSpec, AdamSpec, SGDSpec, SparseOptimizerSpec
from terarec.storage import Arena, DynamicArena


@runtime_checkable
class RowParameters(Protocol):
    """A module with tables, such as `terarec.embedding.EmbeddingCollection`."""

    arenas: tuple[Arena | DynamicArena, ...]

    def take_gradients(self) -> list[list[BagGradient]]:
        """Hand over, and forget, the gradients gathered so far: one list per arena."""


class RowOptimizer:
    """Updates the touched rows of every embedding collection in a module.

    Each touched row moves once a step, by the sum of its gradients over all its occurrences and over all backward
    passes since the last step. The optimizer's state per row lives beside the weights and travels with the tables
    (`terarec.storage.Store`); ``state_dict()`` holds the rest.

    Args:
        module: a model or collection, or several of them.
        spec: the update rule.

    Raises:
        ConfigError: no tables in `module`, or two tables of one name.
        StorageError: not enough memory for the state.
    """

    def __init__(self, module: nn.Module | Sequence[nn.Module], spec: SparseOptimizerSpec) -> None:
        roots = [module] if isinstance(module, nn.Module) else list(module)
        found = {id(child): child for root in roots for child in root.modules() if isinstance(child, RowParameters)}
        self._owners: list[RowParameters] = list(found.values())
        _check_tables(self._owners)
        self.spec = spec
        self._rule = _rule(spec)
        self.num_steps = 0
        for arena in self._arenas():
            shapes = state_shapes(self._rule.kind, arena.num_rows, arena.width)
            arena.attach_state(shapes, fill=getattr(spec, "initial_accumulator", 0.0))

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._rule.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._rule = replace(self._rule, lr=float(value))

    def step(self) -> None:
        """Update the rows that have gradients and forget these; without any, nothing happens."""
        taken = [owner.take_gradients() for owner in self._owners]
        gradients = [per_arena for per_owner in taken for per_arena in per_owner]
        if not any(gradients):
            return
        self.num_steps += 1
        for arena, mine in zip(self._arenas(), gradients, strict=True):
            if mine:
                row_update_(arena.weights, tuple(arena.state.values()), mine, self._rule, step=self.num_steps)
                if isinstance(arena, DynamicArena):
                    arena.settle()

    def zero_grad(self) -> None:
        """Forget the gradients gathered since the last step."""
        for owner in self._owners:
            owner.take_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Kind, learning rate and number of steps; the state per row is in the tables."""
        return {"kind": self.spec.kind, "lr": self.lr, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ConfigError: the state of another kind of optimizer.
        """
        if state["kind"] != self.spec.kind:
            raise ConfigError(f"row optimizer: got the state of {state['kind']!r}, expected {self.spec.kind!r}")
        self.lr = state["lr"]
        self.num_steps = int(state["num_steps"])

    def _arenas(self) -> list[Arena | DynamicArena]:
        return [arena for owner in self._owners for arena in owner.arenas]


def _rule(spec: SparseOptimizerSpec) -> RowRule:
    if isinstance(spec, SGDSpec):
        return RowRule(kind="sgd", lr=spec.lr)
    if isinstance(spec, AdamSpec):
        return RowRule(kind="adam", lr=spec.lr, eps=spec.eps, beta1=spec.beta1, beta2=spec.beta2)
    if isinstance(spec, AdaGradSpec):
        return RowRule(kind="adagrad", lr=spec.lr, eps=spec.eps)
    return RowRule(kind="rowwise_adagrad", lr=spec.lr, eps=spec.eps)


def _check_tables(owners: Sequence[RowParameters]) -> None:
    counts = Counter(name for owner in owners for arena in owner.arenas for name in arena.table_names)
    if not any(owner.arenas for owner in owners):
        raise ConfigError("row optimizer: got a module without embedding tables, expected an EmbeddingCollection in it")
    name, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise ConfigError(f"row optimizer: {count} tables are named {name!r}, expected distinct names")
