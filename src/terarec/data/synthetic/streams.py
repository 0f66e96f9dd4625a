"""Random numbers of any part of a log: none depends on numbers that were drawn before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, stream: tuple[int, ...], start: int, stop: int) -> NDArray[np.float64]:
    """Return numbers `start` to `stop` of a stream; one number is one step of the bit generator, so it can jump."""
    bits = np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=stream))
    return np.random.Generator(bits.advance(start)).random(stop - start)


def numbers(seed: int, stream: tuple[int, ...]) -> np.random.Generator:
    """Return a generator for the parameters of a log."""
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(seed, spawn_key=stream)))


def traits(seed: int, stream: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a uniform number in [0, 1) for each of `indices` (users, items, pairs of them), in any order.

    A trait is computed at each request, so there may be any number of users. Steele, Lea and Flood's
    SplitMix64: the finalizer of its counter.
    """
    first = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(1, np.uint64)
    bits = _mixed(indices.astype(np.uint64) * _GOLDEN + first)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal_traits(seed: int, stream: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return nearly normal `traits` of mean 0 and deviation 1: sums of four uniform numbers, from four streams."""
    total = np.full(indices.shape, -2.0)
    for part in range(4):
        total += traits(seed, stream + part, indices)
    total *= 3.0**0.5
    return total


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))
