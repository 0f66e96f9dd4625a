"""First values of rows, as `terarec.kernels.ref.rows` draws them."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.random_bits import pair_bits

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
