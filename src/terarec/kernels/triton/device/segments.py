"""Sorted rows -> segments, one for each distinct row; and partial sums of the long ones.

Positions in sorted order are cut into blocks of CHUNK. A segment of at most CHUNK keys is summed by the program that
updates its row. A longer one covers the first position of all its blocks but perhaps the first, and the last position
of all but perhaps the last; so no block has a part of more than two long segments, and slot 2 * block + 1 is for the
one that starts inside the block, slot 2 * block for the one that came in. Level 2 does the same with blocks of CHUNK
blocks, so a row of a million keys is summed by many programs, in an order that depends on the keys alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.loops import times

CHUNK = tl.constexpr(64)


@triton.jit(do_not_specialize=["num_keys"])
def heads_kernel(sorted_rows, heads, num_keys, BLOCK: tl.constexpr):
    """Heads int32[N]: 1 where a segment starts."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < num_keys
    row = tl.load(sorted_rows + i, mask=is_key)
    before = tl.load(sorted_rows + i - 1, mask=is_key & (i > 0), other=-1)
    tl.store(heads + i, (row != before).to(tl.int32), mask=is_key)


@triton.jit(do_not_specialize=["num_keys"])
def starts_kernel(sorted_rows, segments, starts, num_keys, BLOCK: tl.constexpr):
    """Starts int64[U + 1] from segments [N], which count the heads up to and with each position."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_key = i < num_keys
    row = tl.load(sorted_rows + i, mask=is_key)
    before = tl.load(sorted_rows + i - 1, mask=is_key & (i > 0), other=-1)
    segment = tl.load(segments + i, mask=is_key, other=0).to(tl.int64)
    tl.store(starts + segment - 1, i, mask=is_key & (row != before))
    tl.store(starts + segment, i + 1, mask=i == num_keys - 1)


@triton.jit
def key_gradients(
    grads, sources, scales, places, winners, at, is_key, column,
    WIDTH: tl.constexpr, IS_PLAIN: tl.constexpr, HAS_MAX: tl.constexpr,
):  # fmt: skip
    """Gradients float32 [R, BLOCK] of the keys at sorted positions ``at [R]``; zeros where there is none."""
    source = tl.load(sources + at, mask=is_key, other=-1)
    mask = (source >= 0)[:, None] & (column < WIDTH)[None, :]
    grad = tl.load(grads + source[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    if IS_PLAIN == 0:
        grad *= tl.load(scales + at, mask=is_key, other=0.0)[:, None]
    if HAS_MAX:
        place = tl.load(places + at, mask=is_key, other=-1)[:, None]
        winner = tl.load(winners + source[:, None] * WIDTH + column[None, :], mask=mask & (place >= 0), other=-1)
        grad = tl.where((place >= 0) & (winner != place), 0.0, grad)
    return grad


@triton.jit
def part_slots(block, start, UNIT: tl.constexpr):
    """Slot of the part that a long segment starting at `start` has in `block` of UNIT positions."""
    return 2 * block + (start > block * UNIT).to(tl.int64)


@triton.jit
def _part_of_keys(
    grads, sources, scales, places, winners, begin, end, column,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_PLAIN: tl.constexpr, HAS_MAX: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(times(begin), times(end), ROWS):
        at = first + tl.arange(0, ROWS)
        grad = key_gradients(grads, sources, scales, places, winners, at, at < end, column, WIDTH, IS_PLAIN, HAS_MAX)
        total += tl.sum(grad, 0)
    return total


@triton.jit
def _part_of_parts(
    parts, start, begin, end, column, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.float32)
    last = (end - 1) // UNIT
    for block in range(times(begin // UNIT), times(last + 1), ROWS):
        at = block + tl.arange(0, ROWS)
        slot = part_slots(at, start, UNIT)
        mask = (at <= last)[:, None] & (column < WIDTH)[None, :]
        total += tl.sum(tl.load(parts + slot[:, None] * WIDTH + column[None, :], mask=mask, other=0.0), 0)
    return total


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
    ROWS: tl.constexpr,
    IS_PLAIN: tl.constexpr,
    HAS_MAX: tl.constexpr,
):
    """Sum the block's part of the long segment that comes in, or starts with it, and of the one that goes out."""
    block = tl.program_id(0).to(tl.int64)
    first = block * CHUNK
    stop = tl.minimum(first + CHUNK, num_keys)
    column = tl.arange(0, BLOCK)
    one = tl.load(segments + first).to(tl.int64) - 1
    start, end = tl.load(starts + one), tl.load(starts + one + 1)
    if end - start > CHUNK:
        begin = tl.maximum(start, first)
        total = _part_of_keys(
            grads, sources, scales, places, winners, begin, tl.minimum(end, stop), column,
            WIDTH, BLOCK, ROWS, IS_PLAIN, HAS_MAX,
        )  # fmt: skip
        tl.store(parts + part_slots(block, start, CHUNK) * WIDTH + column, total, mask=column < WIDTH)
    other = tl.load(segments + stop - 1).to(tl.int64) - 1
    start, end = tl.load(starts + other), tl.load(starts + other + 1)
    if (other != one) & (end - start > CHUNK):
        total = _part_of_keys(
            grads, sources, scales, places, winners, start, stop, column,
            WIDTH, BLOCK, ROWS, IS_PLAIN, HAS_MAX,
        )  # fmt: skip
        tl.store(parts + part_slots(block, start, CHUNK) * WIDTH + column, total, mask=column < WIDTH)


@triton.jit(do_not_specialize=["num_keys"])
def part_parts_kernel(
    parts,  # float32[2 * blocks, WIDTH] of level 1
    segments,
    starts,
    out,  # float32[2 * blocks of blocks, WIDTH] of level 2
    num_keys,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """As `key_parts_kernel` for segments of more than CHUNK * CHUNK keys, from their level 1 parts."""
    UNIT: tl.constexpr = CHUNK * CHUNK
    block = tl.program_id(0).to(tl.int64)
    first = block * UNIT
    stop = tl.minimum(first + UNIT, num_keys)
    column = tl.arange(0, BLOCK)
    one = tl.load(segments + first).to(tl.int64) - 1
    start, end = tl.load(starts + one), tl.load(starts + one + 1)
    if end - start > UNIT:
        begin = tl.maximum(start, first)
        total = _part_of_parts(parts, start, begin, tl.minimum(end, stop), column, CHUNK, WIDTH, BLOCK, ROWS)
        tl.store(out + part_slots(block, start, UNIT) * WIDTH + column, total, mask=column < WIDTH)
    other = tl.load(segments + stop - 1).to(tl.int64) - 1
    start, end = tl.load(starts + other), tl.load(starts + other + 1)
    if (other != one) & (end - start > UNIT):
        total = _part_of_parts(parts, start, start, stop, column, CHUNK, WIDTH, BLOCK, ROWS)
        tl.store(out + part_slots(block, start, UNIT) * WIDTH + column, total, mask=column < WIDTH)


@triton.jit
def segment_gradients(
    grads, sources, scales, places, winners, starts, key_parts, part_parts, segment, is_segment,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, IS_PLAIN: tl.constexpr, HAS_MAX: tl.constexpr,
):  # fmt: skip
    """Sums float32 [SEGMENTS, BLOCK] of the gradients of a tile of segments, short and long."""
    column = tl.arange(0, BLOCK)
    start = tl.load(starts + segment, mask=is_segment, other=0)
    end = tl.load(starts + segment + 1, mask=is_segment, other=0)
    length = end - start
    total = tl.zeros((SEGMENTS, BLOCK), tl.float32)
    keys = length * (length <= CHUNK).to(tl.int64)
    for j in range(times(tl.max(keys, 0))):
        total += key_gradients(
            grads, sources, scales, places, winners, start + j, j < keys, column, WIDTH, IS_PLAIN, HAS_MAX
        )
    total += _parts_of_segments(
        key_parts, start, end, (length > CHUNK) & (length <= CHUNK * CHUNK), CHUNK, WIDTH, BLOCK, SEGMENTS
    )
    total += _parts_of_segments(part_parts, start, end, length > CHUNK * CHUNK, CHUNK * CHUNK, WIDTH, BLOCK, SEGMENTS)
    return total


@triton.jit
def _parts_of_segments(
    parts, start, end, is_long, UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    first = start // UNIT
    count = ((end - 1) // UNIT - first + 1) * is_long.to(tl.int64)
    total = tl.zeros((SEGMENTS, BLOCK), tl.float32)
    for j in range(times(tl.max(count, 0))):
        mask = (j < count)[:, None] & (column < WIDTH)[None, :]
        slot = part_slots(first + j, start, UNIT)
        total += tl.load(parts + slot[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    return total
