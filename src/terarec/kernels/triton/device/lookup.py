"""Pooled lookup from rows of any type, and its copy without pooling."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels import contract
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

TAIL = tl.constexpr(contract.ROW_TAIL_BYTES)


@triton.jit
def _float_at(packed, place, mask):
    """The little-endian float32 at a byte offset, which need not be a multiple of 4."""
    bits = tl.zeros(place.shape, tl.uint32)
    for byte in tl.static_range(4):
        bits |= tl.load(packed + place + byte, mask=mask, other=0).to(tl.uint32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_rows(weights, row, is_row, column, WIDTH: tl.constexpr, IS_QUANTIZED: tl.constexpr):
    """Rows float32 [ROWS, BLOCK] of floats, or of codes with a scale and an offset; zeros where there is none."""
    mask = is_row[:, None] & (column < WIDTH)[None, :]
    if IS_QUANTIZED:
        place = row * (WIDTH + TAIL)
        code = tl.load(weights + place[:, None] + column[None, :], mask=mask, other=0).to(tl.float32)
        scale = _float_at(weights, place + WIDTH, is_row)
        offset = _float_at(weights, place + WIDTH + 4, is_row)
        vector = code * scale[:, None] + offset[:, None]
    else:
        vector = tl.load(weights + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return vector


@triton.jit(do_not_specialize=["num_keys", "batch"])
def lookup_kernel(
    weights,  # [V, WIDTH], or uint8[V, WIDTH + TAIL]
    keys,  # int64[N]
    key_weights,  # float32[N], if IS_WEIGHTED
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
    IS_WEIGHTED: tl.constexpr,
    HAS_MAX: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):
    """Look up a tile of BAGS x BLOCK: the rows of all its bags' keys number j are one gather, for each j."""
    sample, start, length = bag_tile(offsets, status, num_keys, batch, BAGS)
    base, rows, pooling = feature_layout(layout, COLUMNS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    pooled = tl.zeros((BAGS, BLOCK), tl.float32)
    if HAS_MAX:
        pooled += tl.where(pooling == MAX, float("-inf"), 0.0)
    total = tl.zeros((BAGS,), tl.float32)
    squares = tl.zeros((BAGS,), tl.float32)
    bad = tl.full((BAGS,), NOTHING, tl.int64)
    for j in range(times(tl.max(length, 0))):
        is_key = j < length
        position = start + j
        key, is_row, bad = load_keys(keys, position, is_key, rows, bad)
        vector = load_rows(weights, base + key, is_row, column, WIDTH, IS_QUANTIZED)
        if IS_WEIGHTED:
            weight = tl.load(key_weights + position, mask=is_key, other=0.0)
            vector *= weight[:, None]
            total += weight
            squares += weight * weight
        if HAS_MAX:
            larger = tl.maximum(pooled, vector, propagate_nan=tl.PropagateNan.ALL)
            pooled = tl.where(pooling == MAX, tl.where(is_row[:, None], larger, pooled), pooled + vector)
        elif IS_POOLED:
            pooled += vector
        else:
            place = position[:, None] * WIDTH + column[None, :]
            tl.store(out + place, vector, mask=is_key[:, None] & (column < WIDTH)[None, :])
    report_bad_keys(status, bad)
    if IS_POOLED:
        count = length.to(tl.float32)
        factor = bag_factor(pooling, total if IS_WEIGHTED else count, squares if IS_WEIGHTED else count)
        if HAS_MAX:
            pooled = tl.where((pooling == MAX) & (length == 0)[:, None], 0.0, pooled)
        place = sample[:, None] * (tl.num_programs(1) * WIDTH) + tl.program_id(1) * WIDTH + column[None, :]
        tl.store(out + place, pooled * factor[:, None], mask=(sample < batch)[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_keys", "batch"])
def dots_kernel(
    weights,  # [V, WIDTH]
    keys,  # int64[N]
    offsets,  # int64[S * B + 1]
    layout,  # int64[S, COLUMNS]
    grads,  # float32[B, S * WIDTH]
    out,  # float32[N]
    status,
    num_keys,
    batch,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The dot product of each key's row with the gradient of its bag; of a tile of whole rows."""
    sample, start, length = bag_tile(offsets, status, num_keys, batch, BAGS)
    base, rows, _ = feature_layout(layout, COLUMNS)
    column = tl.arange(0, BLOCK)
    place = sample[:, None] * (tl.num_programs(1) * WIDTH) + tl.program_id(1) * WIDTH + column[None, :]
    grad = tl.load(grads + place, mask=(sample < batch)[:, None] & (column < WIDTH)[None, :], other=0.0)
    bad = tl.full((BAGS,), NOTHING, tl.int64)
    for j in range(times(tl.max(length, 0))):
        is_key = j < length
        position = start + j
        key, is_row, bad = load_keys(keys, position, is_key, rows, bad)
        vector = load_rows(weights, base + key, is_row, column, WIDTH, False)
        tl.store(out + position, tl.sum(vector * grad, 1), mask=is_key)
    report_bad_keys(status, bad)
