"""SplitMix64 as a counter-based generator, bit for bit that of `terarec.kernels.ref.rows`."""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(bits):
    """SplitMix64's finalizer of uint64."""
    bits = (bits ^ (bits >> 30)) * FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * SECOND_FACTOR
    return bits ^ (bits >> 31)


@triton.jit
def pair_bits(stream, number, pair):
    """Bits uint64 [ROWS, PAIRS] for pairs of columns of the rows with these numbers: high half even, low half odd."""
    of_row = mix(stream.to(tl.uint64, bitcast=True) + (number.to(tl.uint64, bitcast=True) + 1) * STEP)
    return mix(of_row[:, None] + ((pair.to(tl.uint64) + 1) * STEP)[None, :])


@triton.jit
def column_bits(stream, number, column):
    """32 bits, uint32 [ROWS, BLOCK], for each column of the rows with these numbers."""
    bits = pair_bits(stream, number, column // 2)
    return tl.where((column % 2 == 0)[None, :], bits >> 32, bits & 0xFFFFFFFF).to(tl.uint32)
