# SPDX-License-Identifier: Apache-2.0
"""Initial values of rows from a counter-based generator: a row's values depend on (seed, row) alone.

SplitMix64's finalizer `mix` makes ``stream = mix(mix(seed) + (row + 1) * STEP)`` for a row; pair j of the row comes
from ``bits = mix(stream + (j + 1) * STEP)``, column 2 j from its high and column 2 j + 1 from its low half.
"""

from __future__ import annotations

import math
import mmap
import sys

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from terarec.errors import NoSpaceError
from terarec.kernels.pages import reserve
from terarec.kernels.rows import ReservedRows

_STEP = np.uint64(0x9E3779B97F4A7C15)


def allocate_rows(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return zeros float32[shape].

    Raises:
        StorageError: The system has too little memory.
    """
    try:
        return np.zeros(shape, dtype=np.float32)
    except MemoryError:
        raise NoSpaceError(
            f"rows float32{list(shape)}", f"{4 * math.prod(shape):,} bytes requested, the system has too little memory"
        ) from None


def reserve_rows(shape: tuple[int, ...], dtype: DTypeLike) -> ReservedRows:
    """Reserve address space for an array ``[most_rows, ...]``; a page gets memory when it is first touched.

    Raises:
        StorageError: The system has too little address space.
    """
    pages = reserve(math.prod(shape) * np.dtype(dtype).itemsize, f"rows {list(shape)}")

    def discard(begin: int, end: int) -> None:
        # Whole pages alone, rounded inwards: the others hold rows that stay.
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform == "linux" and first < last:
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)

    # A private anonymous map is zeroed and takes memory at the first write, so there is nothing to commit.
    return ReservedRows(np.frombuffer(pages, np.uint8), shape, dtype, commit=lambda begin, end: True, discard=discard)


def fill_rows(rows: NDArray[np.float32], kind: str, seed: int, scale: float, first_row: int = 0) -> None:
    """Fill ``float32[R, D]`` in place.

    Args:
        rows: The rows ``first_row, first_row + 1, ...`` of a table.
        kind: "uniform" in [-scale, scale), or "normal" with standard deviation `scale`.
        seed: 64 bits; equal seeds give equal tables.
        scale: Bound or standard deviation; see `kind`.
        first_row: Number of the first row, so that a table can be filled in parts.
    """
    numbers = np.arange(first_row, first_row + rows.shape[0], dtype=np.int64)
    _fill(rows, numbers, kind, seed, scale)


def fill_keyed_rows(
    rows: NDArray[np.float32],
    targets: NDArray[np.int64],
    keys: NDArray[np.int64],
    kind: str,
    seed: int,
    scale: float,
) -> None:
    """Fill row ``targets[i]`` of ``float32[R, D]`` with the values of `fill_rows` for row number ``keys[i]``.

    Args:
        rows: Written in place.
        targets: int64[n], 0 <= target < R.
        keys: int64[n]; a negative one counts as key + 2^64.
        kind: Distribution, as in `fill_rows`.
        seed: Seed, as in `fill_rows`.
        scale: Bound or standard deviation, as in `fill_rows`.
    """
    values = np.empty((keys.shape[0], rows.shape[1]), dtype=np.float32)
    _fill(values, keys, kind, seed, scale)
    rows[targets] = values


def _fill(rows: NDArray[np.float32], numbers: NDArray[np.int64], kind: str, seed: int, scale: float) -> None:
    width = rows.shape[1]
    # The generator works modulo 2^64, which NumPy warns of for scalars.
    with np.errstate(over="ignore"):
        # From 1 on, as SplitMix64, which advances its state before each number.
        row = numbers.astype(np.uint64) + np.uint64(1)
        stream = _mix(np.add(_mix(np.uint64(seed)), row * _STEP, dtype=np.uint64))
        pair = np.arange(1, (width + 1) // 2 + 1, dtype=np.uint64)
        bits = _mix(np.add.outer(stream, pair * _STEP))
    high, low = (bits >> np.uint64(32)).astype(np.uint32), bits.astype(np.uint32)
    even, odd = _uniform(high, low, scale) if kind == "uniform" else _normal(high, low, scale)
    rows[:, 0::2] = even
    # An odd width has no column for the last half.
    rows[:, 1::2] = odd[:, : width // 2]


def _mix(bits: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)), dtype=np.uint64)


def _uniform(
    high: NDArray[np.uint32], low: NDArray[np.uint32], scale: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    # 24 bits fill a float's mantissa: k / 2^23 - 1 is exact.
    def unit(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
        return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)

    return unit(high) * np.float32(scale), unit(low) * np.float32(scale)


def _normal(
    high: NDArray[np.uint32], low: NDArray[np.uint32], scale: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    # Box-Muller in double; the radius takes (0, 1], so that its logarithm is finite.
    radius = scale * np.sqrt(-2.0 * np.log((high.astype(np.float64) + 1.0) * 2.0**-32))
    angle = 2.0 * np.pi * (low.astype(np.float64) * 2.0**-32)
    return (radius * np.cos(angle)).astype(np.float32), (radius * np.sin(angle)).astype(np.float32)


def rows_at_most(scores: Tensor, limit: float, spared: Tensor) -> Tensor:
    """Return the rows with a score of at most `limit`, but those that are spared, in rising order.

    Args:
        scores: Scores [n] of any type of number.
        limit: A number.
        spared: bool[n].

    Returns:
        int64[m].
    """
    return ((scores <= limit) & ~spared).nonzero().squeeze(1)
