"""Where each key's row is, and where its gradient is."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.bags import (
    MAX,
    NOTHING,
    bag_factor,
    bag_tile,
    feature_layout,
    load_keys,
    report_bad_keys,
)
from terarec.kernels.triton.device.loops import times


@triton.jit
def _weight_sums(key_weights, start, length):
    """Sums of the key weights of each bag, and of their squares."""
    total = tl.zeros(start.shape, tl.float32)
    squares = tl.zeros(start.shape, tl.float32)
    for j in range(times(tl.max(length, 0))):
        weight = tl.load(key_weights + start + j, mask=j < length, other=0.0)
        total += weight
        squares += weight * weight
    return total, squares


@triton.jit(do_not_specialize=["num_keys", "batch", "first_source", "no_row"])
def locate_kernel(
    keys,  # int64[N]
    key_weights,  # float32[N], if IS_WEIGHTED
    offsets,  # int64[S * B + 1]
    layout,  # int64[S, COLUMNS]
    table_lr,  # float32[T], if HAS_FACTORS: of the learning rate
    rows_out,  # int32|int64[N]: arena row of each key
    sources_out,  # int64[N]: row of the gradients [B * S, D], or [N, D] without pooling, that holds the key's
    scales_out,  # float32[N]: factor of that gradient; not written for a plain layout
    places_out,  # int32[N]: place of the key in a bag pooled by maximum, else -1; if HAS_MAX
    factors_out,  # float32[N]: factor of the learning rate; if HAS_FACTORS
    status,
    num_keys,
    batch,
    first_source,
    no_row,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_POOLED: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    HAS_MAX: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):
    """Locate the keys of a tile of bags; the row of a bad key, or of a frozen table, is `no_row`, which none is."""
    sample, start, length = bag_tile(offsets, status, num_keys, batch, BAGS)
    base, rows, pooling = feature_layout(layout, COLUMNS)
    source = first_source + sample * tl.num_programs(1) + tl.program_id(1)
    if IS_WEIGHTED:
        total, squares = _weight_sums(key_weights, start, length)
        scale = bag_factor(pooling, total, squares)
    else:
        scale = bag_factor(pooling, length.to(tl.float32), length.to(tl.float32))
    factor = tl.full((BAGS,), 1.0, tl.float32)
    if HAS_FACTORS:
        factor *= tl.load(table_lr + tl.load(layout + tl.program_id(1) * COLUMNS + 3))
    bad = tl.full((BAGS,), NOTHING, tl.int64)
    for j in range(times(tl.max(length, 0))):
        is_key = j < length
        position = start + j
        key, is_row, bad = load_keys(keys, position, is_key, rows, bad)
        row = tl.where(is_row & (factor != 0.0), base + key, no_row)
        tl.store(rows_out + position, row.to(rows_out.dtype.element_ty), mask=is_key)
        tl.store(sources_out + position, source if IS_POOLED else first_source + position, mask=is_key)
        if IS_PLAIN == 0:
            weight = tl.load(key_weights + position, mask=is_key, other=0.0) if IS_WEIGHTED else 1.0
            tl.store(scales_out + position, scale * weight, mask=is_key)
        if HAS_MAX:
            place = tl.where(pooling == MAX, j, -1) + tl.zeros((BAGS,), tl.int32)
            tl.store(places_out + position, place, mask=is_key)
        if HAS_FACTORS:
            tl.store(factors_out + position, factor, mask=is_key)
    report_bad_keys(status, bad)


@triton.jit(do_not_specialize=["num_keys", "batch", "first_source"])
def winners_kernel(
    weights,  # [V, WIDTH]
    keys,  # int64[N]
    offsets,  # int64[S * B + 1]
    layout,  # int64[S, COLUMNS]
    winners,  # int32[R, WIDTH]: place in its bag of the key that takes the gradient of each column
    status,
    num_keys,
    batch,
    first_source,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the first maximum, or the first NaN, of the bags pooled by maximum; other features are passed over."""
    base, rows, pooling = feature_layout(layout, COLUMNS)
    if pooling == MAX:
        sample, start, length = bag_tile(offsets, status, num_keys, batch, BAGS)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        best = tl.full((BAGS, BLOCK), float("-inf"), tl.float32)
        winner = tl.zeros((BAGS, BLOCK), tl.int64)
        for j in range(times(tl.max(length, 0))):
            is_key = j < length
            key = tl.load(keys + start + j, mask=is_key, other=0)
            is_row = is_key & (key >= 0) & (key < rows)
            place = (base + key)[:, None] * WIDTH + column[None, :]
            mask = is_row[:, None] & (column < WIDTH)[None, :]
            vector = tl.load(weights + place, mask=mask, other=float("-inf")).to(tl.float32)
            is_better = (vector > best) | ((vector != vector) & (best == best))
            best = tl.where(is_better, vector, best)
            winner = tl.where(is_better, j, winner)
        source = first_source + sample * tl.num_programs(1) + tl.program_id(1)
        mask = (sample < batch)[:, None] & (column < WIDTH)[None, :]
        tl.store(winners + source[:, None] * WIDTH + column[None, :], winner, mask=mask)
