"""Stochastic rounding with the bits of `terarec.kernels.ref.rounding`, which says what they are."""

from __future__ import annotations

import triton
import triton.language as tl

from terarec.kernels.triton.device.random_bits import column_bits

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
HIDDEN_BIT = tl.constexpr(0x800000)


@triton.jit
def _to_bfloat16(magnitude, noise):
    rounded = tl.minimum((magnitude + (noise & 0xFFFF)) >> 16, 0x7F7F)
    not_finite = tl.where(magnitude == INFINITY, 0x7F80, 0x7FC0)
    return tl.where(magnitude >= INFINITY, not_finite, rounded.to(tl.int32))


@triton.jit
def _to_float16(magnitude, noise):
    exponent = (magnitude >> 23).to(tl.int32)
    normal = (magnitude - (112 << 23) + (noise & 0x1FFF)) >> 13
    # Multiples of 2^-24: a float is its mantissa * 2^(exponent - 150). What lies below 2^-31 has no bit left to round.
    dropped = tl.minimum(tl.maximum(126 - exponent, 13), 31).to(tl.uint32)
    mantissa = tl.where(exponent > 94, (magnitude & (HIDDEN_BIT - 1)) | HIDDEN_BIT, 0)
    one = tl.full(magnitude.shape, 1, tl.uint32)
    small = (mantissa + (noise & ((one << dropped) - 1))) >> dropped
    rounded = tl.minimum(tl.where(exponent > 112, normal, small), 0x7BFF)
    not_finite = tl.where(magnitude == INFINITY, 0x7C00, 0x7E00)
    return tl.where(magnitude >= INFINITY, not_finite, rounded.to(tl.int32))


@triton.jit
def round_rows(values, row, column, stream, dtype: tl.constexpr):
    """``values float32 [ROWS, BLOCK]`` of arena rows as `dtype`, bfloat16 or float16."""
    noise = column_bits(stream, row, column)
    bits = values.to(tl.uint32, bitcast=True)
    magnitude, sign = bits & MAGNITUDE, (bits >> 16) & 0x8000
    rounded = _to_bfloat16(magnitude, noise) if dtype == tl.bfloat16 else _to_float16(magnitude, noise)
    return (sign.to(tl.int32) | rounded).to(tl.uint16).to(dtype, bitcast=True)
