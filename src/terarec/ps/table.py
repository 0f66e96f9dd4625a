"""`TableTiers`: the rows of one table in several tiers, the fastest first, with default vectors for absent keys."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels.rows import initialise_keys
from terarec.ps.disk import RowStoreTier, look_up_cached
from terarec.ps.redis_tier import RedisTier, look_up_tables
from terarec.ps.tier import Found, Tier, TierStatistics, check_key_tensor
from terarec.spec import DynamicTableSpec, TableSpec
from terarec.storage.initial_values import initial_scale

_LOGGER = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 4.0


class DefaultRows(Protocol):
    """The vectors of keys that no tier has."""

    def __call__(self, keys: Tensor, /) -> Tensor:
        """Return float32[n, D] for ``keys int64[n]``."""


def constant_rows(width: int, value: float | tuple[float, ...] = 0.0) -> DefaultRows:
    """Return default rows of one vector: of one number for all columns, or `width` of them."""
    vector = torch.tensor(value, dtype=torch.float32).expand(width)
    return lambda keys: vector.expand(keys.numel(), width)


def default_rows(table: TableSpec | DynamicTableSpec, seed: int | None) -> DefaultRows:
    """Return the default rows of a trained table.

    Args:
        table: The table. The default vector of a dynamic one is its own; that of a static one is zeros.
        seed: Seed of the initial weights that the rows of a static table have unless training changed them, for a
            checkpoint that leaves such rows out; None for one that has all rows.
    """
    if isinstance(table, DynamicTableSpec):
        return constant_rows(table.width, table.default)
    if seed is None:
        return constant_rows(table.width)
    static, of_rows = table, seed

    def first_rows(keys: Tensor) -> Tensor:
        rows = torch.zeros(keys.numel(), static.width)
        places = ((keys >= 0) & (keys < static.rows)).nonzero()[:, 0]
        initialise_keys(
            rows,
            places,
            keys[places],
            table=static.name,
            seed=of_rows,
            initializer=static.initializer,
            scale=initial_scale(static),
        )
        return rows

    return first_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUseStatistics:
    """A tier of a table.

    Attributes:
        name: Kind of the memory.
        is_available: Whether the last operation on it succeeded.
        errors: Operations that failed.
        skipped: Lookups that passed it over while it rested after an error.
        counted: Statistics of the tier.
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
        defaults: Keys that got the default vector.
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
        """Return the rows float32[n, D] of ``keys int64[n]``; keys that no tier has get the default vector.

        The keys may be on any device; the rows are in host memory. A tier that fails is passed over.

        Raises:
            ConfigError: Keys of another shape or type.
        """
        return self.find(keys.cpu()).rows  # a model on a GPU has its keys there

    def find(self, keys: Tensor) -> Found:
        """Return rows and which keys have one; the others have the default vector."""
        return find_together([self], keys, [keys.numel()])

    def note_lookup(self, keys: int, defaults: int) -> None:
        """Count keys that were looked up, and those that got the default vector."""
        with self._lock:
            self._keys += keys
            self._defaults += defaults

    @property
    def guarded(self) -> Sequence[_GuardedTier]:
        """The tiers, each with its pauses after errors."""
        return self._guarded

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Set rows in all tiers that can be written, the slowest first.

        Raises:
            ConfigError: Another shape or type.
            StorageError: A tier cannot be written; slower ones may have the rows by then.
        """
        # If one fails, the faster tiers, which lookups read first, still have the former rows.
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
        """Make inserted and erased rows durable, where there is a disk.

        Raises:
            StorageError: A tier cannot be written.
        """
        for guarded in self._guarded:
            if guarded.tier.is_writable:
                guarded.tier.flush()

    def statistics(self) -> TableStatistics:
        """Return the counters of the table."""
        with self._lock:
            keys, defaults = self._keys, self._defaults
        return TableStatistics(
            keys=keys, defaults=defaults, tiers=tuple(guarded.statistics() for guarded in self._guarded)
        )

    def close(self) -> None:
        """Close all tiers."""
        for guarded in self._guarded:
            guarded.tier.close()


def find_together(tables: Sequence[TableTiers], keys: Tensor, ends: Sequence[int]) -> Found:
    """Look up keys of several tables of one width; those whose rows are in one place are read at once.

    Args:
        tables: Distinct tables.
        keys: int64[n], which may repeat; those of table i end before ``ends[i]``, where those of the next begin.
        ends: As above, rising; the last is n.

    Returns:
        Rows and which keys have one; the others have the default vector.

    Raises:
        ConfigError: Keys of another shape or type.
    """
    keys = check_key_tensor(keys)
    begins = (0, *ends[:-1])
    # Not a level of `_look_up_level`, which splits keys and joins rows table by table: here all tables' rows lie in one
    # result, which is returned as it is where no key is missing.
    in_memory = _find_in_memory(tables, keys, ends)
    if in_memory is not None and bool(in_memory.mask.all()):
        for table, begin, end in zip(tables, begins, ends, strict=True):
            table.note_lookup(end - begin, 0)
        return in_memory
    searches = [_Search(table, keys[begin:end]) for table, begin, end in zip(tables, begins, ends, strict=True)]
    first = 0
    if in_memory is not None:
        # Views, into which the searches write what slower tiers have.
        for search, begin, end in zip(searches, begins, ends, strict=True):
            search.take(0, Found(in_memory.rows[begin:end], in_memory.mask[begin:end]))
        first = 1
    for level in range(first, max(len(table.tiers) for table in tables)):
        open_ones = [search for search in searches if search.wants(level)]
        wanted = [(search.table.guarded[level], search.wanted(level)) for search in open_ones]
        for search, part in zip(open_ones, _look_up_level(wanted), strict=True):
            search.take(level, part)
    found = [search.result() for search in searches]
    if in_memory is not None or len(found) == 1:
        return in_memory or found[0]
    return Found(torch.cat([part.rows for part in found]), torch.cat([part.mask for part in found]))


def _find_in_memory(tables: Sequence[TableTiers], keys: Tensor, ends: Sequence[int]) -> Found | None:
    """Look keys up in the first tiers in one pass, if these are files of several tables with rows in host memory.

    Returns:
        Rows and which keys have one; None where tiers are looked up one by one: others, and one that fails or rests.
    """
    cached_tiers = []
    for table in tables:
        tier = table.tiers[0]
        cached = tier.cached if isinstance(tier, RowStoreTier) else None
        if cached is None or not table.guarded[0].is_available:
            return None
        cached_tiers.append((cast(RowStoreTier, tier), cached))
    if len(cached_tiers) == 1:
        return None
    try:
        return look_up_cached(cached_tiers, keys, ends)
    except StorageError:
        return None  # the lookup of the tier that fails raises it again, and only that tier rests


class _Search:
    """A lookup in the tiers of a table, one after the other."""

    def __init__(self, table: TableTiers, keys: Tensor) -> None:
        self.table = table
        self._keys = keys
        self._found: Found | None = None
        self._missing = self._wanted = keys
        self._places: Tensor | None = None  # of the missing keys among the wanted ones

    def wants(self, level: int) -> bool:
        """Return whether there is such a tier, and keys to look up in it."""
        return level < len(self.table.tiers) and (level == 0 or bool(self._missing.numel()))

    def wanted(self, level: int) -> Tensor:
        """Return the keys to look up in a tier; in slow tiers a key is looked up once."""
        if level:
            self._wanted, self._places = torch.unique(self._keys[self._missing], return_inverse=True)
        return self._wanted

    def take(self, level: int, part: Found | None) -> None:
        """Return the rows that a tier has; None for one that failed or is not retried yet."""
        if level == 0:
            count = self._keys.numel()
            self._found = part or Found(torch.empty(count, self.table.width), torch.zeros(count, dtype=torch.bool))
            self._missing = (~self._found.mask).nonzero()[:, 0]
        elif part is not None:
            assert self._found is not None
            assert self._places is not None
            has_row = part.mask[self._places]
            self._found.rows[self._missing[has_row]] = part.rows[self._places[has_row]]
            self._found.mask[self._missing[has_row]] = True
            self._missing = self._missing[~has_row]
            # Tiers that keep what they lacked find it themselves the next time.
            for faster in self.table.guarded[:level]:
                faster.keep(self._wanted[part.mask], part.rows[part.mask])

    def result(self) -> Found:
        """Return the rows, default vectors for keys that no tier has."""
        assert self._found is not None
        if self._missing.numel():
            self._found.rows[self._missing] = self.table.default(self._keys[self._missing])
        self.table.note_lookup(self._keys.numel(), self._missing.numel())
        return self._found


def _look_up_level(lookups: Sequence[tuple[_GuardedTier, Tensor]]) -> list[Found | None]:
    """Look keys up in a tier of each table; None for a tier that fails or is paused after errors."""
    found: dict[int, Found | None] = {}
    by_server: dict[int, list[int]] = {}
    for place, (guarded, keys) in enumerate(lookups):
        if isinstance(guarded.tier, RedisTier):
            by_server.setdefault(id(guarded.tier.server), []).append(place)
        else:
            found[place] = guarded.lookup(keys)
    # One exchange for all tables on a server: a table alone would wait for a round trip of its own.
    for places in by_server.values():
        tried = [place for place in places if lookups[place][0].may_try()]
        found |= dict.fromkeys(places)
        try:
            parts = (
                look_up_tables([(cast(RedisTier, lookups[place][0].tier), lookups[place][1]) for place in tried])
                if tried
                else []
            )
        except StorageError as error:
            for place in tried:
                lookups[place][0].note_error(error)
            continue
        for place, part in zip(tried, parts, strict=True):
            lookups[place][0].note_success()
            found[place] = part
    return [found[place] for place in range(len(lookups))]


class _GuardedTier:
    """A tier that rests after an error."""

    def __init__(self, tier: Tier, keeps_found: bool, clock: Callable[[], float]) -> None:
        self.tier = tier
        self._keeps_found = keeps_found and tier.is_writable
        self._clock = clock
        self._lock = threading.Lock()
        # Seconds of the present rest, which doubles with each failed try; 0 while the tier works.
        self._pause = 0.0
        self._rests_until = 0.0
        self._errors = self._skipped = 0

    def lookup(self, keys: Tensor) -> Found | None:
        """Return the rows that the tier has; None if it failed or is not retried yet."""
        if not self.may_try():
            return None
        try:
            found = self.tier.lookup(keys)
        except StorageError as error:
            self.note_error(error)
            return None
        self.note_success()
        return found

    def keep(self, keys: Tensor, rows: Tensor) -> None:
        """Insert rows that a slower tier had, if this one keeps them."""
        if not self._keeps_found or not keys.numel() or not self.may_try(counts=False):
            return
        try:
            self.tier.insert(keys, rows)
        except StorageError as error:
            self.note_error(error)

    def statistics(self) -> TierUseStatistics:
        with self._lock:
            return TierUseStatistics(
                name=self.tier.name,
                is_available=not self._pause,
                errors=self._errors,
                skipped=self._skipped,
                counted=self.tier.statistics(),
            )

    @property
    def is_available(self) -> bool:
        """Whether the last operation on the tier succeeded."""
        return not self._pause

    def may_try(self, *, counts: bool = True) -> bool:
        """Return whether the tier does not rest, or it is time to try it again."""
        # Read without the lock, which lookups of a tier that works would share: at worst one more tries a failed tier.
        if not self._pause:
            return True
        with self._lock:
            now = self._clock()
            if now < self._rests_until:
                self._skipped += counts
                return False
            self._rests_until = now + self._pause  # others wait for the outcome of this try
            return True

    def note_error(self, error: StorageError) -> None:
        """Pause the tier."""
        with self._lock:
            is_first = not self._pause
            self._errors += 1
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._rests_until = self._clock() + self._pause
        if is_first:
            _LOGGER.warning("tier %s: %s; lookups go on without it until it answers again", self.tier.name, error)

    def note_success(self) -> None:
        """Note that the tier answered."""
        if self._pause:
            with self._lock:
                self._pause = 0.0
            _LOGGER.warning("tier %s: answers again", self.tier.name)
