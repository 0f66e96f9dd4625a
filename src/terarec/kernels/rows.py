# SPDX-License-Identifier: Apache-2.0
"""Memory for the rows of tables, their initial values, and the scan for rows to evict."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from terarec.errors import ConfigError, NoSpaceError, StorageError
from terarec.kernels.registry import Op, active, choose
from terarec.spec import Initializer


class ReservedRows:
    """Address space for an array ``[most_rows, ...]`` of which the first rows have memory.

    Growing never copies: every array has the same address, and one that was taken before sees the same memory. The
    address space is released with the last of them.

    Attributes:
        shape: The array that address space is reserved for.
        dtype: NumPy type of an element.

    Args:
        memory: uint8[at least the bytes of `shape`], the reserved address space.
        shape: Maximum number of rows, then the shape of a row.
        dtype: NumPy type of an element.
        commit: Function commit(begin, end) that allocates zeroed memory for these bytes; False if there is none.
        discard: Function discard(begin, end) that releases the memory of these bytes.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        commit: Callable[[int, int], bool],
        discard: Callable[[int, int], None],
    ) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._memory = memory
        self._commit = commit
        self._discard = discard
        self._rows = 0

    def __len__(self) -> int:
        """Return rows that have memory."""
        return self._rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def grow(self, rows: int) -> None:
        """Allocate zeroed memory for the first `rows` rows; those that have it keep their values.

        Raises:
            StorageError: More rows than are reserved, or too little memory; nothing has changed then.
        """
        if rows > self.shape[0]:
            raise NoSpaceError("rows", f"got {rows}, expected at most the {self.shape[0]} that are reserved")
        if rows <= self._rows:
            return
        begin, end = self._rows * self.row_bytes, rows * self.row_bytes
        if not self._commit(begin, end):
            raise NoSpaceError(
                f"rows {self.dtype}{list(self.shape)}",
                f"{end - begin:,} bytes more requested, the system has too little memory",
            )
        self._rows = rows

    def discard(self, begin: int, end: int) -> None:
        """Release the memory of the rows ``begin <= row < end``; it is allocated again when they are written.

        Their values are lost.
        """
        self._discard(begin * self.row_bytes, min(end, self._rows) * self.row_bytes)

    def array(self, rows: int) -> NDArray[Any]:
        """Return the first `rows` rows, in the reserved memory, which lives as long as the array.

        Raises:
            StorageError: More rows than have memory.
        """
        if not 0 <= rows <= self._rows:
            raise StorageError("rows", f"got {rows}, expected 0 to the {self._rows} that have memory")
        # A view of the reserved memory keeps it alive: NumPy holds a reference to the base array.
        part = self._memory[: rows * self.row_bytes].view(self.dtype)
        return part.reshape(rows, *self.shape[1:])


_STAGED_ROWS = 1 << 14  # initial values of narrow or distant rows, made in host memory, this many rows at a time


def allocate_rows(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return zeros float32[shape] in host memory, on huge pages where the system has them; freed with the array.

    Raises:
        StorageError: The system has too little memory; the message has the bytes requested.
    """
    rows: NDArray[np.float32] = choose(Op.ALLOCATE_ROWS, "cpu")(shape)
    return rows


def reserve_rows(shape: tuple[int, ...], dtype: DTypeLike) -> ReservedRows:
    """Return address space in host memory for an array ``[most_rows, ...]`` whose rows get zeroed memory as it grows.

    Args:
        shape: The most rows there may ever be, then the shape of a row. What is reserved costs no memory.
        dtype: NumPy type of an element; for bfloat16, reserve uint16 and view the tensor.

    Raises:
        StorageError: The system has too little address space.
    """
    reserved: ReservedRows = choose(Op.RESERVE_ROWS, "cpu")(shape, dtype)
    return reserved


def initialise_rows(
    rows: NDArray[np.float32],
    *,
    table: str,
    seed: int,
    initializer: Initializer,
    scale: float,
    first_row: int = 0,
) -> None:
    """Write the initial values of a table's rows. They depend on (seed, table name, row) alone, not on threads.

    Args:
        rows: float32[R, D], contiguous; rows ``first_row, first_row + 1, ...`` of the table.
        table: Name of the table.
        seed: Any integer.
        initializer: The distribution.
        scale: Half-width of the uniform, standard deviation of the normal distribution.
        first_row: Number of the first row.

    Raises:
        ConfigError: An unknown initializer, or rows that are not contiguous float32[R, D].
    """
    if rows.dtype != np.float32 or rows.ndim != 2 or not rows.flags.c_contiguous:
        raise ConfigError("rows", f"got {rows.dtype}{list(rows.shape)}, expected contiguous float32[R, D]")
    _check_initializer(initializer)
    if initializer == "zeros":
        rows.fill(0.0)
        return
    choose(Op.FILL_ROWS, "cpu")(rows, initializer, _table_seed(table, seed), scale, first_row)


def initialise_keys(
    weights: Tensor,
    rows: Tensor,
    keys: Tensor,
    *,
    table: str,
    seed: int,
    initializer: Initializer,
    scale: float,
) -> None:
    """Fill row ``rows[i]`` with the values of `initialise_rows` for row number ``keys[i]`` of a table.

    So a table of any keys equals a static one bit for bit, and a key's initial values depend on (seed, table name, key)
    alone: neither on the order in which keys come nor on where their rows lie. A negative key counts as key + 2^64.

    Args:
        weights: [V, D], contiguous, of a floating type (others than float32 get the float32 values, rounded to the
            nearest), on any device.
        rows: int64[n], distinct.
        keys: int64[n].
        table: Name of the table.
        seed: Any integer.
        initializer: The distribution.
        scale: Half-width of the uniform, standard deviation of the normal distribution.

    Raises:
        ConfigError: An unknown initializer, other shapes or types, or a row outside 0 <= row < V; nothing is written.
    """
    _check_keyed(weights, rows, keys)
    _check_initializer(initializer)
    if initializer == "zeros":
        weights.index_fill_(0, rows, 0.0)
        return
    seed, device = _table_seed(table, seed), weights.device.type
    # Where no kernel runs on the device, values are made in host memory and copied: `ref` and `cpu` take arrays.
    if active(Op.FILL_KEYED_ROWS, device).implementation == "triton":
        choose(Op.FILL_KEYED_ROWS, device)(weights, rows, keys, initializer, seed, scale)
        return
    fill = choose(Op.FILL_KEYED_ROWS, "cpu")
    keys = keys.cpu().contiguous()
    # Written in place, without a staged copy.
    if weights.dtype == torch.float32 and weights.device.type == "cpu":
        fill(weights.numpy(), rows.contiguous().numpy(), keys.numpy(), initializer, seed, scale)
        return
    for begin in range(0, keys.shape[0], _STAGED_ROWS):
        part_rows, part = rows[begin : begin + _STAGED_ROWS], keys[begin : begin + _STAGED_ROWS]
        staged = torch.empty(part.shape[0], weights.shape[1])
        fill(staged.numpy(), np.arange(part.shape[0]), part.numpy(), initializer, seed, scale)
        weights.index_copy_(0, part_rows, staged.to(weights.device, weights.dtype))


def _check_keyed(weights: Tensor, rows: Tensor, keys: Tensor) -> None:
    if weights.ndim != 2 or not weights.is_contiguous() or not weights.is_floating_point():
        raise ConfigError("weights", f"got {weights.dtype}{list(weights.shape)}, expected contiguous floats [V, D]")
    for name, vector in (("rows", rows), ("keys", keys)):
        if vector.dtype != torch.int64 or vector.shape != (rows.numel(),) or vector.device != weights.device:
            raise ConfigError(
                name,
                f"got {vector.dtype}{list(vector.shape)} on {vector.device}, "
                f"expected torch.int64[{rows.numel()}] on {weights.device}",
            )
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < weights.shape[0]):
        raise ConfigError("rows", f"got {int(rows.min())} to {int(rows.max())}, expected 0 <= row < {weights.shape[0]}")


def _check_initializer(initializer: str) -> None:
    known = get_args(Initializer)
    if initializer not in known:
        raise ConfigError("initializer", f"got {initializer!r}, expected one of {', '.join(map(repr, known))}")


def _table_seed(table: str, seed: int) -> int:
    # Python's own hash of a text differs in every process.
    return int.from_bytes(hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest(), "little")


def key_stream(table: str) -> int:
    """Return a number of 64 bits, as int64, by which equal keys of several tables differ."""
    return int.from_bytes(_table_seed(table, 0).to_bytes(8, "little"), "little", signed=True)


def rows_at_most(scores: Tensor, limit: float, spared: Tensor) -> Tensor:
    """Return the rows with a score of at most `limit`, but those that are spared, in rising order.

    Args:
        scores: Scores [n] of any type of number.
        limit: A number.
        spared: bool[n].

    Returns:
        int64[m].
    """
    rows: Tensor = choose(Op.ROWS_AT_MOST, scores.device)(scores, limit, spared)
    return rows
