"""`key_weight_gradient`: the way back from pooled vectors to the weights of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.contract import BadKeyError
from terarec.kernels.ref.bag_lookup import key_weight_gradient as by_formula
from terarec.kernels.registry import choose
from terarec.ops import checks
from terarec.ops.layout import BagLayout
from terarec.ops.tracing import is_traced


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
    """The gradient of `bag_lookup`'s result with respect to its `key_weights`.

    Args:
        weights: float32, bfloat16 or float16 [V, D], as they were at the lookup.
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: float32[B, S * D], the gradient of the result.
        layout: of the lookup.
        key_weights: float32[N].
        implementation: "auto", or one of `terarec.kernels.registry.IMPLEMENTATIONS` by name.

    Returns:
        float32[N]; zero in bags whose divisor is zero.

    Raises:
        KeyOutOfRangeError: a key outside its table.
        ConfigError: tensors that do not fit the layout, or a layout that takes no key weights.
        KernelError: an implementation asked for by name that cannot run here.
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
    dots = choose("row_dots", weights.device, implementation)(weights, keys, offsets, grad, layout)
    return by_formula(dots, keys, offsets, layout, key_weights)


key_weight_gradient_op = torch.library.custom_op("terarec::key_weight_gradient", mutates_args=())(_key_weight_gradient)


@key_weight_gradient_op.register_fake
def _fake(weights: Tensor, keys: Tensor, *_: object) -> Tensor:
    return weights.new_empty(keys.shape[0], dtype=torch.float32)
