"""`bag_lookup`: the vectors of all features' bags, pooled, in one call over one arena."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terarec.kernels.contract import BadKeyError
from terarec.kernels.ref.bag_lookup import spread_gradient
from terarec.kernels.registry import choose
from terarec.ops import checks
from terarec.ops.layout import BagLayout


def bag_lookup(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: BagLayout, *, implementation: str = "auto"
) -> Tensor:
    """Look up every bag's rows and pool them.

    The bag of feature s and sample b is ``keys[offsets[s * B + b] : offsets[s * B + b + 1]]``. The gradient with
    respect to `weights` is a sparse COO tensor with an entry a key.

    Args:
        weights: float32[V, D], the arena.
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major, rising from 0 to N.
        layout: the S features and their tables.
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        float32[B, S * D], feature s in columns ``[s * D, (s + 1) * D)``, an empty bag giving zeros;
        or float32[N, D] in the order of the keys, for a layout without pooling.

    Raises:
        KeyOutOfRangeError: a key outside its table; names feature, key, table and rows.
        ConfigError: tensors that do not fit the layout, or offsets that fall or do not cover the keys.
        KernelError: an implementation asked for by name that cannot run here.
    """
    checks.weights_fit(weights, layout)
    checks.bags_fit(keys, offsets, layout)
    try:
        if _needs_dispatcher(weights):
            result: Tensor = _bag_lookup_op(weights, keys, offsets, layout.array, layout.is_pooled, implementation)
            return result
        return _run(weights, keys, offsets, layout.array, layout.is_pooled, implementation)
    except BadKeyError as error:
        raise checks.named(error, layout) from None


def _needs_dispatcher(weights: Tensor) -> bool:
    """Whether autograd, a tracer or a mode has to see the call; torch's dispatcher costs about 20 us a call."""
    return (
        (weights.requires_grad and torch.is_grad_enabled())
        or type(weights) is not Tensor
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _run(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, implementation: str
) -> Tensor:
    kernel = choose("bag_lookup", weights.device.type, implementation)
    result: Tensor = kernel(weights, keys, offsets, layout, is_pooled)
    return result


# In the op's schema `layout` is the layout array and `is_pooled` what it says, known without reading it.
@torch.library.custom_op("terarec::bag_lookup", mutates_args=())
def _bag_lookup_op(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, implementation: str
) -> Tensor:
    return _run(weights, keys, offsets, layout, is_pooled, implementation)


@_bag_lookup_op.register_fake
def _fake(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, implementation: str
) -> Tensor:
    num_features, width = layout.shape[0], weights.shape[1]
    if is_pooled:
        return weights.new_empty((offsets.shape[0] - 1) // num_features, num_features * width)
    return weights.new_empty(keys.shape[0], width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, keys, offsets, layout, _, _ = inputs
    ctx.save_for_backward(keys, offsets, layout)
    ctx.weights_shape = weights.shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    keys, offsets, layout = ctx.saved_tensors
    rows, values = spread_gradient(keys, offsets, grad, layout)
    sparse = torch.sparse_coo_tensor(rows[None], values, ctx.weights_shape, check_invariants=False)
    return sparse, None, None, None, None, None


_bag_lookup_op.register_autograd(_backward, setup_context=_save)
