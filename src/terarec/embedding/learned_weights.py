"""A lookup whose key weights learn too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.key_weight_gradient import key_weight_gradient
from terarec.ops.layout import BagLayout


def look_up_with_weights(
    rows: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    *,
    key_weights: Tensor,
    deposit: Callable[[Tensor], None] | None,
) -> Tensor:
    """The pooled vectors, through which autograd reaches `key_weights` but not `rows`.

    Args:
        rows: [V, D] of an arena; they must not move before the backward pass.
        keys: int64[N].
        offsets: int64[S * B + 1].
        layout: of the features.
        key_weights: float32[N].
        deposit: is given the gradient of the result in the backward pass; None where rows do not learn.

    Returns:
        float32[B, S * D].
    """
    vectors: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
        key_weights, rows, keys, offsets, layout, deposit
    )
    return vectors


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key_weights: Tensor,
        rows: Tensor,
        keys: Tensor,
        offsets: Tensor,
        layout: BagLayout,
        deposit: Callable[[Tensor], None] | None,
    ) -> Tensor:
        ctx.save_for_backward(key_weights, rows, keys, offsets)
        ctx.layout, ctx.deposit = layout, deposit
        return bag_lookup(rows, keys, offsets, layout, key_weights=key_weights.detach())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key_weights, rows, keys, offsets = ctx.saved_tensors
        if ctx.deposit is not None:
            ctx.deposit(grad)
        of_weights = key_weight_gradient(rows, keys, offsets, grad, ctx.layout, key_weights=key_weights)
        return of_weights, None, None, None, None, None
