# SPDX-License-Identifier: Apache-2.0
"""The hash index in the memory of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from terarec.errors import NoSpaceError
from terarec.kernels.hash_index import (
    MOST_ROWS,
    check_next_row,
    check_rows,
    check_span,
    check_vector,
    index_full_error,
)
from terarec.kernels.triton.device.hash_table import EMPTY, claim_kernel, find_kernel
from terarec.kernels.triton.launch import on_its_device

_BLOCK = 256
_FEWEST_SLOTS = 256
_FULL = 0.85
"""Share of slots in use at which the table grows: a search for an absent key then passes 23 slots, 3 of 64 bytes."""
_SLOTS_A_KEY = 1.45
"""After growth: 23.2 bytes a key, and room for 23 % more keys."""
_MOST_SLOTS_A_KEY = 1.5
"""With more, that is more than 24 bytes a key, erasing shrinks the table."""


class _Slots(NamedTuple):
    """The slots of a table.

    Attributes:
        keys: int64[size + 1].
        rows: int64[size + 1].
    """

    keys: Tensor
    rows: Tensor

    @classmethod
    def empty(cls, size: int, device: torch.device) -> _Slots:
        keys = torch.full((size + 1,), EMPTY.value, dtype=torch.int64, device=device)
        # Any key but EMPTY, so that no search takes this slot for a free one.
        keys[size] = 0
        return cls(keys, torch.full((size + 1,), -1, dtype=torch.int64, device=device))

    @property
    def size(self) -> int:
        # The slot behind the table belongs to the key EMPTY, which cannot lie in the table.
        return self.keys.shape[0] - 1

    def find(self, keys: Tensor, *, gives_rows: bool) -> Tensor:
        """Return the slot int64[N] of each key, or its row; -1 where it has none."""
        return _find(keys, self.keys, self.rows, self.size, gives_rows) if keys.shape[0] else torch.empty_like(keys)

    def claim(self, keys: Tensor) -> Tensor:
        """Return the slot int64[N] of each key; the rows of absent ones become those of `claim_kernel`."""
        return _claim(keys, self.keys, self.rows, self.size) if keys.shape[0] else torch.empty_like(keys)


class HashIndex:
    """Index from int64 keys to rows, 0 <= row < 2^36; see `terarec.kernels.ref.hash_index.HashIndex`, which it equals.

    The slots of keys depend on the timing of the device's programs; results do not, except for the order of `items`,
    which stays the same while nothing changes. Calls that change the index wait for the device.

    Attributes:
        device: Device of keys and results.
    """

    def __init__(self, *, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self._length = self._used = 0
        self._slots = _Slots.empty(_FEWEST_SLOTS, self.device)

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._length

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots: 16 a slot."""
        return 8 * (self._slots.keys.numel() + self._slots.rows.numel())

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows int64[N] of ``keys int64[N]``, -1 where absent; does not wait for the device."""
        return self._slots.find(check_vector("keys", keys, self.device), gives_rows=True)

    def insert(self, keys: Tensor, free_rows: Tensor, next_row: int) -> tuple[Tensor, Tensor]:
        """Find keys and insert the absent ones; see `terarec.kernels.ref.hash_index.HashIndex.insert`."""
        keys = check_vector("keys", keys, self.device)
        free_rows = check_vector("free_rows", free_rows, self.device)
        with self._unchanged_by_errors():
            check_rows("free_rows", free_rows)
            check_next_row(next_row)
            rows = self.find(keys)
            absent = (rows < 0).nonzero().flatten()
            if absent.shape[0] == 0:
                return rows, keys[:0]
            # Only absent keys: claiming is a compare-and-swap, finding a plain load.
            slots, first = self._claim(keys[absent])
            fresh = max(first.shape[0] - free_rows.shape[0], 0)
            if next_row + fresh > MOST_ROWS:
                raise index_full_error(next_row, fresh)
            new_rows = torch.arange(next_row, next_row + fresh, device=self.device)
            rows_of_first = torch.empty_like(slots)
            rows_of_first[first] = torch.cat([free_rows[: first.shape[0]], new_rows])
            # By the first positions that the slots name, so that repeated keys get the row of their first occurrence.
            given = rows_of_first[self._slots.rows[slots] + slots.shape[0] + 1]
            rows[absent] = given
            new_keys = keys[absent[first]]
            self._slots.rows[slots] = given
            self._length += first.shape[0]
        return rows, new_keys

    def assign(self, keys: Tensor, rows: Tensor) -> None:
        """Assign rows to keys; see `terarec.kernels.ref.hash_index.HashIndex.assign`."""
        keys = check_vector("keys", keys, self.device)
        rows = check_vector("rows", rows, self.device, length=keys.shape[0])
        with self._unchanged_by_errors():
            check_rows("rows", rows)
            slots, first = self._claim(keys)
            _, last = _occurrences(slots)
            self._slots.rows[slots[last]] = rows[last]
            self._length += first.shape[0]

    def count(self, keys: Tensor) -> Tensor:
        """Count keys; see `terarec.kernels.ref.hash_index.HashIndex.count`."""
        keys = check_vector("keys", keys, self.device)
        with self._unchanged_by_errors():
            # Read before `_claim`, which overwrites the rows of absent keys with codes below -1.
            before = self.find(keys).clamp(min=0)
            slots, first = self._claim(keys)
            # By slot: all occurrences of a key have the same one.
            number, last = _occurrences(slots)
            values = (before + number).clamp(max=MOST_ROWS - 1)
            self._slots.rows[slots[last]] = values[last]
            self._length += first.shape[0]
        return values

    def erase(self, keys: Tensor) -> Tensor:
        """Erase ``keys int64[N]``; return their rows int64[N], -1 where absent or already erased in this call."""
        keys = check_vector("keys", keys, self.device)
        with self._unchanged_by_errors():
            slots = self._slots.find(keys, gives_rows=False)
            number, _ = _occurrences(slots)
            # A key that is erased twice in one call has its row at the first occurrence only.
            rows = torch.where((slots >= 0) & (number == 1), self._slots.rows[slots.clamp(min=0)], -1)
            occupied = slots[rows >= 0]
            self._slots.rows[occupied] = -1
        self._length -= occupied.shape[0]
        if self._slots.size > max(_FEWEST_SLOTS, _MOST_SLOTS_A_KEY * self._length):
            # The keys are erased, also where there is no memory to move the others to fewer slots.
            with suppress(torch.OutOfMemoryError):
                self._rebuild(self._length)
        return rows

    def items(self, start: int = 0, most: int | None = None) -> tuple[Tensor, Tensor, int]:
        """Return keys and rows; see `terarec.kernels.ref.hash_index.HashIndex.items`."""
        check_span(start, most)
        end = self._slots.size + 1
        stop = end if most is None else min(start + most, end)
        slots = start + (self._slots.rows[start:stop] >= 0).nonzero().flatten()
        keys = torch.where(slots == self._slots.size, EMPTY.value, self._slots.keys[slots])
        return keys, self._slots.rows[slots], stop if stop < end else -1

    @contextmanager
    def _unchanged_by_errors(self) -> Iterator[None]:
        """Give the slots that a call claims up again if it fails, before it has given them rows.

        The keys stay in them, as those of erased ones do.
        """
        try:
            yield
        except BaseException as error:
            # In place, and without a count of the slots: there may be no memory.
            self._slots.rows.clamp_(min=-1)
            if isinstance(error, torch.OutOfMemoryError):
                raise NoSpaceError(
                    f"hash index of {len(self):,} keys in {self.memory_bytes:,} bytes",
                    f"no memory for this call, which changed nothing: {self.device} has too little",
                ) from error
            raise

    def _claim(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots of keys, and the first positions, increasing, of absent keys, whose rows are below -1."""
        self._make_room(keys)
        # All keys count until the absent ones are counted: what fails in between may have claimed slots for them.
        self._used += keys.shape[0]
        slots = self._slots.claim(keys)
        # Row p - N - 1 marks the first position p of an absent key (`claim_kernel`), here of all positions at once.
        codes = torch.arange(-keys.shape[0] - 1, -1, device=self.device)
        first = (self._slots.rows[slots] == codes).nonzero().flatten()
        self._used -= keys.shape[0] - first.shape[0]
        return slots, first

    def _make_room(self, keys: Tensor) -> None:
        """Grow unless there are enough slots for the absent ones of `keys`."""
        if self._used + keys.shape[0] <= _FULL * self._slots.size:
            return
        # Only where the bound by all keys fails: mostly few are new, and counting them sorts and waits.
        absent = torch.unique(keys[self._slots.find(keys, gives_rows=True) < 0]).shape[0]
        if self._used + absent > _FULL * self._slots.size:
            self._rebuild(self._length + absent)

    def _rebuild(self, num_keys: int) -> None:
        """Move all keys to new slots, for `num_keys` keys; slots of erased keys are free again."""
        keys, rows, _ = self.items()
        slots = _Slots.empty(max(_FEWEST_SLOTS, int(_SLOTS_A_KEY * num_keys)), self.device)
        slots.rows[slots.claim(keys)] = rows
        # Only now: what failed before has changed nothing.
        self._slots, self._used = slots, keys.shape[0]


@on_its_device
def _find(keys: Tensor, slot_keys: Tensor, slot_rows: Tensor, slots: int, gives_rows: bool) -> Tensor:
    slots_of_keys = torch.empty_like(keys)
    grid = (triton.cdiv(keys.shape[0], _BLOCK),)
    find_kernel[grid](
        keys, slot_keys, slot_rows, slots_of_keys, keys.shape[0], slots, BLOCK=_BLOCK, GIVES_ROWS=gives_rows
    )
    return slots_of_keys


@on_its_device
def _claim(keys: Tensor, slot_keys: Tensor, slot_rows: Tensor, slots: int) -> Tensor:
    slots_of_keys = torch.empty_like(keys)
    claim_kernel[(triton.cdiv(keys.shape[0], _BLOCK),)](
        keys, slot_keys, slot_rows, slots_of_keys, keys.shape[0], slots, BLOCK=_BLOCK
    )
    return slots_of_keys


def _occurrences(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return each element's number, from 1, among its equals in ``groups int64[N]``, and the last equal's position."""
    ordered, order = torch.sort(groups, stable=True)
    place = torch.arange(groups.shape[0], device=groups.device)
    is_head = torch.ones_like(ordered, dtype=torch.bool)
    is_head[1:] = ordered[1:] != ordered[:-1]
    head = torch.where(is_head, place, 0).cummax(0).values if groups.shape[0] else place
    number = torch.empty_like(groups)
    number[order] = place - head + 1
    return number, order[is_head.roll(-1)]
