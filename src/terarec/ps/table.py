"""`TableTiers`: the rows of one table in several tiers, the fastest first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.ps.defaults import DefaultRows, constant_rows
from terarec.ps.tier import Found, Tier, TierStatistics, check_keys

_LOGGER = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUseStatistics:
    """A tier of a table.

    Attributes:
        name: Kind of the memory.
        is_available: Whether the last operation on it succeeded.
        errors: Operations that failed.
        skipped: Lookups that passed it over while it rested after an error.
        counted: What it did.
    """

    name: str
    is_available: bool
    errors: int
    skipped: int
    counted: TierStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStatistics:
    """Counters of a table.

    Attributes:
        keys: Keys that were looked up.
        defaults: Those of them that got the default vector.
        tiers: Its tiers, the fastest first.
    """

    keys: int
    defaults: int
    tiers: tuple[TierUseStatistics, ...]


class TableTiers:
    """A table whose rows are in several tiers.

    A key is looked up in one tier after the other until one has it. A tier that fails rests: lookups pass it over, and
    one of them tries it again after 0.25 s, then after twice as long each time, at most 4 s.

    Attributes:
        width: Length D of a vector.
        tiers: The tiers, the fastest first.

    Args:
        tiers: At least one tier, of one width.
        default: Vectors of keys that no tier has; zeros by default.
        keeps_found: Whether a tier inserts rows that a slower one had, for each tier.
        clock: Returns seconds.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        default: DefaultRows | None = None,
        keeps_found: Sequence[bool] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.width = tiers[0].width
        self.tiers = tuple(tiers)
        self.default = default or constant_rows(self.width)
        keeps = tuple(keeps_found) or (False,) * len(tiers)
        self._guarded = [_GuardedTier(tier, keep, clock) for tier, keep in zip(tiers, keeps, strict=True)]
        self._lock = threading.Lock()
        self._keys = self._defaults = 0

    def lookup(self, keys: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]``, the default vector for those that no tier has.

        A tier that fails is passed over.

        Raises:
            ConfigError: Keys of another shape or type.
        """
        return self.find(keys).rows

    def find(self, keys: Tensor) -> Found:
        """Return rows and which keys have one; the others have the default vector."""
        keys = check_keys(keys)
        found = self._find(keys)
        num_missing = keys.numel() - int(found.mask.count_nonzero())
        if num_missing:
            missing = ~found.mask
            found.rows[missing] = self.default(keys[missing])
        with self._lock:
            self._keys += keys.numel()
            self._defaults += num_missing
        return found

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Set rows in all tiers that can be written, the slowest first.

        Raises:
            ConfigError: Another shape or type.
            StorageError: A tier cannot be written; slower ones may have the rows by then.
        """
        for guarded in reversed(self._guarded):
            if guarded.tier.is_writable:
                guarded.tier.insert(keys, rows)

    def erase(self, keys: Tensor) -> None:
        """Remove rows from all tiers that can be written.

        Raises:
            StorageError: A tier cannot be written.
        """
        for guarded in self._guarded:
            if guarded.tier.is_writable:
                guarded.tier.erase(keys)

    def flush(self) -> None:
        """Make what was inserted and erased durable, where there is a disk.

        Raises:
            StorageError: A tier cannot be written.
        """
        for guarded in self._guarded:
            if guarded.tier.is_writable:
                guarded.tier.flush()

    def statistics(self) -> TableStatistics:
        """Return what the table did so far."""
        with self._lock:
            keys, defaults = self._keys, self._defaults
        return TableStatistics(
            keys=keys, defaults=defaults, tiers=tuple(guarded.statistics() for guarded in self._guarded)
        )

    def close(self) -> None:
        """Close all tiers."""
        for guarded in self._guarded:
            guarded.tier.close()

    def _find(self, keys: Tensor) -> Found:
        """Return what the tiers have; rows of other keys have any numbers."""
        first = self._guarded[0].lookup(keys)
        found = first or Found(torch.empty(keys.numel(), self.width), torch.zeros(keys.numel(), dtype=torch.bool))
        if len(self._guarded) == 1:
            return found
        missing = (~found.mask).nonzero()[:, 0]
        for number, guarded in enumerate(self._guarded[1:], 1):
            if not missing.numel():
                break
            # Slow tiers are asked once for a key.
            wanted, places = torch.unique(keys[missing], return_inverse=True)
            part = guarded.lookup(wanted)
            if part is None:
                continue
            has_row = part.mask[places]
            found.rows[missing[has_row]] = part.rows[places[has_row]]
            found.mask[missing[has_row]] = True
            missing = missing[~has_row]
            for faster in self._guarded[:number]:
                faster.keep(wanted[part.mask], part.rows[part.mask])
        return found


class _GuardedTier:
    """A tier that rests after an error."""

    def __init__(self, tier: Tier, keeps_found: bool, clock: Callable[[], float]) -> None:
        self.tier = tier
        self._keeps_found = keeps_found and tier.is_writable
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = 0.0
        self._rests_until = 0.0
        self._errors = self._skipped = 0

    def lookup(self, keys: Tensor) -> Found | None:
        """Return what the tier has; None if it fails or rests."""
        if not self._may_try():
            return None
        try:
            found = self.tier.lookup(keys)
        except StorageError as error:
            self._note_error(error)
            return None
        self._note_success()
        return found

    def keep(self, keys: Tensor, rows: Tensor) -> None:
        """Insert rows that a slower tier had, if this one keeps them."""
        if not self._keeps_found or not keys.numel() or not self._may_try(counts=False):
            return
        try:
            self.tier.insert(keys, rows)
        except StorageError as error:
            self._note_error(error)

    def statistics(self) -> TierUseStatistics:
        with self._lock:
            return TierUseStatistics(
                name=self.tier.name,
                is_available=not self._pause,
                errors=self._errors,
                skipped=self._skipped,
                counted=self.tier.statistics(),
            )

    def _may_try(self, *, counts: bool = True) -> bool:
        if not self._pause:
            return True
        with self._lock:
            now = self._clock()
            if now < self._rests_until:
                self._skipped += counts
                return False
            self._rests_until = now + self._pause  # others wait for the outcome of this try
            return True

    def _note_error(self, error: StorageError) -> None:
        with self._lock:
            is_first = not self._pause
            self._errors += 1
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._rests_until = self._clock() + self._pause
        if is_first:
            _LOGGER.warning("tier %s: %s; lookups go on without it until it answers again", self.tier.name, error)

    def _note_success(self) -> None:
        if self._pause:
            with self._lock:
                self._pause = 0.0
            _LOGGER.warning("tier %s: answers again", self.tier.name)
