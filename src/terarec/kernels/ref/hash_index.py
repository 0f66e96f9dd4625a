# SPDX-License-Identifier: Apache-2.0
"""The hash index as a Python dict: the oracle."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from terarec.kernels.hash_index import (
    MOST_ROWS,
    check_next_row,
    check_rows,
    check_span,
    check_vector,
    index_full_error,
)

# A dict holds a hash, two references and a share of its table for an entry; the integers are objects of 32 bytes.
_ENTRY_BYTES = 140


class HashIndex:
    """Index from int64 keys to rows, 0 <= row < 2^36; any key, the extremes included.

    Every call equals a loop over its keys in order, so results depend neither on the
    implementation nor on the number of threads. An index takes one call at a time, except for finds, which may overlap.

    Attributes:
        device: Device of keys and results.
    """

    def __init__(self, *, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._rows)

    @property
    def memory_bytes(self) -> int:
        """Bytes held, nearly."""
        return _ENTRY_BYTES * len(self._rows)

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows int64[N] of ``keys int64[N]``, -1 where absent."""
        keys = check_vector("keys", keys, self.device)
        return self._tensor([self._rows.get(key, -1) for key in keys.tolist()])

    def insert(self, keys: Tensor, free_rows: Tensor, next_row: int) -> tuple[Tensor, Tensor]:
        """Find keys and insert the absent ones.

        The new keys come in the order of their first occurrence. New key j gets ``free_rows[j]`` while there are any,
        then ``next_row``, ``next_row + 1``, ...

        Args:
            keys: int64[N]; a key that is repeated is one key.
            free_rows: int64[F], distinct rows that no key has.
            next_row: First of the rows that were never given out.

        Returns:
            Rows int64[N] of all keys, and the new keys int64[M].

        Raises:
            ConfigError: A free row outside 0 <= row < 2^36.
            StorageError: The rows up to 2^36 do not suffice, or memory is out; nothing has changed then.
        """
        keys = check_vector("keys", keys, self.device)
        check_rows("free_rows", check_vector("free_rows", free_rows, self.device))
        check_next_row(next_row)
        requested = keys.tolist()
        # A dict keeps the order of insertion: distinct keys in the order of their first occurrence.
        new_keys = [key for key in dict.fromkeys(requested) if key not in self._rows]
        free = free_rows[: len(new_keys)].tolist()
        fresh = len(new_keys) - len(free)
        # Before the first change, so that a failed call leaves the index as it was.
        if next_row + fresh > MOST_ROWS:
            raise index_full_error(next_row, fresh)
        self._rows.update(zip(new_keys, [*free, *range(next_row, next_row + fresh)], strict=True))
        return self._tensor([self._rows[key] for key in requested]), self._tensor(new_keys)

    def assign(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows of ``keys int64[N]`` to ``rows int64[N]``, in place of former ones; of a repeated key the last.

        Raises:
            ConfigError: A row outside 0 <= row < 2^36.
            StorageError: Memory is out; nothing has changed then.
        """
        keys = check_vector("keys", keys, self.device)
        check_rows("rows", check_vector("rows", rows, self.device, length=keys.shape[0]))
        self._rows.update(zip(keys.tolist(), rows.tolist(), strict=True))

    def count(self, keys: Tensor) -> Tensor:
        """Add 1 to the value of each of ``keys int64[N]`` per occurrence, from 0; the value stays below 2^36.

        Returns:
            The value int64[N] after each occurrence.

        Raises:
            StorageError: Memory is out; nothing has changed then.
        """
        values = []
        for key in check_vector("keys", keys, self.device).tolist():
            self._rows[key] = min(self._rows.get(key, 0) + 1, MOST_ROWS - 1)
            values.append(self._rows[key])
        return self._tensor(values)

    def erase(self, keys: Tensor) -> Tensor:
        """Erase ``keys int64[N]``; return their rows int64[N], -1 where absent or already erased in this call."""
        keys = check_vector("keys", keys, self.device)
        return self._tensor([self._rows.pop(key, -1) for key in keys.tolist()])

    def items(self, start: int = 0, most: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Return the keys and their rows, in an order that stays while nothing changes.

        Args:
            start: 0, or the position that the call before returned.
            most: Largest number of keys to return; None for all.

        Returns:
            Keys int64[n], rows int64[n], and the position to continue from, -1 at the end.
        """
        check_span(start, most)
        stop = len(self._rows) if most is None else min(start + most, len(self._rows))
        entries = list(islice(self._rows.items(), start, max(stop, start)))
        keys, rows = [key for key, _ in entries], [row for _, row in entries]
        return self._tensor(keys), self._tensor(rows), stop if stop < len(self._rows) else -1

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
