# SPDX-License-Identifier: Apache-2.0
"""Initial values of rows, and the eviction scan, on the device."""

from __future__ import annotations

import struct

import torch
import triton
from torch import Tensor

from terarec.kernels.triton.device.rows import count_low_kernel, fill_kernel, write_low_kernel
from terarec.kernels.triton.launch import on_its_device, table_stream, whole_rows


@on_its_device
def fill_keyed_rows(weights: Tensor, rows: Tensor, keys: Tensor, kind: str, seed: int, scale: float) -> None:
    """Fill row ``rows[i]`` for row number ``keys[i]``; see `terarec.kernels.ref.rows.fill_keyed_rows`.

    Uniform values are equal bit for bit; normal ones differ by the last bit where a GPU's logarithm or cosine of a
    double does.
    """
    num_keys, width = keys.shape[0], weights.shape[1]
    if num_keys == 0:
        return
    tile_rows, pairs = whole_rows((width + 1) // 2)
    fill_kernel[(triton.cdiv(num_keys, tile_rows),)](
        weights,
        rows.contiguous(),
        keys.contiguous(),
        num_keys,
        table_stream(seed),
        # A float argument would reach the kernel as float32; normal values are computed in double.
        struct.unpack("<q", struct.pack("<d", scale))[0],
        WIDTH=width,
        PAIRS=pairs,
        ROWS=tile_rows,
        IS_NORMAL=kind == "normal",
    )


_BLOCK = 1024


@on_its_device
def rows_at_most(scores: Tensor, limit: float, spared: Tensor) -> Tensor:
    """Return rows; see `terarec.kernels.ref.rows.rows_at_most`. It waits for their number."""
    num_rows = scores.shape[0]
    if num_rows == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    blocks = triton.cdiv(num_rows, _BLOCK)
    # The limit in the type of the scores: in Triton a Python float would be float32, too coarse for int64 scores.
    what = (scores.contiguous(), torch.tensor(limit, dtype=scores.dtype).to(scores.device), spared.to(torch.uint8))
    counts = torch.empty(blocks, dtype=torch.int64, device=scores.device)
    count_low_kernel[(blocks,)](*what, counts, num_rows, BLOCK=_BLOCK)
    # Two passes, counts and then places by their sums, so that rows come in rising order without atomics.
    ends = counts.cumsum(0)
    low = torch.empty(int(ends[-1]), dtype=torch.int64, device=scores.device)
    write_low_kernel[(blocks,)](*what, ends, low, num_rows, BLOCK=_BLOCK)
    return low
