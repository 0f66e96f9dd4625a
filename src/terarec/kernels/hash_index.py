# SPDX-License-Identifier: Apache-2.0
"""Hash indexes, int64 key -> row, on the device of the keys, with the checks of all implementations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError
from terarec.kernels.registry import Op, choose

MOST_ROWS = 1 << 36
"""Rows are below it: an index keeps 36 bits of a row."""


def check_vector(name: str, vector: Tensor, device: torch.device, length: int | None = None) -> Tensor:
    """Return `vector`, contiguous.

    Raises:
        ConfigError: Anything but int64[N] on the index's device, or another length than `length`.
    """
    # A device without an index, such as "cuda", matches every device of its type.
    is_here = vector.device.type == device.type and device.index in (None, vector.device.index)
    if vector.dtype != torch.int64 or vector.ndim != 1 or not is_here or length not in (None, vector.shape[0]):
        raise ConfigError(
            name,
            f"got {vector.dtype}{list(vector.shape)} on {vector.device}, "
            f"expected torch.int64[{'N' if length is None else length}] on {device}",
        )
    return vector.contiguous()


def check_rows(name: str, rows: Tensor) -> None:
    """Raise `ConfigError` if a row is outside 0 <= row < 2^36."""
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < MOST_ROWS):
        raise ConfigError(name, f"got {int(rows.min())} to {int(rows.max())}, expected 0 <= row < 2^36")


def check_next_row(next_row: int) -> None:
    """Raise `ConfigError` if the first row to give out is outside 0 <= row <= 2^36."""
    if not 0 <= next_row <= MOST_ROWS:
        raise ConfigError("next_row", f"got {next_row}, expected 0 <= row <= 2^36")


def check_span(start: int, most: int | None) -> None:
    """Raise `ConfigError` if ``start`` or ``most`` of `items` is out of range."""
    if start < 0 or (most is not None and most < 1):
        raise ConfigError("items", f"got start {start} and most {most}, expected start >= 0 and most >= 1 or None")


def index_full_error(next_row: int, new_keys: int) -> StorageError:
    """Return the error for more new keys than there are rows."""
    return StorageError("next_row", f"got {next_row} for {new_keys} new keys, expected rows below 2^36")


class HashIndex(Protocol):
    """Protocol of all implementations; `terarec.kernels.ref.hash_index.HashIndex` documents it in full."""

    device: torch.device

    def __len__(self) -> int:
        """Return the exact number of keys."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held: at most 24 a key besides some tens of KiB (`ref`, the oracle, takes more)."""

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows int64[N] of ``keys int64[N]``, -1 where absent."""

    def insert(self, keys: Tensor, free_rows: Tensor, next_row: int) -> tuple[Tensor, Tensor]:
        """Return the rows int64[N] of all keys, and the new keys int64[M] in the order of their first occurrence.

        New key j gets ``free_rows[j]`` while there are any, then ``next_row``, ``next_row + 1``, ...
        """

    def assign(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows of ``keys int64[N]`` to ``rows int64[N]``, replacing former ones."""

    def count(self, keys: Tensor) -> Tensor:
        """Add 1 to a key's value per occurrence: int64[N], the value after each."""

    def erase(self, keys: Tensor) -> Tensor:
        """Erase keys; return their rows int64[N], -1 where absent."""

    def items(self, start: int = 0, most: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Return keys, rows, and the position to continue from, -1 at the end."""


def new_hash_index(device: torch.device | str = "cpu", implementation: str = "auto") -> HashIndex:
    """Return an empty index.

    Args:
        device: Device of keys and results.
        implementation: "auto", or one by name, which runs or raises.

    Raises:
        KernelError: An implementation that does not run on `device`.
    """
    device = torch.device(device)
    index: HashIndex = choose(Op.HASH_INDEX, device, implementation)(device=device)
    return index


def copy_to(index: HashIndex, device: torch.device, implementation: str = "auto") -> HashIndex:
    """Return a new index on `device` with the keys and rows of `index`."""
    copied = new_hash_index(device, implementation)
    keys, rows, _ = index.items()
    copied.assign(keys.to(device), rows.to(device))
    return copied
