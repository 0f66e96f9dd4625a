"""`EmbeddingCache`: rows of a table in the memory of the compute device, in front of its tiers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from terarec.errors import ConfigError, TerarecError
from terarec.kernels.slots import admit_maps, new_slot_map, touch_maps
from terarec.ops import BagLayout
from terarec.ops.bag_lookup import pool_rows
from terarec.ops.layout import single_layout
from terarec.ps.cache_memory import CacheMemory
from terarec.ps.table import TableTiers, find_together
from terarec.ps.tier import UPDATE_ROWS, Found
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
        dropped: Distinct keys that were not read, since too many were waiting.
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


class EmbeddingCache:
    """Rows of a table in the memory of a device. Any thread may use it.

    Rows of the fewest uses give their slots to others (`terarec.kernels.slots`).

    Args:
        table: The tiers behind it.
        rows: Maximum number of rows C.
        spec: Form and policies.
        device: Device of the rows and of results.
        memory: Memory of the rows that other caches share; None for one of its own.
        first: First row in that memory.

    Raises:
        StorageError: Not enough memory for the rows.
    """

    def __init__(
        self,
        table: TableTiers,
        rows: int,
        spec: CacheSpec,
        device: torch.device | None = None,
        *,
        memory: CacheMemory | None = None,
        first: int = 0,
    ) -> None:
        if rows < 1:
            raise ConfigError("rows", f"got {rows}, expected at least 1")
        self.spec = spec
        self.device = device or torch.device("cpu")
        self.first = first
        self.table = table
        self.memory = memory or CacheMemory(rows, table.width, self.device, is_coded=spec.form == "int8")
        self.slots = new_slot_map(rows, self.device)
        self.layout = replace(single_layout(rows, table.width, "none"), table_base=(first,))
        self._lock = self.memory.lock
        self.changes = 0  # updates so far: rows that were read from the tiers before one may be old
        self._count = dict.fromkeys(CacheStatistics.__dataclass_fields__, 0)
        self._waiting: queue.Queue[Tensor | None] = queue.Queue(_MOST_WAITING)
        self._workers: list[threading.Thread] = []
        self._is_closed = threading.Event()
        if spec.refresh_seconds:
            self._start(self._refresh_in_turns)

    @property
    def capacity(self) -> int:
        """Most rows C."""
        return self.slots.capacity

    def lookup(self, keys: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]`` on any device.

        Keys that the cache does not have are read from the tiers and inserted. If the share of the distinct keys that
        it has is at least `hit_rate_threshold`, that happens in the background, and they get the default vector now.

        Raises:
            ConfigError: Keys of another shape or type.
        """
        offsets = torch.tensor([0, keys.numel()], device=self.device)
        return look_up([self], keys, [keys.numel()], offsets, self.layout)

    def insert(self, keys: Tensor, rows: Tensor, changes: int | None = None) -> None:
        """Insert ``rows float32[n, D]`` of ``keys int64[n]``, distinct; others may lose their slots.

        Args:
            keys: As above.
            rows: As above.
            changes: What `begin` returned before the rows were read: they are left out after an update; None for rows
                that are as new as any.
        """
        for begin in range(0, keys.numel(), UPDATE_ROWS):
            part = slice(begin, begin + UPDATE_ROWS)
            # Copied to the device and coded before the lock is taken, for which lookups wait.
            some, values = keys[part].to(self.device), self.memory.packed(rows[part])
            with self._lock:
                # Rows that were read before an update may be the old ones; the next lookup of their keys reads them.
                if changes is None or changes == self.changes:
                    self.memory.write_held(admit([self], some, [some.numel()])[1], values)

    def fill(self, keys: Tensor, rows: Tensor) -> bool:
        """Insert rows while there is room, as before the first lookup; return whether there is room for more."""
        room = self.slots.room
        self.insert(keys[:room], rows[:room])
        return self.slots.room > 0

    def update(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows ``float32[n, D]`` of those ``keys int64[n]``, distinct, that the cache has."""
        for begin in range(0, keys.numel(), UPDATE_ROWS):
            part = slice(begin, begin + UPDATE_ROWS)
            some = keys[part].to(self.device)
            with self._lock:
                # Also where the cache has none of these keys: a lookup may be reading their former rows right now.
                self.changes += 1
                slots = self.slots.find(some)
                is_held = slots >= 0
                if bool(is_held.any()):
                    values = self.memory.packed(rows[part].to(self.device)[is_held])
                    self.memory.write(slots[is_held] + self.first, values)

    def forget(self, keys: Tensor) -> None:
        """Remove the rows of ``keys int64[n]``."""
        for some in torch.split(torch.unique(keys.to(self.device)), UPDATE_ROWS):
            with self._lock:
                self.changes += 1
                self._release(some)

    def refresh(self) -> int:
        """Read all rows again from the tiers, in parts, and remove rows that no tier has; return the rows read."""
        step = max(1, int(self.capacity * self.spec.refresh_share))
        return sum(self._refresh(begin, begin + step) for begin in range(0, self.capacity, step))

    def wait(self) -> None:
        """Wait until the keys that are read in the background are there."""
        self._waiting.join()

    def statistics(self) -> CacheStatistics:
        """Return the counters of the cache."""
        with self._lock:
            return CacheStatistics(**{**self._count, "rows": len(self.slots)})

    def close(self) -> None:
        """End the work in the background."""
        self._is_closed.set()
        if self._workers:
            self._waiting.put(None)
        for worker in self._workers:
            worker.join()
        self._workers = []

    def note(self, **counts: int) -> None:
        """Add to counters of the statistics. The caller holds the lock."""
        for name, count in counts.items():
            self._count[name] += count

    def read_later(self, missing: Tensor, occurrences: int) -> None:
        """Read rows of ``missing int64[n]``, distinct, in the background; a lookup has them `occurrences` times."""
        with self._lock:
            self._count["deferred"] += occurrences
            if not any(worker.name == "terarec-cache-read" for worker in self._workers):
                # Started by the first lookup that needs it: most caches read all rows at once.
                self._start(self._read_waiting, "terarec-cache-read")
        # Never waits for room: a lookup that defers its keys has to return at once.
        try:
            self._waiting.put_nowait(missing)
        except queue.Full:
            with self._lock:
                self._count["dropped"] += missing.numel()

    def _release(self, keys: Tensor) -> None:
        slots = self.slots.find(keys)
        self.slots.release(slots[slots >= 0])

    def _read_waiting(self) -> None:
        while True:
            missing = self._waiting.get()
            try:
                if missing is None or self._is_closed.is_set():
                    return
                with self._lock:
                    # Another lookup may have read them while they waited.
                    missing, changes = missing[self.slots.find(missing) < 0], self.changes
                found = self.table.find(missing.cpu())
                with self._lock:
                    self.note(read=missing.numel())
                if self.spec.form != "static":
                    self.insert(missing.cpu()[found.mask], found.rows[found.mask], changes)
            except TerarecError as error:
                _LOGGER.warning("embedding cache: %s; the next lookup reads the rows again", error)
            finally:
                self._waiting.task_done()

    def _refresh_in_turns(self) -> None:
        pause = self.spec.refresh_delay_seconds or self.spec.refresh_seconds
        while not self._is_closed.wait(pause):
            pause = self.spec.refresh_seconds
            try:
                self.refresh()
            except TerarecError as error:
                _LOGGER.warning("embedding cache: refresh: %s; the rows stay as they are", error)

    def _refresh(self, begin: int, end: int) -> int:
        for _ in range(_REFRESH_ATTEMPTS):
            with self._lock:
                keys = self.slots.owners.rows[begin:end][self.slots.is_held[begin:end]]
                changes = self.changes
            if not keys.numel() or self._is_closed.is_set():
                return 0
            found = self.table.find(keys.cpu())
            values, mask = self.memory.packed(found.rows), found.mask.to(self.device)
            # While a tier fails, the rows that it alone has only seem to be gone.
            may_drop = all(tier.is_available for tier in self.table.statistics().tiers)
            with self._lock:
                if changes != self.changes:
                    continue
                # Found again: rows may have been evicted while they were read.
                slots = self.slots.find(keys)
                stays = (slots >= 0) & mask
                self.memory.write(slots[stays] + self.first, values[stays])
                self._count["refreshed"] += int(stays.count_nonzero())
                if may_drop:
                    self._release(keys[~mask])
            return keys.numel()
        return 0

    def _start(self, work: Callable[[], None], name: str = "terarec-cache-refresh") -> None:
        worker = threading.Thread(target=work, name=name, daemon=True)
        self._workers.append(worker)
        worker.start()


def look_up(
    caches: Sequence[EmbeddingCache],
    keys: Tensor,
    ends: Sequence[int],
    offsets: Tensor,
    layout: BagLayout,
    key_weights: Tensor | None = None,
) -> Tensor:
    """Look up bags of keys in caches that share their memory, in one pass over its rows.

    Args:
        caches: Distinct caches.
        keys: int64[n] on any device, those of the bags; the keys of cache i end before ``ends[i]``, where those of the
            next begin.
        ends: As above, rising; the last is n.
        offsets: int64[S * B + 1], bags of features.
        layout: Features, with the rows of the caches as tables.
        key_weights: Factors of the keys' vectors.

    Returns:
        As `terarec.ops.bag_lookup`.

    Raises:
        ConfigError: Keys of another shape or type.
    """
    if keys.ndim != 1 or keys.dtype != torch.int64:
        raise ConfigError("keys", f"got {keys.dtype}{list(keys.shape)}, expected torch.int64[n]")
    memory = caches[0].memory
    with memory.lock:
        request = _CacheLookup(caches, keys.to(memory.device), ends)
        if not request.touched.absent.numel():
            request.unpin()
            return memory.lookup(request.touched.slots, offsets, layout, key_weights)
    try:
        # Without the lock: other lookups continue while rows are read. The slots found so far are pinned until the end.
        request.read()
        with memory.lock:
            # Under one lock with the lookup, since the new rows are not pinned. Both take as long as these keys need.
            slots = request.insert()
            if bool((slots >= 0).all()):
                return memory.lookup(slots, offsets, layout, key_weights)
            rows = memory.rows(request.places(slots.clamp(min=0)))
    finally:
        with memory.lock:
            request.unpin()
    return pool_rows(request.with_own_rows(rows, slots), offsets, layout, key_weights)


class _CacheLookup:
    """The keys of one lookup in several caches. The caller holds the lock."""

    def __init__(self, caches: Sequence[EmbeddingCache], keys: Tensor, ends: Sequence[int]) -> None:
        self._caches, self._ends = caches, ends
        self.touched = touch_maps([cache.slots for cache in caches], keys, ends, pins=True)
        self._changes = [cache.changes for cache in caches]
        self._found = Found(torch.empty(0, caches[0].table.width), torch.zeros(0, dtype=torch.bool))
        self._deferred: list[bool] = [False] * len(caches)
        begin = 0
        for cache, end, num_absent in zip(caches, ends, self.touched.num_absent, strict=True):
            cache.note(keys=end - begin, hits=end - begin - num_absent)
            begin = end

    def unpin(self) -> None:
        """Undo the pins. The caller holds the lock."""
        touched = self.touched
        for cache, used in zip(self._caches, torch.split(touched.used, list(touched.num_used)), strict=True):
            cache.slots.unpin(used)

    def places(self, slots: Tensor) -> Tensor:
        """Return the places int64[n] in the memory of ``slots int64[n]`` of all keys."""
        return slots + _of_each([cache.first for cache in self._caches], self._ends, slots.device)

    def read(self) -> None:
        """Read the rows of missing keys, or begin to in the background for caches that have enough of their keys."""
        touched, caches = self.touched, self._caches
        missing = touched.missing.cpu()
        counts = touched.num_missing
        for number, (cache, used, count) in enumerate(zip(caches, touched.num_used, counts, strict=True)):
            self._deferred[number] = count > 0 and used / (used + count) >= cache.spec.hit_rate_threshold
        parts = torch.split(missing, list(counts))
        wanted = [number for number, count in enumerate(counts) if count and not self._deferred[number]]
        found: Found | None = None
        if wanted:
            keys = missing if not any(self._deferred) else torch.cat([parts[number] for number in wanted])
            ends = list(accumulate(counts[number] for number in wanted))
            found = find_together([caches[number].table for number in wanted], keys, ends)
        if found is not None and not any(self._deferred):
            self._found = found
            return
        width, rest = caches[0].table.width, found
        rows, mask = torch.empty(missing.numel(), width), torch.zeros(missing.numel(), dtype=torch.bool)
        occurrences = torch.split(touched.places, list(touched.num_absent))
        begin = done = 0
        for number, (cache, part) in enumerate(zip(caches, parts, strict=True)):
            end = begin + part.numel()
            if self._deferred[number]:
                rows[begin:end] = cache.table.default(part)
                cache.read_later(part.to(cache.device), occurrences[number].numel())
            elif rest is not None and part.numel():
                rows[begin:end] = rest.rows[done : done + part.numel()]
                mask[begin:end] = rest.mask[done : done + part.numel()]
                done += part.numel()
            begin = end
        self._found = Found(rows, mask)

    def insert(self) -> Tensor:
        """Insert the rows that were read, and return the slots int64[n] of all keys, -1 for keys without one.

        The caller holds the lock.
        """
        touched, caches, memory = self.touched, self._caches, self._caches[0].memory
        missing, mask, ends = touched.missing, self._found.mask, list(accumulate(touched.num_missing))
        for cache, count, is_deferred in zip(caches, touched.num_missing, self._deferred, strict=True):
            cache.note(read=0 if is_deferred else count)
        # Rows that were read before an update may be the old ones. A key that no tier has may get a row later, so the
        # next lookup reads the tiers again.
        is_kept = [
            cache.spec.form != "static" and cache.changes == before
            for cache, before in zip(caches, self._changes, strict=True)
        ]
        rows = memory.packed(self._found.rows)
        if all(is_kept) and bool(mask.all()):
            given, places = admit(caches, missing, ends)
            memory.write_held(places, rows)
        else:
            keeps = mask.to(missing.device) & _of_each(is_kept, ends, missing.device)
            kept = keeps.nonzero()[:, 0]
            num_kept = torch.cat([keeps.new_zeros(1, dtype=torch.int64), keeps.cumsum(0)])
            some, places = admit(caches, missing[kept], num_kept[torch.tensor(ends, device=kept.device)].tolist())
            memory.write_held(places, rows[kept])
            given = torch.full_like(missing, -1)
            given[kept] = some
        slots = touched.slots
        # Of repeated keys, all places get the slot of the one key.
        slots[touched.absent] = given[touched.places]
        return slots

    def with_own_rows(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Return ``rows float32[n, D]`` of all keys, where keys without a slot have the rows that were read."""
        touched = self.touched
        is_absent = slots[touched.absent] < 0
        rows[touched.absent[is_absent]] = self._found.rows.to(rows.device)[touched.places[is_absent]]
        return rows


def admit(caches: Sequence[EmbeddingCache], keys: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Give keys slots in caches that share their memory. The caller holds the lock.

    Args:
        caches: Distinct caches.
        keys: int64[n], those of a cache distinct; those of cache i end before ``ends[i]``.
        ends: As above, rising; the last is n.

    Returns:
        The slots int64[n], and their places int64[n] in the memory; -1 for keys that find all slots pinned by lookups
        that are under way.
    """
    shares = [cache.capacity // _EVICTED_SHARE for cache in caches]
    slots, counts = admit_maps([cache.slots for cache in caches], keys, ends, shares)
    for cache, (num_new, num_released) in zip(caches, counts, strict=True):
        cache.note(inserted=num_new, evicted=num_released)
    firsts = _of_each([cache.first for cache in caches], ends, keys.device)
    return slots, torch.where(slots >= 0, slots + firsts, -1)


def _of_each(values: Sequence[int] | Sequence[bool], ends: Sequence[int], device: torch.device) -> Tensor:
    """Repeat the value of each cache as often as it has keys."""
    counts = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
    return torch.tensor(values).repeat_interleave(torch.tensor(counts), output_size=ends[-1]).to(device)
