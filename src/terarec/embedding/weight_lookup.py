"""A lookup in a weight that autograd knows: one autograd function over the engine's kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from terarec.embedding.bags import Bags, without_key
from terarec.embedding.parameter_arena import ParameterArena
from terarec.errors import ConfigError
from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.layout import BagLayout
from terarec.ops.row_update import BagGradient
from terarec.ops.weight_gradient import dense_gradient, sparse_gradient


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
    if bags.key_weights is not None or rule.by_frequency:
        raise ConfigError("per_sample_weights, scale_grad_by_freq: got one of them, which no kernel takes yet")
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return _vectors(weight, bags, layout)
    is_put_aside = rule.arena is not None and rule.arena.is_attached
    if torch.compiler.is_compiling() and (rule.sparse or is_put_aside):
        apart: Tensor = _look_up_apart(weight, bags, layout, rule)
        return apart
    result: Tensor = _Lookup.apply(weight, bags.keys, bags.offsets, layout, rule)  # type: ignore[no-untyped-call]
    return result


def _vectors(weight: Tensor, bags: Bags, layout: BagLayout) -> Tensor:
    return bag_lookup(weight.detach(), bags.keys, bags.offsets, layout).to(weight.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _look_up_apart(weight: Tensor, bags: Bags, layout: BagLayout, rule: GradientRule) -> Tensor:
    """Outside a compiled graph: it can hold neither a sparse gradient nor one that is put aside."""
    return look_up(weight, bags, layout, rule)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, keys: Tensor, offsets: Tensor, layout: BagLayout, rule: GradientRule) -> Tensor:
        return _vectors(weight, Bags(keys, offsets), layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, keys, offsets, ctx.layout, ctx.rule = inputs
        ctx.dtype = weight.dtype
        ctx.save_for_backward(keys, offsets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bags = Bags(*ctx.saved_tensors)
        rule: GradientRule = ctx.rule
        if rule.without_key is not None:
            bags = without_key(bags, rule.without_key)
        gradient = BagGradient(bags.keys, bags.offsets, grad.float(), ctx.layout)
        if rule.arena is not None and rule.arena.is_attached:
            rule.arena.pending.append(gradient)
            return None, None, None, None, None
        of_weight = (sparse_gradient if rule.sparse else dense_gradient)(gradient, ctx.dtype)
        return of_weight, None, None, None, None
