"""What `EmbeddingBag` and `Embedding` share: the weight as a table of the engine, and the row optimizer's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from terarec.embedding.bags import Bags
from terarec.embedding.parameter_arena import ParameterArena, arena_of
from terarec.embedding.weight_lookup import GradientRule, look_up
from terarec.ops.layout import BagLayout, Pooling
from terarec.ops.row_update import BagGradient


class DropIn(nn.Module):
    """A module whose ``weight`` [V, D] the engine looks up. Implements `terarec.optim.RowParameters`.

    Handed to a `terarec.optim.RowOptimizer`, it leaves ``weight.grad`` at None and puts the gradients of its lookups
    aside for the optimizer's next step. A copy of it, deep or pickled, is an ordinary module again.
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

    def take_gradients(self) -> list[list[BagGradient]]:
        """Hand over, and forget, the gradients of the lookups since the last step: one list per arena."""
        return [arena.take_gradients() for arena in self.arenas]

    def _look_up(self, bags: Bags, pooling: Pooling, without_key: int | None = None) -> Tensor:
        """The pooled vectors of `bags`, rows beyond ``max_norm`` shrunk first as torch does it."""
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(self.weight.detach(), bags.keys, self.max_norm, self.norm_type)
        rule = GradientRule(self._arena, self.sparse, self.scale_grad_by_freq, without_key)
        return look_up(self.weight, bags, self._layout_for(pooling), rule)

    def _layout_for(self, pooling: Pooling) -> BagLayout:
        rows, width = self.weight.shape
        held = self._layout
        if held is None or held.table_rows != (rows,) or held.width != width or held.pooling != (pooling,):
            held = self._layout = cast(BagLayout, _layout_of(rows, width, pooling))
        return held

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DropIn:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._arena is not None:
            self._arena.follow_device()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_arena", "_layout")}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # compilers call it and do not trace it
def _layout_of(rows: int, width: int, pooling: Pooling) -> BagLayout:
    return BagLayout(
        table_names=("weight",),
        table_base=(0,),
        table_rows=(rows,),
        feature_names=("input",),
        feature_table=(0,),
        pooling=(pooling,),
        width=width,
    )
