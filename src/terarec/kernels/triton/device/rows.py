# SPDX-License-Identifier: Apache-2.0
"""SplitMix64 bits, bit for bit those of `terarec.kernels.ref.rows`; initial values of rows; the eviction scan."""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(bits):
    """Return SplitMix64's finalizer of uint64."""
    bits = (bits ^ (bits >> 30)) * FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * SECOND_FACTOR
    return bits ^ (bits >> 31)


@triton.jit
def pair_bits(stream, number, pair):
    """Return bits uint64 [ROWS, PAIRS] for pairs of columns of rows by number: high half even, low half odd."""
    of_row = mix(stream.to(tl.uint64, bitcast=True) + (number.to(tl.uint64, bitcast=True) + 1) * STEP)
    return mix(of_row[:, None] + ((pair.to(tl.uint64) + 1) * STEP)[None, :])


@triton.jit
def column_bits(stream, number, column):
    """Return 32 bits, uint32 [ROWS, BLOCK], for each column of rows by number."""
    bits = pair_bits(stream, number, column // 2)
    return tl.where((column % 2 == 0)[None, :], bits >> 32, bits & 0xFFFFFFFF).to(tl.uint32)


TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def _uniform(bits, scale):
    # 24 bits fill a float's mantissa: k / 2^23 - 1 is exact.
    return ((bits >> 8).to(tl.float32) * 1.1920928955078125e-07 - 1.0) * scale


@triton.jit(do_not_specialize=["num_keys", "stream", "scale_bits"])
def fill_kernel(
    weights,  # [V, WIDTH]
    rows,  # int64[N]
    keys,  # int64[N]
    num_keys,
    stream,  # int64: of the table
    scale_bits,  # int64: the scale, a double, bit for bit
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_NORMAL: tl.constexpr,
):
    """Fill ROWS rows; Box-Muller in double, the radius taking (0, 1], so that its logarithm is finite."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_key = i < num_keys
    key = tl.load(keys + i, mask=is_key, other=0)
    row = tl.load(rows + i, mask=is_key, other=0)
    pair = tl.arange(0, PAIRS)
    bits = pair_bits(stream.to(tl.int64), key, pair)
    high, low = (bits >> 32).to(tl.uint32), (bits & 0xFFFFFFFF).to(tl.uint32)
    # Triton passes small integers as int32, hence the widening before the bits are read as a double.
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True)
    if IS_NORMAL:
        radius = scale * tl.sqrt(-2.0 * tl.log((high.to(tl.float64) + 1.0) * 2.3283064365386963e-10))
        angle = TWO_PI * (low.to(tl.float64) * 2.3283064365386963e-10)
        even, odd = (radius * tl.cos(angle)).to(tl.float32), (radius * tl.sin(angle)).to(tl.float32)
    else:
        even, odd = _uniform(high, scale.to(tl.float32)), _uniform(low, scale.to(tl.float32))
    place = weights + row[:, None] * WIDTH + 2 * pair[None, :]
    narrow = weights.dtype.element_ty
    tl.store(place, even.to(narrow), mask=is_key[:, None] & (2 * pair < WIDTH)[None, :])
    tl.store(place + 1, odd.to(narrow), mask=is_key[:, None] & (2 * pair + 1 < WIDTH)[None, :])


@triton.jit
def _is_low(scores, limit, spared, i, num_rows):
    is_row = i < num_rows
    score = tl.load(scores + i, mask=is_row, other=0)
    is_spared = tl.load(spared + i, mask=is_row, other=1)
    return is_row & (score <= tl.load(limit)) & (is_spared == 0)


@triton.jit(do_not_specialize=["num_rows"])
def count_low_kernel(scores, limit, spared, counts, num_rows, BLOCK: tl.constexpr):
    """Write counts int64[blocks]: the rows of each block whose score is at most the one at `limit`, but the spared."""
    block = tl.program_id(0).to(tl.int64)
    is_low = _is_low(scores, limit, spared, block * BLOCK + tl.arange(0, BLOCK), num_rows)
    tl.store(counts + block, tl.sum(is_low.to(tl.int64), 0))


@triton.jit(do_not_specialize=["num_rows"])
def write_low_kernel(scores, limit, spared, ends, low, num_rows, BLOCK: tl.constexpr):
    """Write the rows that `count_low_kernel` counted to low int64[M]; ends int64[blocks] are the sums of its counts."""
    block = tl.program_id(0).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    is_low = _is_low(scores, limit, spared, i, num_rows)
    number = tl.cumsum(is_low.to(tl.int64), 0)
    # The sum of all blocks before this one; its own rows follow in their order.
    begin = tl.load(ends + block) - tl.sum(is_low.to(tl.int64), 0)
    tl.store(low + begin + number - 1, i, mask=is_low)
