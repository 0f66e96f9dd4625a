# SPDX-License-Identifier: Apache-2.0
"""Launchers of the pooled lookup, from rows of floats or of codes, and of the gradient of key weights."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from terarec.kernels.contract import ROW_TAIL_BYTES
from terarec.kernels.triton.device.lookup import dots_kernel, lookup_kernel
from terarec.kernels.triton.launch import (
    UNFUSED,
    check_no_bags,
    layout_on_device,
    new_status,
    on_its_device,
    parts_of_rows,
    raise_if_bad,
    whole_rows,
)


def bag_lookup(
    weights: Tensor,
    keys: Tensor,
    offsets: Tensor,
    layout: Tensor,
    is_pooled: bool,
    key_weights: Tensor | None = None,
    *,
    is_checked: bool = True,
) -> Tensor:
    """Return the vectors of every bag, or key; see `terarec.kernels.ref.bag_lookup.bag_lookup`.

    The layout array is in host memory. With `is_checked`, it waits for the result and raises its error; if not, a bad
    key's vector is zeros, or left out of a maximum.
    """
    width = weights.shape[1]
    return _look_up(weights.contiguous(), width, (keys, offsets, key_weights), layout, is_pooled, is_checked)


def quantized_bag_lookup(
    packed: Tensor, keys: Tensor, offsets: Tensor, layout: Tensor, is_pooled: bool, key_weights: Tensor | None = None
) -> Tensor:
    """Look up ``packed uint8[V, D + 8]`` of `terarec.kernels.ref.bag_lookup.quantize_rows` as `bag_lookup` does."""
    width = packed.shape[1] - ROW_TAIL_BYTES
    return _look_up(packed.contiguous(), width, (keys, offsets, key_weights), layout, is_pooled, is_checked=True)


@on_its_device
def row_dots(weights: Tensor, keys: Tensor, offsets: Tensor, grad: Tensor, layout: Tensor) -> Tensor:
    """Return the dot products of rows and gradients; see `terarec.kernels.ref.bag_lookup.row_dots`.

    The layout array is in host memory.
    """
    keys, offsets = keys.contiguous(), offsets.contiguous()
    batch_size = (offsets.shape[0] - 1) // layout.shape[0]
    dots = torch.empty(keys.shape[0], device=keys.device)
    if batch_size == 0:
        check_no_bags(keys, offsets)
        return dots
    status, on = new_status(keys.device), layout_on_device(layout, keys.device)
    bags, block = whole_rows(weights.shape[1])
    dots_kernel[(triton.cdiv(batch_size, bags), layout.shape[0])](
        weights.contiguous(),
        keys,
        offsets,
        on.array,
        grad.contiguous(),
        dots,
        status,
        keys.shape[0],
        batch_size,
        WIDTH=weights.shape[1],
        BLOCK=block,
        BAGS=bags,
        COLUMNS=layout.shape[1],
        **UNFUSED,
    )
    if on.is_checked:
        raise_if_bad(status, keys, offsets, layout)
    return dots


@on_its_device
def _look_up(
    rows: Tensor,
    width: int,
    bags_of: tuple[Tensor, Tensor, Tensor | None],
    layout: Tensor,
    is_pooled: bool,
    is_checked: bool,
) -> Tensor:
    """Look up the bags of `bags_of`: keys, offsets and key weights."""
    keys, offsets, key_weights = bags_of
    keys, offsets = keys.contiguous(), offsets.contiguous()
    num_features, num_keys = layout.shape[0], keys.shape[0]
    batch_size = (offsets.shape[0] - 1) // num_features
    shape = (batch_size, num_features * width) if is_pooled else (num_keys, width)
    # Every element is written, zeros for empty bags.
    out = torch.empty(shape, dtype=torch.float32, device=rows.device)
    if batch_size == 0:
        check_no_bags(keys, offsets)
        return out
    tensors = layout_on_device(layout, rows.device)
    status = new_status(rows.device)
    bags, block = parts_of_rows(width)
    # One program for (tile of samples, feature, part of the columns): no two write to the same output.
    lookup_kernel[(triton.cdiv(batch_size, bags), num_features, triton.cdiv(width, block))](
        rows,
        keys,
        # A pointer has to be passed, but the kernel does not read it.
        keys if key_weights is None else key_weights.contiguous(),
        offsets,
        tensors.array,
        out,
        status,
        num_keys,
        batch_size,
        WIDTH=width,
        BLOCK=block,
        BAGS=bags,
        COLUMNS=layout.shape[1],
        IS_POOLED=is_pooled,
        IS_WEIGHTED=key_weights is not None,
        HAS_MAX=tensors.has_max,
        IS_QUANTIZED=rows.dtype == torch.uint8,
        **UNFUSED,
    )
    if is_checked and tensors.is_checked:
        raise_if_bad(status, keys, offsets, layout)
    return out
