"""`bag_lookup`: the vectors of all features' bags, pooled, in one call over one arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from terarec.kernels.contract import MAX, NONE, BadKeyError
from terarec.kernels.ref.bag_lookup import spread_gradient
from terarec.kernels.registry import choose
from terarec.ops import checks
from terarec.ops.key_weight_gradient import key_weight_gradient_op
from terarec.ops.layout import BagLayout, result_shape
from terarec.ops.tracing import is_traced


def bag_lookup(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    *,
    key_weights: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Look up every bag's rows and pool them.

    The bag of feature s and sample b is ``keys[offsets[s * B + b] : offsets[s * B + b + 1]]``. The gradient with
    respect to `weights` is a sparse COO tensor with an entry a key; that with respect to `key_weights` is dense.

    Args:
        weights: float32, bfloat16 or float16 [V, D], the arena.
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major, rising from 0 to N.
        layout: the S features and their tables.
        key_weights: float32[N], factors of the keys' vectors, for poolings "sum", "mean" and "sqrtn"; the latter two
            then divide by the sum of a bag's weights and by the root of the sum of their squares.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        float32[B, S * D], feature s in columns ``[s * D, (s + 1) * D)``, an empty bag giving zeros;
        or float32[N, D] in the order of the keys, for a layout without pooling.

    Raises:
        KeyOutOfRangeError: a key outside its table; names feature, key, table and rows.
        ConfigError: tensors that do not fit the layout, or offsets that fall or do not cover the keys.
        KernelError: an implementation asked for by name that cannot run here.
    """
    traced = is_traced(weights)
    checks.lookup_fits(weights, keys, offsets, layout, key_weights, traced=traced)
    result: Tensor
    try:
        if traced or (torch.is_grad_enabled() and _learns(weights, key_weights)):
            result = _bag_lookup_op(
                weights, keys, offsets, layout.array, layout.pooling_codes, key_weights, implementation
            )
        else:
            kernel = choose("bag_lookup", weights.device, implementation)
            result = kernel(weights, keys, offsets, layout.array, layout.is_pooled, key_weights)
    except BadKeyError as error:
        raise checks.named(error, layout) from None
    return result


def _learns(weights: Tensor, key_weights: Tensor | None) -> bool:
    return weights.requires_grad or (key_weights is not None and key_weights.requires_grad)


# In the op's schema `layout` is the layout array and `pooling` its third column, known without reading it.
def _bag_lookup(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: Tensor,
    pooling: Sequence[int],
    key_weights: Tensor | None,
    implementation: str,
) -> Tensor:
    kernel = choose("bag_lookup", weights.device, implementation)
    result: Tensor = kernel(weights, keys, offsets, layout, NONE not in pooling, key_weights)
    return result


_bag_lookup_op = torch.library.custom_op("terarec::bag_lookup", mutates_args=())(_bag_lookup)


@_bag_lookup_op.register_fake
def _fake(weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, pooling: Sequence[int], *_: object) -> Tensor:
    shape = result_shape(keys, offsets, layout.shape[0], weights.shape[1], NONE not in pooling)
    return weights.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, keys, offsets, layout, pooling, key_weights, implementation = inputs
    # The way back reads the rows only where it must, so that they may move in between where it does not.
    read = weights if MAX in pooling or ctx.needs_input_grad[5] else None
    ctx.save_for_backward(keys, offsets, layout, key_weights, read)
    ctx.weights_shape, ctx.weights_dtype, ctx.implementation = weights.shape, weights.dtype, implementation


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    keys, offsets, layout, key_weights, weights = ctx.saved_tensors
    sparse = of_key_weights = None
    if ctx.needs_input_grad[0]:
        rows, values = spread_gradient(keys, offsets, grad, layout, key_weights, weights=weights)
        values = values.to(ctx.weights_dtype)
        sparse = torch.sparse_coo_tensor(rows[None], values, ctx.weights_shape, check_invariants=False)
    if ctx.needs_input_grad[5]:
        of_key_weights = key_weight_gradient_op(weights, keys, offsets, grad, layout, key_weights, ctx.implementation)
    return sparse, None, None, None, None, of_key_weights, None


_bag_lookup_op.register_autograd(_backward, setup_context=_save)
