# SPDX-License-Identifier: Apache-2.0
"""`GroupCache`: rows of served tables in the memory of the compute device, in front of their tiers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.errors import ConfigError, TerarecError
from terarec.kernels.slots import TouchedMaps, admit_maps, new_slot_map, touch_maps
from terarec.memory.batch_parts import batch_of, joined
from terarec.memory.cache import SERVED_ROWS
from terarec.memory.level import ChangeCounts
from terarec.ops import BagLayout
from terarec.ops.bag_lookup import pool_rows
from terarec.parallel import FairLock
from terarec.ps.cache_memory import CacheMemory
from terarec.ps.table import Found, TableGroup
from terarec.repeating import RepeatedCall
from terarec.spec import CacheSpec

_LOGGER = logging.getLogger(__name__)
_MOST_WAITING = 64  # lookups whose missing keys wait to be read; those of later ones are dropped and missing again
_EVICTED_SHARE = 64  # of the slots, at once: finding those of the fewest uses passes over all of them
_REFRESH_ATTEMPTS = 3  # for rows that an update changes at the same time


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStatistics:
    """Counters of a cache.

    Attributes:
        keys: Keys that were looked up.
        hits: Keys found in the cache.
        read: Distinct keys that were read from the tiers at once.
        deferred: Keys that got the default vector while they were read in the background.
        dropped: Distinct keys that were not read, since too many were waiting or the cache was closed.
        inserted: Rows that were inserted.
        evicted: Rows that gave their slot to others.
        refreshed: Rows that were read again.
        rows: Rows now.
    """

    keys: int = 0
    hits: int = 0
    read: int = 0
    deferred: int = 0
    dropped: int = 0
    inserted: int = 0
    evicted: int = 0
    refreshed: int = 0
    rows: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the keys that the cache had; 0 before the first."""
        return self.hits / self.keys if self.keys else 0.0


class _Read(NamedTuple):
    """Rows of missing keys.

    Attributes:
        rows: float32[m, D]; the default vector for keys without one.
        mask: bool[m], the keys that have a row.
        deferred: For each table, whether its keys are read in the background.
    """

    rows: Tensor
    mask: Tensor
    deferred: list[bool]


class GroupCache:
    """Rows of tables of a group in the memory of a device, which one call looks up together. Any thread may use it.

    Rows of the fewest uses give their slots to others (`terarec.kernels.slots`). Rows that are read from the tiers are
    kept only if no row of their table changed since.

    Attributes:
        group: The tables.
        tables: Numbers of those that have rows here; a table of the cache is named by its place among them.
        spec: Form and policies.
        device: Device of the rows and of results.
        memory: The rows.
        slots: Map of the rows of each table.
        firsts: First row of each table in the memory.

    Raises:
        ConfigError: A table without rows.
        StorageError: Not enough memory for the rows.
    """

    def __init__(
        self, group: TableGroup, tables: Sequence[int], rows: Sequence[int], spec: CacheSpec, device: torch.device
    ) -> None:
        if min(rows) < 1:
            raise ConfigError("rows", f"got {min(rows)}, expected at least 1")
        self.group = group
        self.tables = tuple(tables)
        self.spec = spec
        self.device = device
        self.memory = CacheMemory(sum(rows), group.width, device, is_coded=spec.form == "int8")
        self.slots = [new_slot_map(count, device) for count in rows]
        self.firsts = (0, *accumulate(rows))[:-1]
        # Held for reads and writes of rows and of the slots; one for all tables, whose rows a lookup reads in one pass.
        self._lock = FairLock()
        self._changes = ChangeCounts(len(rows))
        self._counts = [dict.fromkeys(CacheStatistics.__dataclass_fields__, 0) for _ in rows]
        self._waiting: queue.Queue[tuple[int, Tensor] | None] = queue.Queue(_MOST_WAITING)
        self._reader: threading.Thread | None = None
        self._refresher: RepeatedCall | None = None
        self._is_closed = threading.Event()
        if spec.refresh_seconds:
            self._refresher = RepeatedCall(
                "terarec-cache-refresh",
                self._refresh_all,
                spec.refresh_seconds,
                spec.refresh_delay_seconds or spec.refresh_seconds,
            )

    def lookup(
        self,
        places: Sequence[int],
        keys: Tensor,
        ends: Sequence[int],
        offsets: Tensor,
        layout: BagLayout,
        key_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up bags of keys of some tables in one pass over their rows.

        Keys that are not here are read from the tiers and inserted. If the share of a table's distinct keys that are
        here is at least `hit_rate_threshold`, that happens in the background, and they get the default vector now.

        Args:
            places: Distinct tables.
            keys: int64[n] on any device, those of the bags; the keys of table i of `places` end before ``ends[i]``,
                where those of the next begin.
            ends: As above, rising; the last is n.
            offsets: int64[S * B + 1], bags of features.
            layout: Features, with the rows here as tables.
            key_weights: Factors of the keys' vectors.

        Returns:
            As `terarec.ops.bag_lookup`.

        Raises:
            ConfigError: Keys of another shape or type.
            StorageError: Keys are missing here, and the tables were closed or unloaded.
        """
        if keys.ndim != 1 or keys.dtype != torch.int64:
            raise ConfigError("keys", f"got {keys.dtype}{list(keys.shape)}, expected torch.int64[n]")
        memory = self.memory
        with self._lock:
            touched = touch_maps([self.slots[place] for place in places], keys.to(self.device), ends, pins=True)
            seen = self._changes.seen()
            for place, begin, end, absent in zip(places, (0, *ends), ends, touched.num_absent, strict=False):
                self._note(place, keys=end - begin, hits=end - begin - absent)
            if not touched.absent.numel():
                self._unpin(places, touched)
                return memory.lookup(touched.slots, offsets, layout, key_weights)
        try:
            # Without the lock: other lookups continue while rows are read. The slots found so far are pinned until the
            # end.
            read = self._read(places, touched)
            with self._lock:
                # Under one lock with the lookup, since the new rows are not pinned. Both take as long as these keys
                # need.
                slots = self._insert_read(places, touched, read, seen)
                if bool((slots >= 0).all()):
                    return memory.lookup(slots, offsets, layout, key_weights)
                firsts = _of_each([self.firsts[place] for place in places], ends, slots.device)
                rows = memory.rows(slots.clamp(min=0) + firsts)
        finally:
            with self._lock:
                self._unpin(places, touched)
        # Keys without a slot have the rows that were read.
        is_absent = slots[touched.absent] < 0
        rows[touched.absent[is_absent]] = read.rows.to(rows.device)[touched.places[is_absent]]
        return pool_rows(rows, offsets, layout, key_weights)

    def _unpin(self, places: Sequence[int], touched: TouchedMaps) -> None:
        for place, used in zip(places, torch.split(touched.used, list(touched.num_used)), strict=True):
            self.slots[place].unpin(used)

    def _read(self, places: Sequence[int], touched: TouchedMaps) -> _Read:
        """Read the rows of missing keys, or begin to in the background for tables that have enough of their keys."""
        missing, counts = touched.missing.cpu(), touched.num_missing
        is_open = not self._is_closed.is_set()  # else nothing reads in the background
        deferred = [
            is_open and count > 0 and used / (used + count) >= self.spec.hit_rate_threshold
            for used, count in zip(touched.num_used, counts, strict=True)
        ]
        parts = torch.split(missing, list(counts))
        wanted = [number for number, count in enumerate(counts) if count and not deferred[number]]
        lookup = self._find([places[number] for number in wanted], [parts[number] for number in wanted])
        if not any(deferred):
            return _Read(lookup.rows, lookup.mask, deferred)
        rows, mask = torch.empty(missing.numel(), self.group.width), torch.zeros(missing.numel(), dtype=torch.bool)
        occurrences = torch.split(touched.places, list(touched.num_absent))
        begin = done = 0
        for number, (place, part) in enumerate(zip(places, parts, strict=True)):
            end = begin + part.numel()
            if deferred[number]:
                rows[begin:end] = self.group.defaults[self.tables[place]](part)
                self._read_later(place, part.to(self.device), occurrences[number].numel())
            else:
                rows[begin:end] = lookup.rows[done : done + part.numel()]
                mask[begin:end] = lookup.mask[done : done + part.numel()]
                done += part.numel()
            begin = end
        return _Read(rows, mask, deferred)

    def _find(self, places: Sequence[int], keys: Sequence[Tensor]) -> Found:
        """Look up keys of distinct tables in the tiers at once; the rows come in the order of `places`."""
        if not places:
            return Found(torch.empty(0, self.group.width), torch.zeros(0, dtype=torch.bool))
        # A batch has its tables rising; a model may have its features in another order.
        numbers = [self.tables[place] for place in places]
        order = sorted(range(len(places)), key=lambda at: numbers[at])
        lookup = self.group.find(joined([batch_of(keys[at], numbers[at]) for at in order]))
        if order == list(range(len(places))):
            return lookup
        counts = [keys[at].numel() for at in order]
        rows, mask = (dict(zip(order, torch.split(part, counts), strict=True)) for part in lookup)
        return Found(*(torch.cat([part[at] for at in range(len(places))]) for part in (rows, mask)))

    def _insert_read(self, places: Sequence[int], touched: TouchedMaps, read: _Read, seen: Sequence[int]) -> Tensor:
        """Insert rows that were read, and return the slots int64[n] of all keys, -1 for keys without one."""
        missing, mask, ends = touched.missing, read.mask, list(accumulate(touched.num_missing))
        for place, count, is_deferred in zip(places, touched.num_missing, read.deferred, strict=True):
            self._note(place, read=0 if is_deferred else count)
        # A key that no tier has may get a row later, so the next lookup reads the tiers again.
        is_kept = [self.spec.form != "static" and self._changes.may_keep(place, seen) for place in places]
        rows = self.memory.packed(read.rows)
        if all(is_kept) and bool(mask.all()):
            new_slots, at = self._admit(places, missing, ends)
            self.memory.write_held(at, rows)
        else:
            keeps = mask.to(missing.device) & _of_each(is_kept, ends, missing.device)
            kept = keeps.nonzero()[:, 0]
            num_kept = torch.cat([keeps.new_zeros(1, dtype=torch.int64), keeps.cumsum(0)])
            some, at = self._admit(places, missing[kept], num_kept[torch.tensor(ends, device=kept.device)].tolist())
            self.memory.write_held(at, rows[kept])
            new_slots = torch.full_like(missing, -1)
            new_slots[kept] = some
        slots = touched.slots
        # Of repeated keys, all places get the slot of the one key.
        slots[touched.absent] = new_slots[touched.places]
        return slots

    def _admit(self, places: Sequence[int], keys: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Give keys of some tables slots.

        Args:
            places: The tables.
            keys: int64[n], those of a table distinct; those of table i of `places` end before ``ends[i]``.
            ends: As above, rising; the last is n.

        Returns:
            The slots int64[n], and their places int64[n] in the memory; -1 for keys that find all slots pinned by
            lookups that are under way.
        """
        maps = [self.slots[place] for place in places]
        slots, counts = admit_maps(maps, keys, ends, [slot_map.capacity // _EVICTED_SHARE for slot_map in maps])
        for place, (num_new, num_released) in zip(places, counts, strict=True):
            self._note(place, inserted=num_new, evicted=num_released)
        firsts = _of_each([self.firsts[place] for place in places], ends, keys.device)
        return slots, torch.where(slots >= 0, slots + firsts, -1)

    def insert(self, place: int, keys: Tensor, rows: Tensor, seen: Sequence[int] | None = None) -> None:
        """Insert ``rows float32[n, D]`` of ``keys int64[n]``, distinct; others may lose their slots.

        `seen` are the changes before the rows were read, which are left out after another one; None for rows that are
        as new as any.
        """
        for begin in range(0, keys.numel(), SERVED_ROWS):
            part = slice(begin, begin + SERVED_ROWS)
            # Copied to the device and coded before the lock is taken, for which lookups wait.
            some, values = keys[part].to(self.device), self.memory.packed(rows[part])
            with self._lock:
                # The next lookup of rows that may be old reads them.
                if seen is None or self._changes.may_keep(place, seen):
                    self.memory.write_held(self._admit([place], some, [some.numel()])[1], values)

    def update(self, place: int, keys: Tensor, rows: Tensor) -> None:
        """Set the rows ``float32[n, D]`` of those ``keys int64[n]`` of a table, distinct, that are here."""
        for begin in range(0, keys.numel(), SERVED_ROWS):
            part = slice(begin, begin + SERVED_ROWS)
            some = keys[part].to(self.device)
            with self._lock:
                # Also where none of these keys is here: a lookup may be reading their former rows right now.
                self._changes.note(place)
                slots = self.slots[place].find(some)
                is_held = slots >= 0
                if bool(is_held.any()):
                    values = self.memory.packed(rows[part].to(self.device)[is_held])
                    self.memory.write(slots[is_held] + self.firsts[place], values)

    def forget(self, place: int, keys: Tensor) -> None:
        """Remove the rows of ``keys int64[n]`` of a table."""
        for some in torch.split(torch.unique(keys.to(self.device)), SERVED_ROWS):
            with self._lock:
                self._changes.note(place)
                self._release(place, some)

    def _release(self, place: int, keys: Tensor) -> None:
        slots = self.slots[place].find(keys)
        self.slots[place].release(slots[slots >= 0])

    def refresh(self, place: int) -> int:
        """Read all rows of a table again, in parts, and remove rows that no tier has; return the rows read."""
        capacity = self.slots[place].capacity
        step = max(1, int(capacity * self.spec.refresh_share))
        return sum(self._refresh(place, begin, begin + step) for begin in range(0, capacity, step))

    def _refresh(self, place: int, begin: int, end: int) -> int:
        slot_map, table = self.slots[place], self.tables[place]
        for _ in range(_REFRESH_ATTEMPTS):
            with self._lock:
                keys = slot_map.owners.rows[begin:end][slot_map.is_held[begin:end]]
                seen = self._changes.seen()
            if not keys.numel() or self._is_closed.is_set():
                return 0
            lookup = self._find([place], [keys.cpu()])
            values, mask = self.memory.packed(lookup.rows), lookup.mask.to(self.device)
            # While a tier fails, the rows that it alone has only seem to be gone.
            may_drop = all(tier.is_available for tier in self.group.statistics(table).tiers)
            with self._lock:
                if not self._changes.may_keep(place, seen):
                    continue
                # Found again: rows may have been evicted while they were read.
                slots = slot_map.find(keys)
                stays = (slots >= 0) & mask
                self.memory.write(slots[stays] + self.firsts[place], values[stays])
                self._note(place, refreshed=int(stays.count_nonzero()))
                if may_drop:
                    self._release(place, keys[~mask])
            return keys.numel()
        return 0

    def _refresh_all(self) -> None:
        # Each table in its turn, whatever error another one raises: its rows stay as they are.
        with ExitStack() as turns:
            for place in reversed(range(len(self.tables))):
                turns.callback(self.refresh, place)

    def _read_later(self, place: int, missing: Tensor, occurrences: int) -> None:
        """Read rows of ``missing int64[n]``, distinct, in the background; a lookup has them `occurrences` times."""
        with self._lock:
            self._note(place, deferred=occurrences)
            try:
                if self._is_closed.is_set():  # its end is the last that the thread gets
                    raise queue.Full
                if self._reader is None:
                    # Started by the first lookup that needs it: most caches read all rows at once.
                    self._reader = threading.Thread(target=self._read_waiting, name="terarec-cache-read", daemon=True)
                    self._reader.start()
                # Never waits for room: a lookup that defers its keys has to return at once.
                self._waiting.put_nowait((place, missing))
            except queue.Full:
                self._note(place, dropped=missing.numel())

    def _read_waiting(self) -> None:
        # To the end of what waits, since `wait` and `close` count on that.
        while (waiting := self._waiting.get()) is not None:
            try:
                if not self._is_closed.is_set():
                    self._read_absent(*waiting)
            except TerarecError as error:
                _LOGGER.warning("embedding cache: %s; the next lookup reads the rows again", error)
            except Exception:  # the thread must live
                _LOGGER.exception("embedding cache: the next lookup reads the rows again")
            finally:
                self._waiting.task_done()
        self._waiting.task_done()

    def _read_absent(self, place: int, missing: Tensor) -> None:
        with self._lock:
            # Another lookup may have read them while they waited.
            missing, seen = missing[self.slots[place].find(missing) < 0].cpu(), self._changes.seen()
        lookup = self._find([place], [missing])
        with self._lock:
            self._note(place, read=missing.numel())
        if self.spec.form != "static":
            self.insert(place, missing[lookup.mask], lookup.rows[lookup.mask], seen)

    def wait(self) -> None:
        """Wait until the keys that are read in the background are there."""
        self._waiting.join()

    def _note(self, place: int, **counts: int) -> None:
        """Add to counters of a table. The caller holds the lock."""
        for name, count in counts.items():
            self._counts[place][name] += count

    def statistics(self, place: int) -> CacheStatistics:
        """Return the counters of a table."""
        with self._lock:
            return CacheStatistics(**{**self._counts[place], "rows": len(self.slots[place])})

    def close(self) -> None:
        """End the work in the background."""
        with self._lock:  # no lookup starts the thread, or gives it keys, from here on
            self._is_closed.set()
        if self._reader is not None:
            self._waiting.put(None)
            self._reader.join()
        if self._refresher is not None:
            self._refresher.close()
        self._reader = self._refresher = None


def _of_each(values: Sequence[int] | Sequence[bool], ends: Sequence[int], device: torch.device) -> Tensor:
    """Repeat the value of each table as often as it has keys."""
    counts = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
    return torch.tensor(values).repeat_interleave(torch.tensor(counts), output_size=ends[-1]).to(device)
