# SPDX-License-Identifier: Apache-2.0
"""Pooled lookups in one call over one arena, in float or 8-bit rows, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import MAX, NONE, ROW_TAIL_BYTES, BadKeyError
from terarec.kernels.ref.bag_lookup import key_weight_gradient as by_formula
from terarec.kernels.ref.bag_lookup import quantize_rows as quantize_in_torch
from terarec.kernels.ref.bag_lookup import spread_gradient
from terarec.kernels.registry import Op, choose
from terarec.ops import checks
from terarec.ops.checks import is_traced
from terarec.ops.layout import BagLayout, found_rows, numbers_on, placed, result_shape


def key_weight_gradient(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    grad: Tensor,
    layout: BagLayout,
    *,
    key_weights: Tensor,
    implementation: str = "auto",
) -> Tensor:
    """Return the gradient of `bag_lookup`'s result with respect to its `key_weights`.

    Args:
        weights: float32, bfloat16 or float16 [V, D], as they were at the lookup.
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: float32[B, S * D], the gradient of the result.
        layout: Layout of the lookup.
        key_weights: float32[N].
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        float32[N]; zero in bags whose divisor is zero.

    Raises:
        KeyOutOfRangeError: A key outside its table.
        ConfigError: Tensors that do not fit the layout, or a layout that takes no key weights.
        KernelError: An implementation requested by name that cannot run here.
    """
    checks.lookup_fits(weights, keys, offsets, layout, key_weights, grad, traced=is_traced(weights))
    try:
        gradient: Tensor = key_weight_gradient_op(
            weights, keys, offsets, grad, layout.array, key_weights, implementation
        )
    except BadKeyError as error:
        raise checks.named(error, layout) from None
    return gradient


# `layout` is the layout array.
def _key_weight_gradient(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    grad: Tensor,
    layout: Tensor,
    key_weights: Tensor,
    implementation: str,
) -> Tensor:
    # The dots read the rows, which takes the time; the formula on them is elementwise, and torch has it on any device.
    dots = choose(Op.ROW_DOTS, weights.device, implementation)(weights, keys, offsets, grad, layout)
    # The layout is in host memory.
    return by_formula(dots, offsets, numbers_on(tuple(layout[:, 2].tolist()), keys.device), key_weights)


key_weight_gradient_op = torch.library.custom_op("terarec::key_weight_gradient", mutates_args=())(_key_weight_gradient)


@key_weight_gradient_op.register_fake
def _key_weight_gradient_fake(weights: Tensor, keys: Tensor, *_: object) -> Tensor:
    # Fakes read shapes alone, which may be symbolic: a graph serves batches of any number of keys.
    return weights.new_empty(keys.shape[0], dtype=torch.float32)


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
        layout: The S features and their tables.
        key_weights: float32[N], factors of the keys' vectors, for poolings "sum", "mean" and "sqrtn"; the latter two
            then divide by the sum of a bag's weights and by the root of the sum of their squares.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        float32[B, S * D], feature s in columns ``[s * D, (s + 1) * D)``, an empty bag giving zeros;
        or float32[N, D] in the order of the keys, for a layout without pooling.

    Raises:
        KeyOutOfRangeError: A key outside its table; names feature, key, table and rows.
        ConfigError: Tensors that do not fit the layout, or offsets that fall or do not cover the keys.
        KernelError: An implementation requested by name that cannot run here.
    """
    traced = is_traced(weights)
    checks.lookup_fits(weights, keys, offsets, layout, key_weights, traced=traced)
    result: Tensor
    try:
        # Through the op only if something has to see it; all other calls skip the dispatcher (`checks.is_traced`).
        if traced or (torch.is_grad_enabled() and _learns(weights, key_weights)):
            result = _bag_lookup_op(
                weights, keys, offsets, layout.array, layout.pooling_codes, key_weights, implementation
            )
        else:
            kernel = choose(Op.BAG_LOOKUP, weights.device, implementation)
            result = kernel(weights, keys, offsets, layout.array, layout.is_pooled, key_weights)
    except BadKeyError as error:
        raise checks.named(error, layout) from None
    return result


def pool_rows(rows: Tensor, offsets: Tensor, layout: BagLayout, key_weights: Tensor | None = None) -> Tensor:
    """Pool rows float32[N, D] that were found for N keys, as `bag_lookup` pools those of an arena.

    Args:
        rows: The row of each key.
        offsets: int64[S * B + 1], feature-major, rising from 0 to N.
        layout: The S features; without pooling, the rows are the result.
        key_weights: Weights as for `bag_lookup`.
    """
    if not layout.is_pooled:
        return rows
    # The rows are a table themselves: key i is row i of it.
    keys = torch.arange(rows.shape[0], device=rows.device)
    return bag_lookup(rows, keys, offsets, placed(layout, found_rows(rows)), key_weights=key_weights)


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
    kernel = choose(Op.BAG_LOOKUP, weights.device, implementation)
    result: Tensor = kernel(weights, keys, offsets, layout, NONE not in pooling, key_weights)
    return result


_bag_lookup_op = torch.library.custom_op("terarec::bag_lookup", mutates_args=())(_bag_lookup)


@_bag_lookup_op.register_fake
def _bag_lookup_fake(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, pooling: Sequence[int], *_: object
) -> Tensor:
    shape = result_shape(keys, offsets, layout.shape[0], weights.shape[1], NONE not in pooling)
    return weights.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, keys, offsets, layout, pooling, key_weights, implementation = inputs
    # The backward pass reads the rows only where it must, so that they may move in between where it does not.
    read = weights if MAX in pooling or ctx.needs_input_grad[5] else None
    ctx.save_for_backward(keys, offsets, layout, key_weights, read)
    ctx.weights_shape, ctx.weights_dtype, ctx.implementation = weights.shape, weights.dtype, implementation


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    keys, offsets, layout, key_weights, weights = ctx.saved_tensors
    sparse = of_key_weights = None
    if ctx.needs_input_grad[0]:
        rows, values = spread_gradient(keys, offsets, grad, layout, key_weights, weights=weights)
        # Autograd expects a gradient in the type of its input; sums were in float32 until here.
        values = values.to(ctx.weights_dtype)
        # The lookup has checked the rows; to check them again would wait for a GPU.
        sparse = torch.sparse_coo_tensor(rows[None], values, ctx.weights_shape, check_invariants=False)
    if ctx.needs_input_grad[5]:
        of_key_weights = key_weight_gradient_op(weights, keys, offsets, grad, layout, key_weights, ctx.implementation)
    return sparse, None, None, None, None, of_key_weights, None


_bag_lookup_op.register_autograd(_backward, setup_context=_save)


def quantize_rows(weights: Tensor) -> Tensor:
    """Pack rows as codes of 8 bits, each row with a scale and an offset of its own.

    No value changes by more than 1 / 510 of its row's range, except for the rounding of float32; rows of one value
    repeated stay as they are.

    Args:
        weights: float32, bfloat16 or float16 [V, D].

    Returns:
        uint8[V, D + 8]: a row is D codes, then its scale and its offset as little-endian float32; code c stands for
        offset + scale * c.

    Raises:
        ConfigError: Another type or shape, a value that is not finite, or a row whose range float32 cannot hold; the
            message has the row.
    """
    if weights.dim() != 2 or weights.dtype not in checks.ROW_DTYPES:
        raise ConfigError("weights", f"got {checks.name(weights)}, expected float32, bfloat16 or float16 [V, D]")
    return quantize_in_torch(weights)


def quantized_bag_lookup(
    packed: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: BagLayout,
    *,
    key_weights: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Look up rows that `quantize_rows` packed, as `terarec.ops.bag_lookup` does, without a gradient.

    Args:
        packed: uint8[V, D + 8].
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major, rising from 0 to N.
        layout: The S features and their tables.
        key_weights: float32[N], as `terarec.ops.bag_lookup` takes them.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        float32[B, S * D], or float32[N, D] for a layout without pooling.

    Raises:
        KeyOutOfRangeError: A key outside its table; names feature, key, table and rows.
        ConfigError: Tensors that do not fit the layout, or offsets that fall or do not cover the keys.
        KernelError: An implementation requested by name that cannot run here.
    """
    columns = layout.width + ROW_TAIL_BYTES
    fits = packed.dim() == 2 and packed.shape[1] == columns and packed.shape[0] >= layout.num_rows
    if not fits or packed.dtype != torch.uint8:
        raise ConfigError(
            "packed", f"got {checks.name(packed)}, expected uint8[V, {columns}] with V >= {layout.num_rows}"
        )
    checks.bags_fit(packed, keys, offsets, layout, key_weights)
    result: Tensor
    try:
        if is_traced(packed):
            result = _quantized_bag_lookup_op(
                packed, keys, offsets, layout.array, layout.pooling_codes, key_weights, implementation
            )
        else:
            kernel = choose(Op.QUANTIZED_BAG_LOOKUP, packed.device, implementation)
            result = kernel(packed, keys, offsets, layout.array, layout.is_pooled, key_weights)
    except BadKeyError as error:
        raise checks.named(error, layout) from None
    return result


# `layout` is the layout array and `pooling` its third column, known without reading it.
def _quantized_bag_lookup(
    packed: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: Tensor,
    pooling: Sequence[int],
    key_weights: Tensor | None,
    implementation: str,
) -> Tensor:
    kernel = choose(Op.QUANTIZED_BAG_LOOKUP, packed.device, implementation)
    result: Tensor = kernel(packed, keys, offsets, layout, NONE not in pooling, key_weights)
    return result


_quantized_bag_lookup_op = torch.library.custom_op("terarec::quantized_bag_lookup", mutates_args=())(
    _quantized_bag_lookup
)


@_quantized_bag_lookup_op.register_fake
def _quantized_bag_lookup_fake(
    packed: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, pooling: Sequence[int], *_: object
) -> Tensor:
    width = packed.shape[1] - ROW_TAIL_BYTES
    shape = result_shape(keys, offsets, layout.shape[0], width, NONE not in pooling)
    return packed.new_empty(shape, dtype=torch.float32)
