"""Hash indexes: int64 key -> row, on the device that asks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from terarec.kernels.registry import choose


class HashIndex(Protocol):
    """What every implementation can do; `terarec.kernels.ref.hash_index.HashIndex` says it in full."""

    device: torch.device

    def __len__(self) -> int:
        """Keys held, exactly."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held: at most 24 a key besides some tens of KiB (`ref`, the oracle, takes more)."""

    def find(self, keys: Tensor) -> Tensor:
        """Rows int64[N] of ``keys int64[N]``, -1 where absent."""

    def insert(self, keys: Tensor, free_rows: Tensor, next_row: int) -> tuple[Tensor, Tensor]:
        """Rows int64[N] of all keys, and the new keys int64[M] in the order of their first occurrence.

        New key j gets ``free_rows[j]`` while there are any, then ``next_row``, ``next_row + 1``, ...
        """

    def assign(self, keys: Tensor, rows: Tensor) -> None:
        """Give ``keys int64[N]`` the ``rows int64[N]``, whatever they had."""

    def count(self, keys: Tensor) -> Tensor:
        """Add 1 to a key's value per occurrence: int64[N], the value after each."""

    def erase(self, keys: Tensor) -> Tensor:
        """Forget keys: the rows int64[N] they had, -1 where absent."""

    def items(self, start: int = 0, most: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Keys, rows, and where to go on: -1 at the end."""


def new_hash_index(device: torch.device | str = "cpu", implementation: str = "auto") -> HashIndex:
    """An empty index.

    Args:
        device: where keys come from and results go.
        implementation: "auto", or one by name, which runs or raises.

    Raises:
        KernelError: an implementation that does not run on `device`.
    """
    device = torch.device(device)
    index: HashIndex = choose("HashIndex", device, implementation)(device=device)
    return index


def copied_to(index: HashIndex, device: torch.device, implementation: str = "auto") -> HashIndex:
    """A new index on `device` with the keys and rows of `index`."""
    copied = new_hash_index(device, implementation)
    keys, rows, _ = index.items()
    copied.assign(keys.to(device), rows.to(device))
    return copied
