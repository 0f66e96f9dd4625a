# SPDX-License-Identifier: Apache-2.0
"""Pooled lookup from rows of any type, and its copy without pooling, in tiles of bags of one feature."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.contract import MAX as MAX_CODE
from terarec.kernels.contract import MEAN as MEAN_CODE
from terarec.kernels.contract import ROW_TAIL_BYTES
from terarec.kernels.contract import SQRTN as SQRTN_CODE

INTERPRETS = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def times(count):
    """Return `count` as a bound of ``range``: itself, or the number in it where Triton 3.6 interprets with NumPy 2.4.

    The interpreter holds a scalar as an array of one element, which that NumPy does not take for a number.
    """
    if INTERPRETS:
        return count.handle.data.item()
    else:  # noqa: RET505 (Triton compiles one branch or the other)
        return count


NOTHING = tl.constexpr(2**63 - 1)  # what a word of the status holds while nothing is wrong
MEAN = tl.constexpr(MEAN_CODE)
SQRTN = tl.constexpr(SQRTN_CODE)
MAX = tl.constexpr(MAX_CODE)


@triton.jit
def bag_tile(offsets, status, num_keys, batch, BAGS: tl.constexpr):
    """Return sample, first key and number of keys of each of the program's bags; report bad offsets to the status."""
    sample = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)
    is_bag = sample < batch
    # int64 before the product: features * samples can pass 2^31.
    bag = tl.program_id(1).to(tl.int64) * batch + sample
    start = tl.load(offsets + bag, mask=is_bag, other=0)
    end = tl.load(offsets + bag + 1, mask=is_bag, other=0)
    # Only the last bag knows whether the offsets cover the keys.
    is_last = bag + 1 == tl.num_programs(1).to(tl.int64) * batch
    is_wrong = (end < start) | (is_last & (end != num_keys))
    wrong = tl.where(is_bag & is_wrong, bag + 1, NOTHING)
    wrong = tl.where(is_bag & (bag == 0) & (start != 0), 0, wrong)
    # One atomic a program, and none without a fault, which is the usual case.
    first_wrong = tl.min(wrong, 0)
    if first_wrong < NOTHING:
        tl.atomic_min(status, first_wrong)
    # A bag with bad offsets is read as empty: its keys would lie outside of memory.
    is_whole = (start >= 0) & (start <= end) & (end <= num_keys)
    return sample, start, tl.where(is_whole, end - start, 0)


@triton.jit
def feature_layout(layout, COLUMNS: tl.constexpr):
    """Return first arena row, rows and pooling of the program's feature."""
    line = layout + tl.program_id(1) * COLUMNS
    return tl.load(line), tl.load(line + 1), tl.load(line + 2)


@triton.jit
def load_keys(keys, position, is_key, rows, bad):
    """Return the keys at ``position [BAGS]``, whether each has a row, and `bad` with the positions without one."""
    key = tl.load(keys + position, mask=is_key, other=0)
    is_row = is_key & (key >= 0) & (key < rows)
    return key, is_row, tl.minimum(bad, tl.where(is_key & (is_row == 0), position, NOTHING))


@triton.jit
def report_bad_keys(status, bad):
    """Write the first of the positions ``bad [BAGS]`` to the status; `NOTHING` means no fault."""
    first_bad = tl.min(bad, 0)
    if first_bad < NOTHING:
        tl.atomic_min(status + 1, first_bad)


@triton.jit
def bag_factor(pooling, total, squares):
    """Return the factor of each bag's sum: float32 [BAGS]."""
    # Rounded as IEEE 754 says (`_rn`), like the compiled core: plain / and sqrt of Triton are approximate on GPUs.
    divisor = tl.where(pooling == MEAN, total, tl.where(pooling == SQRTN, tl.sqrt_rn(squares), 1.0))
    one = tl.full(divisor.shape, 1.0, tl.float32)
    return tl.where(divisor == 0.0, 0.0, tl.div_rn(one, tl.where(divisor == 0.0, 1.0, divisor)))


TAIL = tl.constexpr(ROW_TAIL_BYTES)


@triton.jit
def _float_at(packed, place, mask):
    """Return the little-endian float32 at a byte offset, which need not be a multiple of 4."""
    # Rows of D + 8 bytes are not aligned to 4, and GPUs fault on unaligned float loads.
    bits = tl.zeros(place.shape, tl.uint32)
    for byte in tl.static_range(4):
        bits |= tl.load(packed + place + byte, mask=mask, other=0).to(tl.uint32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_rows(weights, row, is_row, column, WIDTH: tl.constexpr, IS_QUANTIZED: tl.constexpr):
    """Return rows float32 [ROWS, BLOCK] of floats, or of codes with scale and offset; zeros where there is none."""
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
    # -inf for features pooled by maximum and 0 for the others: features of both kinds share one launch.
    if HAS_MAX:
        pooled += tl.where(pooling == MAX, float("-inf"), 0.0)
    total = tl.zeros((BAGS,), tl.float32)
    squares = tl.zeros((BAGS,), tl.float32)
    bad = tl.full((BAGS,), NOTHING, tl.int64)
    # To the longest bag of the tile; shorter ones are masked, and masked loads move no data.
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
        # NaN wins a maximum, as it does in torch.
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
            # An empty bag still holds the -inf that its maximum began with.
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
    """Compute the dot product of each key's row with the gradient of its bag, for a tile of whole rows."""
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
