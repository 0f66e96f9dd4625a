"""`TierUse`: counters of tables in tiers."""

from __future__ import annotations

from typing import NamedTuple


class TierUse(NamedTuple):
    """Counters of a tiered arena.

    Attributes:
        lookups: Distinct rows that batches needed.
        hits: Those of them that were in the fast tier.
        rows_read: Rows read from the tier below.
        rows_written: Rows written to it.
        staged: Rows of `rows_read` that were read ahead.
        bytes_read: Bytes of the rows read.
        bytes_written: Bytes of the rows written.
    """

    lookups: int = 0
    hits: int = 0
    rows_read: int = 0
    rows_written: int = 0
    staged: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that were hits; 1 without lookups."""
        return self.hits / self.lookups if self.lookups else 1.0

    def plus(self, other: TierUse) -> TierUse:
        """Return the sums."""
        return TierUse(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: TierUse) -> TierUse:
        """Return what was done since `other`."""
        return TierUse(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))
