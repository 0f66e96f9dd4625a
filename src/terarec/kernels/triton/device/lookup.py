"""Pooled lookup, and its copy without pooling."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.bags import NOTHING, bag_scale, bag_tile, feature_layout, report_bad_keys


@triton.jit(do_not_specialize=["num_keys", "batch"])
def lookup_kernel(
    weights,  # [V, WIDTH]
    keys,  # int64[N]
    offsets,  # int64[S * B + 1]
    layout,  # int64[S, COLUMNS]
    out,  # float32[B, S * WIDTH], or float32[N, WIDTH]
    status,
    num_keys,
    batch,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_POOLED: tl.constexpr,
):
    """Look up a tile of BAGS x BLOCK: the rows of all its bags' keys number j are one gather, for each j."""
    sample, start, length = bag_tile(offsets, status, num_keys, batch, BAGS)
    base, rows, pooling = feature_layout(layout, COLUMNS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    pooled = tl.zeros((BAGS, BLOCK), tl.float32)
    bad = tl.full((BAGS,), NOTHING, tl.int64)
    longest = tl.max(length, 0)
    j = 0
    while j < longest:
        is_key = j < length
        position = start + j
        key = tl.load(keys + position, mask=is_key, other=0)
        is_row = is_key & (key >= 0) & (key < rows)
        bad = tl.minimum(bad, tl.where(is_key & (is_row == 0), position, NOTHING))
        row = base + tl.where(is_row, key, 0)
        mask = is_row[:, None] & is_column[None, :]
        vector = tl.load(weights + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if IS_POOLED:
            pooled += vector
        else:
            tl.store(out + position[:, None] * WIDTH + column[None, :], vector, mask=mask)
        j += 1
    report_bad_keys(status, bad)
    if IS_POOLED:
        pooled *= bag_scale(pooling, length)[:, None]
        place = sample[:, None] * (tl.num_programs(1) * WIDTH) + tl.program_id(1) * WIDTH + column[None, :]
        tl.store(out + place, pooled, mask=(sample < batch)[:, None] & is_column[None, :])
