# SPDX-License-Identifier: Apache-2.0
"""Arenas on huge pages, the parallel first fill of rows, and the eviction scan."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from terarec.errors import NoSpaceError
from terarec.kernels.cpu import _rowfile
from terarec.kernels.cpu.host import _embedding
from terarec.kernels.ref.rows import rows_at_most as rows_at_most  # torch's own passes over memory are the fastest
from terarec.kernels.rows import ReservedRows


def allocate_rows(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return zeros float32[shape] on huge pages where the system has them, each page touched; freed with the array.

    Raises:
        StorageError: The system has too little memory; the message has the bytes requested.
    """
    rows: NDArray[np.float32] | None = _embedding.allocate_rows(list(shape), torch.get_num_threads())
    if rows is None:
        num_bytes = 4 * math.prod(shape)
        raise NoSpaceError(
            f"rows float32{list(shape)}", f"{num_bytes:,} bytes requested, the system has too little memory"
        )
    return rows


def fill_rows(rows: NDArray[np.float32], kind: str, seed: int, scale: float, first_row: int = 0) -> None:
    """Fill contiguous ``float32[R, D]`` in place, as `terarec.kernels.ref.rows.fill_rows` does."""
    num_rows, width = rows.shape
    threads = torch.get_num_threads()
    _embedding.fill_rows(rows.ctypes.data, num_rows, width, first_row, seed, scale, kind == "normal", threads)


def fill_keyed_rows(
    rows: NDArray[np.float32],
    targets: NDArray[np.int64],
    keys: NDArray[np.int64],
    kind: str,
    seed: int,
    scale: float,
) -> None:
    """Fill rows in place, as `terarec.kernels.ref.rows.fill_keyed_rows` does.

    All arrays are contiguous; the caller has checked `targets`.
    """
    addresses = [rows.ctypes.data, targets.ctypes.data, keys.ctypes.data]
    threads = torch.get_num_threads()
    _embedding.fill_keyed_rows(addresses, keys.shape[0], rows.shape[1], seed, scale, kind == "normal", threads)


def reserve_rows(shape: tuple[int, ...], dtype: DTypeLike) -> ReservedRows:
    """Reserve address space for an array ``[most_rows, ...]`` that grows in place, on huge pages if available.

    Raises:
        StorageError: The system has too little address space.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    # No system reserves more, and sizes of 2^64 do not pass the binding.
    memory: NDArray[np.uint8] | None = _embedding.reserve(num_bytes) if num_bytes < 1 << 63 else None
    if memory is None:
        raise NoSpaceError(
            f"rows {list(shape)}", f"{num_bytes:,} bytes of address space requested, the system has too little"
        )
    # By address: `ReservedRows` holds the array that owns the memory.
    address = memory.ctypes.data
    return ReservedRows(
        memory,
        shape,
        dtype,
        commit=lambda begin, end: _embedding.commit(address, begin, end),
        discard=lambda begin, end: _rowfile.discard(address, begin, end),
    )
