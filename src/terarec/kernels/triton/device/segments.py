# SPDX-License-Identifier: Apache-2.0
"""Sorted rows -> segments, one for each distinct row; and partial sums of the long ones.

A segment of at most CHUNK keys is summed by the program that updates its row. A longer one is cut into parts of CHUNK
keys, counted from its first: other rows do not change the order of its sum. Of the parts that begin within a block of
CHUNK sorted positions at most one is the first of its segment, for which slot 2 * block + 1 is, and at most one a later
one, for which slot 2 * block is. Level 2 does the same with CHUNK parts and blocks of CHUNK blocks, so that many
programs sum a row of a million keys. Within a part keys are added one by one, the same way for rows of any width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.lookup import (
    MAX,
    NOTHING,
    bag_factor,
    bag_tile,
    feature_layout,
    load_keys,
    report_bad_keys,
    times,
)


@triton.jit
def _weight_sums(key_weights, start, length):
    """Return sums of the key weights of each bag, and of their squares."""
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
    # Before the bags are read: programs of other features end at once.
    base, rows, pooling = feature_layout(layout, COLUMNS)
    if pooling == MAX:
        sample, start, length = bag_tile(offsets, status, num_keys, batch, BAGS)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        # A bag of -inf alone leaves the winner 0: of equal maxima the first key gets the gradient.
        best = tl.full((BAGS, BLOCK), float("-inf"), tl.float32)
        winner = tl.zeros((BAGS, BLOCK), tl.int64)
        for j in range(times(tl.max(length, 0))):
            is_key = j < length
            key = tl.load(keys + start + j, mask=is_key, other=0)
            is_row = is_key & (key >= 0) & (key < rows)
            place = (base + key)[:, None] * WIDTH + column[None, :]
            mask = is_row[:, None] & (column < WIDTH)[None, :]
            vector = tl.load(weights + place, mask=mask, other=float("-inf")).to(tl.float32)
            # The first NaN wins, and stays: x != x is true of it alone.
            is_better = (vector > best) | ((vector != vector) & (best == best))
            best = tl.where(is_better, vector, best)
            winner = tl.where(is_better, j, winner)
        source = first_source + sample * tl.num_programs(1) + tl.program_id(1)
        mask = (sample < batch)[:, None] & (column < WIDTH)[None, :]
        tl.store(winners + source[:, None] * WIDTH + column[None, :], winner, mask=mask)


CHUNK = tl.constexpr(64)


@triton.jit(do_not_specialize=["num_keys"])
def heads_kernel(sorted_rows, heads, num_keys, BLOCK: tl.constexpr):
    """Write heads int32[N]: 1 where a segment starts."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < num_keys
    row = tl.load(sorted_rows + i, mask=is_key)
    before = tl.load(sorted_rows + i - 1, mask=is_key & (i > 0), other=-1)
    tl.store(heads + i, (row != before).to(tl.int32), mask=is_key)


@triton.jit(do_not_specialize=["num_keys"])
def starts_kernel(sorted_rows, segments, starts, num_keys, BLOCK: tl.constexpr):
    """Write starts int64[U + 1] from segments [N], which count the heads up to and with each position."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < num_keys
    row = tl.load(sorted_rows + i, mask=is_key)
    before = tl.load(sorted_rows + i - 1, mask=is_key & (i > 0), other=-1)
    segment = tl.load(segments + i, mask=is_key, other=0).to(tl.int64)
    tl.store(starts + segment - 1, i, mask=is_key & (row != before))
    # The end of the last segment, so that lengths are differences for all of them.
    tl.store(starts + segment, i + 1, mask=i == num_keys - 1)


@triton.jit
def key_gradients(
    grads, sources, scales, places, winners, at, is_key, column,
    WIDTH: tl.constexpr, IS_PLAIN: tl.constexpr, HAS_MAX: tl.constexpr,
):  # fmt: skip
    """Return gradients float32 [R, BLOCK] of the keys at sorted positions ``at [R]``; zeros where there is none."""
    source = tl.load(sources + at, mask=is_key, other=-1)
    mask = (source >= 0)[:, None] & (column < WIDTH)[None, :]
    grad = tl.load(grads + source[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    # A plain layout has no scales in memory: the argument is empty.
    if IS_PLAIN == 0:
        grad *= tl.load(scales + at, mask=is_key, other=0.0)[:, None]
    if HAS_MAX:
        place = tl.load(places + at, mask=is_key, other=-1)[:, None]
        winner = tl.load(winners + source[:, None] * WIDTH + column[None, :], mask=mask & (place >= 0), other=-1)
        grad = tl.where((place >= 0) & (winner != place), 0.0, grad)
    return grad


@triton.jit
def _sum_keys(
    grads, sources, scales, places, winners, begin, keys,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_PLAIN: tl.constexpr, HAS_MAX: tl.constexpr,
):  # fmt: skip
    """Return sums float32 [ROWS, BLOCK] of the gradients of ``keys [ROWS]`` keys from the positions `begin` on."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for j in range(times(tl.max(keys, 0))):
        total += key_gradients(
            grads, sources, scales, places, winners, begin + j, j < keys, column, WIDTH, IS_PLAIN, HAS_MAX
        )
    return total


@triton.jit
def _sum_parts(
    parts, start, begin, keys, UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Return sums of parts of UNIT keys, those of ``keys [ROWS]`` keys from `begin` on of segments from `start` on."""
    column = tl.arange(0, BLOCK)
    count = (keys + UNIT - 1) // UNIT
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for j in range(times(tl.max(count, 0))):
        block = begin // UNIT + j
        slot = 2 * block + (start >= block * UNIT).to(tl.int64)
        mask = (j < count)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(parts + slot[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    return total


@triton.jit
def _parts_of_slots(segments, starts, slot, num_keys, UNIT: tl.constexpr):
    """Return first position of the segment of each slot's part, its own, and its number of keys; 0: no part."""
    block = slot // 2
    is_slot = block * UNIT < num_keys
    # A long segment that starts in the block covers its last position; one that came in covers the first.
    last = tl.minimum(block * UNIT + UNIT, num_keys) - 1
    segment = tl.load(segments + tl.where(slot % 2 == 1, last, block * UNIT), mask=is_slot, other=1).to(tl.int64)
    start = tl.load(starts + segment - 1, mask=is_slot, other=0)
    end = tl.load(starts + segment, mask=is_slot, other=0)
    begin = start + (block - start // UNIT) * UNIT
    is_part = (end - start > UNIT) & (slot % 2 == (start >= block * UNIT).to(tl.int64))
    # None, too, if the last part of the segment that came in begins before the block.
    return start, begin, tl.where(is_part, tl.maximum(tl.minimum(end - begin, UNIT), 0), 0)


@triton.jit(do_not_specialize=["num_keys"])
def key_parts_kernel(
    grads,  # float32[R, WIDTH]
    sources,  # int64[N], as the further ones in sorted order
    scales,  # float32[N]
    places,  # int32[N]
    winners,  # int32[R, WIDTH]
    segments,  # [N]
    starts,  # int64[U + 1]
    parts,  # float32[2 * blocks, WIDTH]
    num_keys,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    HAS_MAX: tl.constexpr,
):
    """Sum the parts of long segments that are in a tile of slots."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    _, begin, keys = _parts_of_slots(segments, starts, slot, num_keys, CHUNK)
    total = _sum_keys(
        grads, sources, scales, places, winners, begin, keys, WIDTH, BLOCK, SLOTS, IS_PLAIN, HAS_MAX
    )  # fmt: skip
    column = tl.arange(0, BLOCK)
    mask = (keys > 0)[:, None] & (column < WIDTH)[None, :]
    tl.store(parts + slot[:, None] * WIDTH + column[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["num_keys"])
def part_parts_kernel(
    parts,  # float32[2 * blocks, WIDTH] of level 1
    segments,
    starts,
    out,  # float32[2 * blocks of blocks, WIDTH] of level 2
    num_keys,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Do the same as `key_parts_kernel` for segments of more than CHUNK * CHUNK keys, from their level 1 parts."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    start, begin, keys = _parts_of_slots(segments, starts, slot, num_keys, CHUNK * CHUNK)
    total = _sum_parts(parts, start, begin, keys, CHUNK, WIDTH, BLOCK, SLOTS)
    column = tl.arange(0, BLOCK)
    mask = (keys > 0)[:, None] & (column < WIDTH)[None, :]
    tl.store(out + slot[:, None] * WIDTH + column[None, :], total, mask=mask)


@triton.jit
def segment_gradients(
    grads, sources, scales, places, winners, starts, key_parts, part_parts, segment, is_segment,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, IS_PLAIN: tl.constexpr, HAS_MAX: tl.constexpr,
):  # fmt: skip
    """Return sums float32 [SEGMENTS, BLOCK] of the gradients of a tile of segments, short and long."""
    start = tl.load(starts + segment, mask=is_segment, other=0)
    end = tl.load(starts + segment + 1, mask=is_segment, other=0)
    keys = end - start
    # A tile without long segments skips the loops over parts.
    short = tl.where(keys <= CHUNK, keys, 0)
    total = _sum_keys(
        grads, sources, scales, places, winners, start, short, WIDTH, BLOCK, SEGMENTS, IS_PLAIN, HAS_MAX
    )  # fmt: skip
    long = tl.where(keys > CHUNK * CHUNK, keys, 0)
    total += _sum_parts(key_parts, start, start, keys - short - long, CHUNK, WIDTH, BLOCK, SEGMENTS)
    total += _sum_parts(part_parts, start, start, long, CHUNK * CHUNK, WIDTH, BLOCK, SEGMENTS)
    return total
