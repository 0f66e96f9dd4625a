"""Arenas on huge pages, and the parallel first fill of rows."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from terarec.errors import StorageError
from terarec.kernels.cpu.host import _embedding


def allocate_rows(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Zeros float32[shape] on huge pages where the system has them, each page touched; freed with the array.

    Raises:
        StorageError: the system refuses the memory; the message has the bytes asked for.
    """
    rows: NDArray[np.float32] | None = _embedding.allocate_rows(list(shape), torch.get_num_threads())
    if rows is None:
        asked = 4 * math.prod(shape)
        raise StorageError(f"rows float32{list(shape)}: {asked:,} bytes asked for, the system refused them")
    return rows


def fill_rows(rows: NDArray[np.float32], kind: str, seed: int, scale: float, first_row: int = 0) -> None:
    """Fill ``float32[R, D]`` in place, as `terarec.kernels.ref.rows.fill_rows` does.

    Args:
        rows: contiguous rows ``first_row, first_row + 1, ...`` of a table.
        kind: "uniform" in [-scale, scale), or "normal" with standard deviation `scale`.
        seed: 64 bits.
        scale: see `kind`.
        first_row: number of the first row.
    """
    num_rows, width = rows.shape
    threads = torch.get_num_threads()
    _embedding.fill_rows(rows.ctypes.data, num_rows, width, first_row, seed, scale, kind == "normal", threads)
