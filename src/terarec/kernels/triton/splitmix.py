"""SplitMix64 on the host: the streams that kernels start from."""

from __future__ import annotations

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


def table_stream(seed: int) -> int:
    """``mix(seed)``, from which a table's first values come, as int64."""
    return _signed(_mix(seed & _MASK))


def step_stream(seed: int, step: int) -> int:
    """``mix(mix(seed) + step * STEP)``, from which the roundings of an update come, as int64."""
    return _signed(_mix((_mix(seed & _MASK) + step * _STEP) & _MASK))


def _mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
