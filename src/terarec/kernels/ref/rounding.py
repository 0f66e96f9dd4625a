"""Stochastic rounding of float32 rows to bfloat16 or float16, with bits that depend on counters alone.

`mix` being SplitMix64's finalizer and STEP its increment, as in `terarec.kernels.ref.rows`, update number `step` has
``stream = mix(mix(seed) + step * STEP)``, its arena row r ``stream_r = mix(stream + (r + 1) * STEP)``, and columns 2 j
and 2 j + 1 of the row take the high and the low half of ``mix(stream_r + (j + 1) * STEP)``.

Of the bits that the narrow type has no room for, as many random bits are added before they are cut off: a value
between two neighbours becomes the upper one with the probability of its distance from the lower, so the mean is the
value. Finite values stay finite: what would round past the largest number becomes that number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_HIDDEN_BIT = 0x800000


def round_rows(values: Tensor, dtype: torch.dtype, rows: Tensor, *, seed: int, step: int) -> Tensor:
    """`values` as `dtype`, rounded up or down at random without bias.

    Args:
        values: float32[n, D].
        dtype: `torch.bfloat16` or `torch.float16`.
        rows: arena rows int64[n], on which the random bits depend.
        seed: any integer.
        step: number of the update.

    Returns:
        dtype[n, D].
    """
    noise = _noise(rows, values.shape[1], seed, step)
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    magnitude, sign = bits & _MAGNITUDE, (bits >> 16) & 0x8000
    rounded = _to_bfloat16(magnitude, noise) if dtype == torch.bfloat16 else _to_float16(magnitude, noise)
    return (sign | rounded).to(torch.int32).to(torch.int16).view(dtype)


def _to_bfloat16(magnitude: Tensor, noise: Tensor) -> Tensor:
    rounded = ((magnitude + (noise & 0xFFFF)) >> 16).clamp(max=0x7F7F)
    not_finite = torch.where(magnitude == _INFINITY, 0x7F80, 0x7FC0)
    return torch.where(magnitude >= _INFINITY, not_finite, rounded)


def _to_float16(magnitude: Tensor, noise: Tensor) -> Tensor:
    exponent = magnitude >> 23
    normal = (magnitude - (112 << 23) + (noise & 0x1FFF)) >> 13
    # Multiples of 2^-24: a float is its mantissa * 2^(exponent - 150). What lies below 2^-31 has no bit left to round.
    dropped = (126 - exponent).clamp(13, 31)
    mantissa = torch.where(exponent > 94, (magnitude & (_HIDDEN_BIT - 1)) | _HIDDEN_BIT, 0)
    small = (mantissa + (noise & ((1 << dropped) - 1))) >> dropped
    rounded = torch.where(exponent > 112, normal, small).clamp(max=0x7BFF)
    not_finite = torch.where(magnitude == _INFINITY, 0x7C00, 0x7E00)
    return torch.where(magnitude >= _INFINITY, not_finite, rounded)


def _noise(rows: Tensor, width: int, seed: int, step: int) -> Tensor:
    """32 random bits for each column of each row, int64[n, width]."""
    stream = _mix(_mix(torch.tensor(_wrapped(seed))) + _wrapped(step * _STEP))
    of_row = _mix(stream.to(rows.device) + (rows + 1) * _wrapped(_STEP))
    pairs = torch.arange(1, (width + 1) // 2 + 1, device=rows.device) * _wrapped(_STEP)
    bits = _mix(of_row[:, None] + pairs)
    halves = torch.stack([_shifted(bits, 32), bits & 0xFFFFFFFF], dim=2)
    return halves.flatten(1)[:, :width]


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _wrapped(_FACTORS[0])
    bits = (bits ^ _shifted(bits, 27)) * _wrapped(_FACTORS[1])
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """An unsigned shift to the right of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _wrapped(value: int) -> int:
    """`value` modulo 2^64 as an int64."""
    return (value + 2**63) % 2**64 - 2**63
