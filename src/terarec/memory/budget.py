# SPDX-License-Identifier: Apache-2.0
"""`TierBudget` and `TierSizes`: budgets divided between the arenas that name them, as rows that their tiers hold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from terarec.kernels.slots import SLOT_BYTES
from terarec.memory.cache import Cache
from terarec.memory.cached_part import BudgetError
from terarec.memory.fast_tier import FastTier
from terarec.memory.row_format import RowFileOptions
from terarec.memory.write_behind import WrittenBehind
from terarec.spec import DynamicTableSpec, TableSpec, Tiers

INDEX_ALLOWANCE = 64 << 20
"""Bytes of indexes in addition to a budget; what they take beyond these is taken from the rows in host memory."""
_ALL_FIT = 1.001  # shares are rounded
_READ_BYTES, _QUEUED_BYTES = 16 << 20, 32 << 20  # of all tables together
_READS, _READERS = 128, 2  # under way at once in an arena, by a batch and by the one read ahead
_RUN_BYTES, _BLOCK_BYTES = 32 << 10, 4 << 10
_LEAST_QUEUED_BYTES = 1 << 20
_MIB = 1 << 20
_STEPS_OF_BUDGET = 64  # in which an arena gives up slots
_MOST_SLOTS = 1 << 36  # of a tier for tables with an unknown number of rows


class TierMember(Protocol):
    """Rows that take a part of a budget."""

    @property
    def num_tables(self) -> int:
        """Number of tables."""

    @property
    def index_bytes(self) -> float:
        """Bytes of host memory that the indexes of keys, and of rows in files, take."""

    @property
    def full_bytes(self) -> float:
        """Bytes that all rows would take in the fast tier; infinite where their number is not known."""

    @property
    def bytes_of_a_row_each(self) -> int:
        """Bytes that one row of each table would take there."""


class TierBudget:
    """A budget that several arenas share.

    Half of it is divided evenly, as far as arenas can use it, so that those of small tables have all of their rows in
    the fast tier; the other half in proportion to what is left of the arenas' rows.
    """

    def __init__(self) -> None:
        # Weak: a model that is gone leaves its share to the others.
        self._members: weakref.WeakSet[TierMember] = weakref.WeakSet()

    def add(self, member: TierMember) -> None:
        """Let `member` take part."""
        self._members.add(member)

    def share(self, member: TierMember, num_bytes: int) -> float:
        """Return the share of `member` in a budget of `num_bytes`, from 0 to 1."""
        members = list(self._members)
        if len(members) == 1:
            return 1.0
        full = [each.full_bytes for each in members]
        even = filled(num_bytes / 2, full)
        rest = num_bytes - sum(even)
        weights = [most - part for most, part in zip(full, even, strict=True)]
        # The rest goes only to arenas whose rows are not known, since it is unknown how much they need.
        if math.inf in weights:
            weights = [
                each.bytes_of_a_row_each if weight == math.inf else 0.0
                for each, weight in zip(members, weights, strict=True)
            ]
        total = sum(weights) or 1.0
        return (even[members.index(member)] + rest * weights[members.index(member)] / total) / num_bytes

    def given_up(self, member: TierMember, num_bytes: int) -> int:
        """Return the bytes of its share in a budget of `num_bytes` that `member` gives up for indexes.

        Those whose rows do not all fit give up what the indexes of all take beyond the allowance, in proportion to
        their own indexes.
        """
        members = list(self._members)
        excess = sum(each.index_bytes for each in members) - INDEX_ALLOWANCE
        if excess <= 0:
            return 0
        givers = [each for each in members if each.full_bytes > _ALL_FIT * self.share(each, num_bytes) * num_bytes]
        givers = givers or members
        if member not in givers:
            return 0
        return int(excess * member.index_bytes / max(1, sum(each.index_bytes for each in givers)))

    def file_options(self, *, direct: bool) -> RowFileOptions:
        """Return how the files of an arena are read and written, so that the buffers of all tables are bounded.

        The tables of an arena share what reads their pages.
        """
        tables = sum(member.num_tables for member in self._members)
        # Each of an arena's readers has buffers for _READS runs; all of them together take _READ_BYTES.
        run = min(_RUN_BYTES, _READ_BYTES // (len(self._members) * _READS * _READERS)) // _BLOCK_BYTES * _BLOCK_BYTES
        return RowFileOptions(
            direct=direct,
            queue_bytes=max(_LEAST_QUEUED_BYTES, min(RowFileOptions().queue_bytes, _QUEUED_BYTES // tables)),
            run_bytes=max(_BLOCK_BYTES, run),
        )


def read_buffer_bytes(options: RowFileOptions) -> int:
    """Return the bytes of host memory in which an arena's files are read, with options of `TierBudget.file_options`."""
    return _READERS * _READS * options.run_bytes


def filled(total: float, most: Sequence[float]) -> list[float]:
    """Divide `total` evenly between parts of at most `most` each."""
    parts = [0.0] * len(most)
    # Smallest first: what a part has no use for is left to the larger ones.
    open_parts = sorted(range(len(most)), key=lambda part: most[part])
    while open_parts:
        part = open_parts.pop(0)
        parts[part] = min(most[part], total / (len(open_parts) + 1))
        total -= parts[part]
    return parts


class TierSizes:
    """The share of an arena in the budgets of its tiers, as slots. A `terarec.memory.budget.TierMember`.

    Attributes:
        tiers: The budgets.
        budget: Divides them between the arenas that name them.
        row_bytes: Bytes of a row's weights and state.
        key_bytes: For each table, a function that returns the bytes of host memory that its keys and their uses take.
        below: Tier below the fast one, which has indexes; None for no such tier, or before it is open.

    Args:
        specs: The tables of the arena.
        num_defaults: Rows at the start of the arena that belong to no key and are always in the fast tier.
    """

    def __init__(self, specs: Sequence[TableSpec | DynamicTableSpec], tiers: Tiers, *, num_defaults: int) -> None:
        self.tiers = tiers
        self.budget = TierBudget()
        self.budget.add(self)
        self.row_bytes = 0
        self.key_bytes: dict[int, Callable[[], int]] = {}
        self.below: WrittenBehind | None = None
        self._specs = tuple(specs)
        self._num_defaults = num_defaults
        self._given_up = 0  # bytes of the budget, to indexes

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self._specs)

    @property
    def index_bytes(self) -> int:
        """Bytes of host memory that the indexes of keys, and of rows in files, take."""
        of_keys = sum(bytes_of() for bytes_of in self.key_bytes.values())
        return of_keys + (0 if self.below is None else self.below.index_bytes)

    @property
    def full_bytes(self) -> float:
        """Bytes that all rows would take in the fast tier; infinite where their number is not known."""
        rows = self._most_rows()
        return math.inf if rows == _MOST_SLOTS else rows * self.slot_bytes

    @property
    def bytes_of_a_row_each(self) -> int:
        """Bytes that one row of each table would take there."""
        return len(self._specs) * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot with its row."""
        return self.row_bytes + SLOT_BYTES

    @property
    def fast_slots(self) -> int:
        """Number of slots of the fast tier."""
        fitting = max(1, int(self.tiers.fast_bytes * self._share()) // self.slot_bytes)
        return min(fitting + self._num_defaults, self._most_rows())

    @property
    def host_bytes_below(self) -> int | None:
        """Bytes of host memory behind the device's; None for none."""
        host = self.tiers.host_bytes_below
        return None if host is None else int(host * self._share())

    def fit(self, memory: FastTier, device: torch.device) -> None:
        """Give up slots in host memory for the bytes of indexes beyond their allowance."""
        host = self.host_bytes_below
        # Without a tier below there is nothing to evict to, and on a device without host tier no host memory to give
        # up.
        if memory.below is None or (host is None and device.type != "cpu"):
            return
        excess = self.budget.given_up(self, self.tiers.fast_bytes)
        if excess <= 0:
            return
        self._given_up = excess
        capacity = (int(self.tiers.fast_bytes * self._share()) if host is None else host) // self.slot_bytes
        step = capacity // _STEPS_OF_BUDGET + 1  # so that slots are not given up a few at a time
        left = max(self._num_defaults + 1, capacity - -(-excess // (self.row_bytes * step)) * step)
        level = memory.below.level
        if left < (level.capacity if isinstance(level, Cache) else memory.capacity):
            memory.below.wait()
            level.lower(left) if isinstance(level, Cache) else memory.lower(left)

    def too_small(self, memory: FastTier, needed: int, purpose: str) -> BudgetError:
        """Return the error of a fast tier in which rows do not fit next to those that have to stay."""
        others = memory.num_pinned if memory.below is not None else len(memory.slots)
        # Only pinned rows have to stay if there is a tier below, else all that are here.
        wanted = needed + others
        would_do = -(-int((wanted * self.slot_bytes + self._given_up) / self._share()) // _MIB) * _MIB
        indexes = f" ({self._given_up // _MIB:,} MiB are the indexes')" if self._given_up >= _MIB else ""
        what = "that pending lookups use" if memory.below is not None else "that no slower tier takes"
        return BudgetError(
            f"tiers {self.tiers.fast_name}={self.tiers.fast!r}: {described(self._specs)}",
            f"{purpose} needs {needed:,} rows more beside {others:,} {what}, {memory.capacity:,} fit{indexes}; "
            f"expected {self.tiers.fast_name} of at least {would_do // _MIB:,}MiB, or smaller batches",
            needed=wanted,
            capacity=memory.capacity,
            needed_bytes=would_do,
        )

    def _share(self) -> float:
        return self.budget.share(self, self.tiers.fast_bytes)

    def _most_rows(self) -> int:
        """Return the most rows that can ever be in the fast tier."""
        rows = [rows_of_table(spec) for spec in self._specs]
        known = [count for count in rows if count is not None]
        return sum(known) + self._num_defaults if len(known) == len(rows) else _MOST_SLOTS


def rows_of_table(spec: TableSpec | DynamicTableSpec) -> int | None:
    """Return the most rows that a table can have; None where that is not known."""
    return spec.rows if isinstance(spec, TableSpec) else spec.max_rows


def described(specs: Sequence[TableSpec | DynamicTableSpec]) -> str:
    """Return the names of tables, for errors."""
    names = [spec.name for spec in specs]
    shown = ", ".join(map(repr, names[:3]))
    return f"table{'s' * (len(names) > 1)} {shown}" + (f", ... ({len(names)})" if len(names) > 3 else "")
