"""What `EmbeddingBag` and `Embedding` share: the weight as a table of the engine, and the row optimizer's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from terarec.embedding.bags import Bags
from terarec.embedding.parameter_arena import ParameterArena, arena_of
from terarec.embedding.row_gradient import PendingGradients
from terarec.embedding.single_layout import single_layout
from terarec.embedding.table_state import AnyTable
from terarec.embedding.weight_lookup import GradientRule, look_up
from terarec.ops.layout import BagLayout, Pooling
from terarec.ops.row_update import BagGradient


class DropIn(nn.Module):
    """A module whose ``weight`` [V, D] the engine looks up. Implements `terarec.optim.RowParameters`.

    Once a `terarec.optim.RowOptimizer` trains it, it keeps the gradients of its lookups for the optimizer's next step,
    and ``weight.grad`` is a `terarec.embedding.row_gradient.RowGradient`, which has no memory. A copy of it, deep or
    pickled, is an ordinary module again.
    """

    weight: Tensor
    sparse: bool
    scale_grad_by_freq: bool
    max_norm: float | None
    norm_type: float
    _arena: ParameterArena | None = None
    _layout: BagLayout | None = None

    @property
    def arenas(self) -> tuple[ParameterArena, ...]:
        """The weight, as a row optimizer sees it; none if it is not a parameter of its own or is frozen."""
        if not isinstance(self.weight, nn.Parameter) or not self.weight.requires_grad:
            return ()
        if self._arena is None or self._arena.parameter is not self.weight:
            self._arena = arena_of(self.weight)
        return (self._arena,)

    @property
    def pending(self) -> PendingGradients:
        """The gradients that wait for the row optimizer."""
        return arena_of(cast(nn.Parameter, self.weight)).pending

    @property
    def tables(self) -> Mapping[str, AnyTable]:
        """No tables: the weight's place in the model is its name."""
        return {}

    def take_gradients(self) -> tuple[list[list[BagGradient]], float]:
        """Return the gradients of the lookups since the last step, and forget them.

        Returns:
            One list per arena, and the factor that they are to be multiplied by.

        Raises:
            ConfigError: a weight that no row optimizer was given, or one that has another ``.grad``.
        """
        arenas = self.arenas
        if not arenas:
            return [], 1.0
        taken, factor = arenas[0].take_gradients()
        return [taken], factor

    def _is_left_to_torch(self, keys: object) -> bool:
        """Whether torch's own forward is due: for shapes, symbols and traces, and for derivatives taken otherwise."""
        if not isinstance(keys, Tensor) or self.weight.is_meta:
            return True
        if torch.compiler.is_compiling():
            return False
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by torch.func
        return is_transformed or forward_ad._current_level >= 0 or torch._C._is_tracing()

    def _look_up(self, bags: Bags, pooling: Pooling, without_key: int | None = None) -> Tensor:
        """The pooled vectors of `bags`, rows beyond ``max_norm`` shrunk first as torch does it."""
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(self.weight.detach(), bags.keys, self.max_norm, self.norm_type)
        arena = self._arena
        if arena is not None and arena.parameter is not self.weight:
            arena = None  # of a weight that another has replaced
        rule = GradientRule(arena, self.sparse, self.scale_grad_by_freq, without_key)
        return look_up(self.weight, bags, self._layout_for(pooling), rule)

    def _layout_for(self, pooling: Pooling) -> BagLayout:
        rows, width = self.weight.shape
        held = self._layout
        if held is None or held.table_rows != (rows,) or held.width != width or held.pooling != (pooling,):
            if torch.compiler.is_compiling():
                from terarec.embedding.traced import constant_layout  # loads the compiler

                held = self._layout = constant_layout(rows, width, pooling)
            else:
                held = self._layout = single_layout(rows, width, pooling)
        return held

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DropIn:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._arena is not None:
            self._arena.follow_device()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_arena", "_layout")}
