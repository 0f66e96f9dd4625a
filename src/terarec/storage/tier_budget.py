"""`TierBudget`: how arenas that name the same tiers divide their budgets."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Protocol


class TierMember(Protocol):
    """Rows that take a part of a budget."""

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


def filled(total: float, most: Sequence[float]) -> list[float]:
    """Divide `total` evenly between parts of at most `most` each."""
    parts = [0.0] * len(most)
    open_parts = sorted(range(len(most)), key=lambda part: most[part])
    while open_parts:
        part = open_parts.pop(0)
        parts[part] = min(most[part], total / (len(open_parts) + 1))
        total -= parts[part]
    return parts
