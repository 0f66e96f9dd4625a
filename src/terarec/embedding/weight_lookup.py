"""A lookup in a weight that autograd knows: one autograd function over the engine's kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terarec.embedding.bags import Bags, without_key
from terarec.embedding.parameter_arena import ParameterArena
from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.key_weight_gradient import key_weight_gradient
from terarec.ops.layout import BagLayout
from terarec.ops.row_update import BagGradient
from terarec.ops.weight_gradient import dense_gradient, group_keys, per_key, sparse_gradient

GRAPHS_HOLD_UPDATES = torch.__version__ >= "2.13"
"""Whether a compiled graph can hold the way back. With torch 2.11 what an op changes in place is lost in a compiled
backward of an autograd function: gradients were zero. 2.12 was not looked at."""


class GradientRule(NamedTuple):
    """What becomes of the gradient of a weight.

    Attributes:
        arena: takes the gradient, if a row optimizer is attached to it; else it goes to ``.grad``.
        sparse: whether ``.grad`` is a sparse tensor.
        by_frequency: whether a key's gradient is divided by how often the key occurs in the lookup.
        without_key: a key whose row gets no gradient.
    """

    arena: ParameterArena | None = None
    sparse: bool = False
    by_frequency: bool = False
    without_key: int | None = None

    @property
    def attached(self) -> ParameterArena | None:
        """The arena that takes the gradient, if one does."""
        return self.arena if self.arena is not None and self.arena.is_attached else None

    @property
    def is_traceable(self) -> bool:
        """Whether a compiled graph can hold the way back: it is dense, and no shape in it depends on the keys."""
        return GRAPHS_HOLD_UPDATES and not (
            self.sparse or self.attached or self.by_frequency or self.without_key is not None
        )


def look_up(weight: Tensor, bags: Bags, layout: BagLayout, rule: GradientRule) -> Tensor:
    """The pooled vectors [B, D] of `bags`, in the type of `weight`.

    Args:
        weight: [V, D].
        bags: of one feature.
        layout: of that feature and one table of V rows.
        rule: what becomes of the gradient.

    Raises:
        KeyOutOfRangeError: a key outside 0 <= key < V.
        ConfigError: offsets that fall or do not cover the keys, or a weight of a type that no kernel takes.
    """
    learns = weight.requires_grad or (bags.key_weights is not None and bags.key_weights.requires_grad)
    if not learns or not torch.is_grad_enabled():
        return _vectors(weight, bags, layout)
    if torch.compiler.is_compiling() and not (rule.is_traceable and _is_linear(layout)):
        from terarec.embedding.traced import beside_graph  # loads the compiler

        apart: Tensor = beside_graph(look_up, weight, bags, layout, rule)
        return apart
    result: Tensor = _Lookup.apply(weight, *bags, layout, rule)  # type: ignore[no-untyped-call]
    return result


def _vectors(weight: Tensor, bags: Bags, layout: BagLayout) -> Tensor:
    keys, offsets, key_weights = bags
    return bag_lookup(weight.detach(), keys, offsets, layout, key_weights=key_weights).to(weight.dtype)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        weight: Tensor, keys: Tensor, offsets: Tensor, key_weights: Tensor | None, layout: BagLayout, rule: GradientRule
    ) -> Tensor:
        held = None if key_weights is None else key_weights.detach()
        return _vectors(weight, Bags(keys, offsets, held), layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, keys, offsets, key_weights, ctx.layout, ctx.rule = inputs
        ctx.dtype = weight.dtype
        # The way back reads the rows only where it must, so that they may move in between where it does not.
        is_read = not _is_linear(ctx.layout) or ctx.needs_input_grad[3]
        ctx.save_for_backward(keys, offsets, key_weights, weight if is_read else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        keys, offsets, key_weights, weight = ctx.saved_tensors
        rule: GradientRule = ctx.rule
        rows = None if weight is None else weight.detach()
        gradient = BagGradient(keys, offsets, grad.float(), ctx.layout, key_weights)
        of_weight = of_key_weights = None
        if rows is not None and ctx.needs_input_grad[3]:
            of_key_weights = key_weight_gradient(
                rows, keys, offsets, gradient.grad, ctx.layout, key_weights=key_weights
            )
        if ctx.needs_input_grad[0]:
            gradient = _ruled(gradient, rule)
            if rule.attached:
                rule.attached.pending.put(0, per_key(gradient, rows))
            else:
                of_weight = (sparse_gradient if rule.sparse else dense_gradient)(gradient, ctx.dtype, rows)
        return of_weight, None, None, of_key_weights, None, None


def _ruled(gradient: BagGradient, rule: GradientRule) -> BagGradient:
    """`gradient` without a key that learns nothing, and with what `by_frequency` asks for."""
    keys, offsets, factors = gradient.keys, gradient.offsets, gradient.key_weights
    if rule.without_key is not None:
        keys, offsets, factors = without_key(Bags(keys, offsets, factors), rule.without_key)
    layout = gradient.layout
    if rule.by_frequency:
        _, places = group_keys(keys, layout.num_rows)
        shares = places.bincount()[places].float().reciprocal()
        if layout.pooling == ("mean",):  # as a sum with factors, since with factors a mean divides by their sum
            lengths = offsets.diff()
            shares = shares / lengths.repeat_interleave(lengths)
            layout = dataclasses.replace(layout, pooling=("sum",))
        factors = shares if factors is None else shares * factors
    return BagGradient(keys, offsets, gradient.grad, layout, factors)


def _is_linear(layout: BagLayout) -> bool:
    return layout.pooling != ("max",)
