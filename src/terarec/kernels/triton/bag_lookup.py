"""Launcher of the pooled lookup."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from terarec.errors import KernelError
from terarec.kernels.triton import layouts, status, tiles
from terarec.kernels.triton.device.lookup import lookup_kernel


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
    """The vectors of every bag, pooled; or of every key, if the layout does not pool.

    Args:
        weights: [V, D], contiguous, of any floating type.
        keys: int64[N].
        offsets: int64[S * B + 1], feature-major.
        layout: layout array int64[S, 4], in host memory.
        is_pooled: whether the layout pools; known without reading it.
        key_weights: None; these kernels take none.
        is_checked: wait for the result and raise what is wrong; if not, a bad key's vector is zeros.

    Returns:
        float32[B, S * D], or float32[N, D] in the order of the keys.

    Raises:
        BadKeyError: a key outside its table.
        ConfigError: offsets that fall or do not cover the keys.
        KernelError: key weights, or a pooling other than `SUM`, `MEAN` and `NONE`.
    """
    if key_weights is not None:
        raise KernelError("bag_lookup: got key weights, expected none on Triton")
    weights, keys, offsets = weights.contiguous(), keys.contiguous(), offsets.contiguous()
    num_features, width, num_keys = layout.shape[0], weights.shape[1], keys.shape[0]
    batch_size = (offsets.shape[0] - 1) // num_features
    shape = (batch_size, num_features * width) if is_pooled else (num_keys, width)
    out = torch.empty(shape, dtype=torch.float32, device=weights.device)
    if batch_size == 0:
        status.check_no_bags(keys, offsets)
        return out
    if not (is_pooled or is_checked):
        out.zero_()
    held = layouts.on_device(layout, weights.device)
    found = status.new_status(weights.device)
    bags, block = tiles.parts_of_rows(width)
    lookup_kernel[(triton.cdiv(batch_size, bags), num_features, triton.cdiv(width, block))](
        weights,
        keys,
        offsets,
        held.array,
        out,
        found,
        num_keys,
        batch_size,
        WIDTH=width,
        BLOCK=block,
        BAGS=bags,
        COLUMNS=layout.shape[1],
        IS_POOLED=is_pooled,
    )
    if is_checked:
        status.raise_if_bad(found, keys, offsets, layout)
    return out
