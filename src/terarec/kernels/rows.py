"""Memory for the rows of tables, and their first values."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.kernels.registry import choose


def allocate_rows(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Zeros float32[shape] in host memory, on huge pages where the system has them; freed with the array.

    Raises:
        StorageError: the system refuses the memory; the message has the bytes asked for.
    """
    rows: NDArray[np.float32] = choose("allocate_rows", "cpu")(shape)
    return rows


def initialise_rows(
    rows: NDArray[np.float32],
    *,
    table: str,
    seed: int,
    initializer: Literal["uniform", "normal", "zeros"],
    scale: float,
    first_row: int = 0,
) -> None:
    """Write the first values of a table's rows. They depend on (seed, table name, row) alone, not on threads.

    Args:
        rows: float32[R, D], contiguous; rows ``first_row, first_row + 1, ...`` of the table.
        table: name of the table.
        seed: any integer.
        initializer: the distribution.
        scale: half-width of the uniform, standard deviation of the normal distribution.
        first_row: number of the first row.

    Raises:
        ConfigError: an unknown initializer, or rows that are not contiguous float32[R, D].
    """
    if rows.dtype != np.float32 or rows.ndim != 2 or not rows.flags.c_contiguous:
        raise ConfigError(f"rows: got {rows.dtype}{list(rows.shape)}, expected contiguous float32[R, D]")
    if initializer == "zeros":
        rows.fill(0.0)
        return
    if initializer not in ("uniform", "normal"):
        raise ConfigError(f"initializer: got {initializer!r}, expected one of 'uniform', 'normal', 'zeros'")
    name_seed = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    choose("fill_rows", "cpu")(rows, initializer, int.from_bytes(name_seed, "little"), scale, first_row)
