"""`TierBudget`: how arenas that name the same tiers divide their budgets."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Protocol

from terarec.storage.row_file_layout import RowFileOptions

INDEX_ALLOWANCE = 64 << 20
"""Bytes of indexes beside a budget; what they take beyond these is taken from the rows in host memory."""
_ALL_FIT = 1.001  # shares are rounded
_READ_BYTES, _QUEUED_BYTES = 16 << 20, 32 << 20  # of all tables together
_READS, _READERS = 128, 2  # under way at once in an arena, by a batch and by the one read ahead
_RUN_BYTES, _BLOCK_BYTES = 32 << 10, 4 << 10
_LEAST_QUEUED_BYTES = 1 << 20


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
        self._members: weakref.WeakSet[TierMember] = weakref.WeakSet()

    def add(self, member: TierMember) -> None:
        """Let `member` take part."""
        self._members.add(member)

    def share(self, member: TierMember, num_bytes: int) -> float:
        """Return the share of `member` in a budget of `num_bytes`, from 0 to 1."""
        members = list(self._members)
        if len(members) == 1:
            return 1.0
        full = [held.full_bytes for held in members]
        even = filled(num_bytes / 2, full)
        rest = num_bytes - sum(even)
        weights = [most - part for most, part in zip(full, even, strict=True)]
        if math.inf in weights:
            weights = [
                held.bytes_of_a_row_each if weight == math.inf else 0.0
                for held, weight in zip(members, weights, strict=True)
            ]
        total = sum(weights) or 1.0
        return (even[members.index(member)] + rest * weights[members.index(member)] / total) / num_bytes

    def given_up(self, member: TierMember, num_bytes: int) -> int:
        """Return the bytes of its share in a budget of `num_bytes` that `member` gives up for indexes.

        Those whose rows do not all fit give up what the indexes of all take beyond the allowance, in proportion to
        their own indexes.
        """
        members = list(self._members)
        excess = sum(held.index_bytes for held in members) - INDEX_ALLOWANCE
        if excess <= 0:
            return 0
        givers = [held for held in members if held.full_bytes > _ALL_FIT * self.share(held, num_bytes) * num_bytes]
        givers = givers or members
        if member not in givers:
            return 0
        return int(excess * member.index_bytes / max(1, sum(held.index_bytes for held in givers)))

    def file_options(self, *, direct: bool) -> RowFileOptions:
        """Return how the files of an arena are read and written, so that the buffers of all tables are bounded.

        The tables of an arena share what reads their pages.

        Args:
            direct: Whether they bypass the page cache.
        """
        tables = sum(held.num_tables for held in self._members)
        run = min(_RUN_BYTES, _READ_BYTES // (len(self._members) * _READS * _READERS)) // _BLOCK_BYTES * _BLOCK_BYTES
        return RowFileOptions(
            direct=direct,
            queue_bytes=max(_LEAST_QUEUED_BYTES, min(RowFileOptions().queue_bytes, _QUEUED_BYTES // tables)),
            run_bytes=max(_BLOCK_BYTES, run),
        )


def filled(total: float, most: Sequence[float]) -> list[float]:
    """Divide `total` evenly between parts of at most `most` each."""
    parts = [0.0] * len(most)
    open_parts = sorted(range(len(most)), key=lambda part: most[part])
    while open_parts:
        part = open_parts.pop(0)
        parts[part] = min(most[part], total / (len(open_parts) + 1))
        total -= parts[part]
    return parts
