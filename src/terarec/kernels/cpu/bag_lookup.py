# SPDX-License-Identifier: Apache-2.0
"""Launcher of the pooled lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.cpu.host import Report, _embedding, empty_floats, error_of

lookup_fits = _embedding.lookup_fits
"""See `terarec.kernels.ref.bag_lookup`: all tensors in one call, where Python takes as long for a property of one."""


def bag_lookup(
    weights: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """Return the vectors of every bag, pooled; or of every key, if the layout does not pool.

    Args:
        weights: float32, bfloat16 or float16 [V, D].
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major.
        layout: Layout array int64[S, 4].
        is_pooled: Whether the layout pools; known without reading it.
        key_weights: float32[N], factors of the vectors; not with `MAX` or `NONE`.

    Returns:
        float32[B, S * D], or float32[N, D] in the order of the keys.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    # The core calls `empty_floats` with the shape, which it reads from the tensors faster than Python does.
    result: Tensor | Report = _embedding.bag_lookup(
        weights, keys, offsets, layout, is_pooled, key_weights, empty_floats, torch.get_num_threads()
    )
    if isinstance(result, tuple):
        raise error_of(result, (keys.shape[0],), (layout,))
    return result


def quantized_bag_lookup(
    packed: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """Look up rows that `terarec.kernels.ref.bag_lookup.quantize_rows` packed, as `bag_lookup` does.

    Args:
        packed: uint8[V, D + 8].
        keys: int64[N].
        offsets: int64[S * B + 1].
        layout: Layout array int64[S, 4].
        is_pooled: Whether the layout pools.
        key_weights: float32[N] or None.

    Returns:
        float32[B, S * D], or float32[N, D] in the order of the keys.

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    return bag_lookup(packed, keys, offsets, layout, is_pooled, key_weights)  # the core knows them by their type


def row_dots(weights: Tensor, keys: Tensor, offsets: Tensor, grad: Tensor, layout: Tensor) -> Tensor:
    """Return the dot product of each key's row with the gradient of its bag.

    Args:
        weights: float32, bfloat16 or float16 [V, D].
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: float32[B, S * D], of the pooled result.
        layout: Layout array int64[S, 4].

    Returns:
        float32[N].

    Raises:
        BadKeyError: A key outside its table.
        ConfigError: Offsets that decrease or do not cover the keys.
    """
    dots = torch.empty(keys.shape[0])
    report = _embedding.row_dots(weights, keys, offsets, grad, layout, dots, torch.get_num_threads())
    if report[0]:
        raise error_of(report, (keys.shape[0],), (layout,))
    return dots
