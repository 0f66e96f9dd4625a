"""Launcher of the pooled lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.contract import ROW_TAIL_BYTES
from terarec.kernels.cpu.host import _embedding
from terarec.kernels.cpu.reports import error_of
from terarec.kernels.cpu.results import empty_floats
from terarec.kernels.cpu.tensors import ROW_TYPES, address


def bag_lookup(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """The vectors of every bag, pooled; or of every key, if the layout does not pool.

    Args:
        weights: float32, bfloat16 or float16 [V, D].
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major.
        layout: layout array int64[S, 4].
        is_pooled: whether the layout pools; known without reading it.
        key_weights: float32[N], factors of the vectors; not with `MAX` or `NONE`.

    Returns:
        float32[B, S * D], or float32[N, D] in the order of the keys.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    weights = weights.contiguous()
    return _look_up(weights, weights.shape[1], keys, offsets, layout, is_pooled, key_weights)


def quantized_bag_lookup(
    packed: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """As `bag_lookup`, from rows that `terarec.kernels.ref.quantized.quantize_rows` packed.

    Args:
        packed: uint8[V, D + 8].
        keys: int64[N].
        offsets: int64[S * B + 1].
        layout: layout array int64[S, 4].
        is_pooled: whether the layout pools.
        key_weights: float32[N] or None.

    Returns:
        float32[B, S * D], or float32[N, D] in the order of the keys.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    packed = packed.contiguous()
    return _look_up(packed, packed.shape[1] - ROW_TAIL_BYTES, keys, offsets, layout, is_pooled, key_weights)


def row_dots(weights: Tensor, keys: Tensor, offsets: Tensor, grad: Tensor, layout: Tensor) -> Tensor:
    """The dot product of each key's row with the gradient of its bag.

    Args:
        weights: float32, bfloat16 or float16 [V, D].
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: float32[B, S * D], of the pooled result.
        layout: layout array int64[S, 4].

    Returns:
        float32[N].

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
    """
    weights, keys, offsets, grad = weights.contiguous(), keys.contiguous(), offsets.contiguous(), grad.contiguous()
    num_features, num_keys = layout.shape[0], keys.shape[0]
    dots = torch.empty(num_keys)
    report = _embedding.row_dots(
        [
            weights.data_ptr(),
            ROW_TYPES[weights.dtype],
            weights.shape[1],
            keys.data_ptr(),
            num_keys,
            offsets.data_ptr(),
            layout.data_ptr(),
            num_features,
            (offsets.shape[0] - 1) // num_features,
            grad.data_ptr(),
            grad.shape[1],
            dots.data_ptr(),
            torch.get_num_threads(),
        ]
    )
    if report[0]:
        raise error_of(report, (num_keys,), (layout,))
    return dots


def _look_up(
    rows: Tensor,
    width: int,
    keys: Tensor,
    offsets: Tensor,
    layout: Tensor,
    is_pooled: bool,
    key_weights: Tensor | None,
) -> Tensor:
    keys, offsets = keys.contiguous(), offsets.contiguous()
    key_weights = None if key_weights is None else key_weights.contiguous()
    num_features, num_keys = layout.shape[0], keys.numel()
    batch_size = (offsets.numel() - 1) // num_features
    out = empty_floats(batch_size, num_features * width) if is_pooled else empty_floats(num_keys, width)
    report = _embedding.bag_lookup(
        [
            rows.data_ptr(),
            ROW_TYPES[rows.dtype],
            width,
            keys.data_ptr(),
            num_keys,
            address(key_weights),
            offsets.data_ptr(),
            layout.data_ptr(),
            num_features,
            batch_size,
            out.data_ptr(),
            torch.get_num_threads(),
        ]
    )
    if report[0]:
        raise error_of(report, (num_keys,), (layout,))
    return out
