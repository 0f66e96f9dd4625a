# SPDX-License-Identifier: Apache-2.0
"""Launcher of the hash index in host memory."""

from __future__ import annotations

import secrets
from typing import Any

import torch
from torch import Tensor

from terarec.errors import NoSpaceError, StorageError
from terarec.kernels.cpu.host import _embedding, empty_integers
from terarec.kernels.hash_index import (
    check_next_row,
    check_rows,
    check_span,
    check_vector,
    index_full_error,
)


class HashIndex:
    """Index from int64 keys to rows, 0 <= row < 2^36: some 21 bytes a key, on torch's threads.

    It does what `terarec.kernels.ref.hash_index.HashIndex` does, with the same results for any number of threads.
    Each index hashes with a seed of its own, so that keys cannot be chosen to collide in it; the order of `items`
    follows the hash, so it differs from index to index.

    Attributes:
        device: The CPU.
    """

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        # Not reproducible on purpose: nothing but the order of `items` depends on it.
        self._core = _embedding.HashIndex(secrets.randbits(64))

    def __len__(self) -> int:
        """Return the exact number of keys."""
        return self._core.size()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index: at most 24 a key and some tens of KiB.

        All indexes of a process share huge pages, a few of which are kept free.
        """
        return self._core.memory_bytes()

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows int64[N] of ``keys int64[N]``, -1 where absent."""
        keys = check_vector("keys", keys, self.device)
        rows = empty_integers(keys.shape[0])
        self._core.find(keys.data_ptr(), keys.shape[0], rows.data_ptr(), torch.get_num_threads())
        return rows

    def insert(self, keys: Tensor, free_rows: Tensor, next_row: int) -> tuple[Tensor, Tensor]:
        """Find keys and insert the absent ones; see `terarec.kernels.ref.hash_index.HashIndex.insert`."""
        keys = check_vector("keys", keys, self.device)
        free_rows = check_vector("free_rows", free_rows, self.device)
        check_rows("free_rows", free_rows)
        check_next_row(next_row)
        rows, new_keys = empty_integers(keys.shape[0]), empty_integers(keys.shape[0])
        try:
            num_new = self._core.insert(
                keys.data_ptr(),
                keys.shape[0],
                rows.data_ptr(),
                free_rows.data_ptr(),
                free_rows.shape[0],
                next_row,
                new_keys.data_ptr(),
                torch.get_num_threads(),
            )
        except MemoryError:
            raise self._out_of_memory(keys.shape[0]) from None
        if num_new < 0:
            # The core gives up at the limit without a count; a set counts the distinct ones for the message.
            raise index_full_error(next_row, len(set(keys[rows < 0].tolist())) - free_rows.shape[0])
        new_keys = new_keys[:num_new]
        # A view of few keys would keep the memory of all as long as they live.
        return rows, new_keys.clone() if 2 * num_new < keys.shape[0] else new_keys

    def assign(self, keys: Tensor, rows: Tensor) -> None:
        """Assign ``rows int64[N]`` to ``keys int64[N]``, present or not; the last one counts for a repeated key."""
        keys = check_vector("keys", keys, self.device)
        rows = check_vector("rows", rows, self.device, length=keys.shape[0])
        check_rows("rows", rows)
        try:
            self._core.assign(keys.data_ptr(), keys.shape[0], rows.data_ptr(), torch.get_num_threads())
        except MemoryError:
            raise self._out_of_memory(keys.shape[0]) from None

    def count(self, keys: Tensor) -> Tensor:
        """Add 1 to the value of each of ``keys int64[N]`` per occurrence: the value int64[N] after each."""
        keys = check_vector("keys", keys, self.device)
        values = empty_integers(keys.shape[0])
        try:
            self._core.count(keys.data_ptr(), keys.shape[0], values.data_ptr(), torch.get_num_threads())
        except MemoryError:
            raise self._out_of_memory(keys.shape[0]) from None
        return values

    def erase(self, keys: Tensor) -> Tensor:
        """Erase ``keys int64[N]``; return their rows int64[N], -1 where absent or already erased in this call."""
        keys = check_vector("keys", keys, self.device)
        rows = empty_integers(keys.shape[0])
        self._core.erase(keys.data_ptr(), keys.shape[0], rows.data_ptr(), torch.get_num_threads())
        return rows

    def items(self, start: int = 0, most: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Return keys, rows, and the position to continue from, -1 at the end; unchanged, in the same order."""
        check_span(start, most)
        # The core writes to these addresses, so that there must be room for all that it may write.
        room = len(self) if most is None else min(most, len(self))
        keys, rows = torch.empty(2, room, dtype=torch.int64)
        following, written = self._core.items(start, room, keys.data_ptr(), rows.data_ptr())
        return keys[:written], rows[:written], following

    # The table in the core has a seed and addresses of this process: copies are built from the keys.
    def __getstate__(self) -> dict[str, Any]:
        keys, rows, _ = self.items()
        return {"device": self.device, "keys": keys.numpy(), "rows": rows.numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        HashIndex.__init__(self, device=state["device"])
        self.assign(torch.from_numpy(state["keys"]), torch.from_numpy(state["rows"]))

    def _out_of_memory(self, keys: int) -> StorageError:
        return NoSpaceError(
            f"hash index of {len(self):,} keys in {self.memory_bytes:,} bytes",
            f"no memory for up to {keys:,} keys more, the system has too little",
        )
