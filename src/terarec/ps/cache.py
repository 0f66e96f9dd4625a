"""`EmbeddingCache`: rows of a table in the memory of the compute device, in front of its tiers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terarec.errors import ConfigError, TerarecError
from terarec.kernels.slots import new_slot_map, row_set
from terarec.ops import BagLayout
from terarec.ops.bag_lookup import pool_rows
from terarec.ops.layout import single_layout
from terarec.ps.cache_memory import CacheMemory
from terarec.ps.table import TableTiers, find_together
from terarec.ps.tier import UPDATE_ROWS, Found
from terarec.spec import CacheSpec

_LOGGER = logging.getLogger(__name__)
_MOST_WAITING = 64  # lookups whose missing keys wait to be read; the keys of later ones are dropped and asked for again
INSERT_ROWS = 4_096  # under one hold of the lock, for which a lookup waits
_EVICTED_SHARE = 64  # of the slots, at once: finding those of the fewest uses passes over all of them
_REFRESH_ATTEMPTS = 3  # for rows that an update changes meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStatistics:
    """Counters of a cache.

    Attributes:
        keys: Keys that were looked up.
        hits: Keys found in the cache.
        read: Distinct keys that were read from the tiers at once.
        deferred: Keys that got the default vector while they were read in the background.
        dropped: Distinct keys that were not read, for too many waited.
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
        self._changes = 0  # updates so far: rows that were read from the tiers before one may be old
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
        return look_up([(self, keys)], offsets, self.layout)

    def insert(self, keys: Tensor, rows: Tensor, changes: int | None = None) -> None:
        """Insert ``rows float32[n, D]`` of ``keys int64[n]``, distinct; others may lose their slots.

        Args:
            keys: As above.
            rows: As above.
            changes: What `begin` returned before the rows were read: they are left out after an update; None for rows
                that are as new as any.
        """
        step = min(INSERT_ROWS, self.capacity)
        for begin in range(0, keys.numel(), step):
            part = slice(begin, begin + step)
            some, values = keys[part].to(self.device), self.memory.packed(rows[part])
            with self._lock:
                places = self.admit(some, changes)
                self.memory.write_held(places, values)

    def admit(self, keys: Tensor, changes: int | None) -> Tensor:
        """Give ``keys int64[n]``, distinct, places int64[n] in the memory of rows. The caller holds the lock.

        A place is -1 where there is none: after an update, and where lookups that are under way hold all slots.
        """
        # Rows that were read before an update may be the old ones; the next lookup of their keys reads them again.
        if changes is not None and changes != self._changes:
            return torch.full_like(keys, -1)
        slots, num_new, num_released = self.slots.admit(keys, self.capacity // _EVICTED_SHARE)
        self._count["inserted"] += num_new
        self._count["evicted"] += num_released
        return torch.where(slots >= 0, slots + self.first, -1)

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
                self._changes += 1
                slots = self.slots.find(some)
                is_held = slots >= 0
                if bool(is_held.any()):
                    values = self.memory.packed(rows[part].to(self.device)[is_held])
                    self.memory.write(slots[is_held] + self.first, values)

    def forget(self, keys: Tensor) -> None:
        """Remove the rows of ``keys int64[n]``."""
        for some in torch.split(torch.unique(keys.to(self.device)), UPDATE_ROWS):
            with self._lock:
                self._changes += 1
                self._release(some)

    def refresh(self) -> int:
        """Read all rows again from the tiers in parts; those that no tier has leave. Return the number of rows read."""
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

    def begin(self, keys: Tensor) -> _Asked:
        """Find the slots of ``keys int64[n]``, which are held until they are let go. The caller holds the lock."""
        asked = _Asked(self, keys, self._changes)
        self._count["keys"] += keys.numel()
        self._count["hits"] += keys.numel() - asked.absent.numel()
        return asked

    def note_read(self, count: int) -> None:
        """Count distinct keys that were read from the tiers. The caller holds the lock."""
        self._count["read"] += count

    def read_later(self, missing: Tensor, occurrences: int) -> None:
        """Read rows of ``missing int64[n]``, distinct, in the background; they were asked for `occurrences` times."""
        with self._lock:
            self._count["deferred"] += occurrences
            if not any(worker.name == "terarec-cache-read" for worker in self._workers):
                self._start(self._read_waiting, "terarec-cache-read")
        try:
            self._waiting.put_nowait(missing)
        except queue.Full:
            with self._lock:
                self._count["dropped"] += missing.numel()

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``slots int64[n]``. The caller holds the lock."""
        return self.memory.lookup(slots, torch.tensor([0, slots.numel()], device=self.device), self.layout)

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
                    missing, changes = missing[self.slots.find(missing) < 0], self._changes
                found = self.table.find(missing.cpu())
                with self._lock:
                    self.note_read(missing.numel())
                if self.spec.form != "static":
                    self.insert(missing.cpu()[found.mask], found.rows[found.mask], changes)
            except TerarecError as error:
                _LOGGER.warning("embedding cache: %s; the rows are asked for again by the next lookup", error)
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
                changes = self._changes
            if not keys.numel() or self._is_closed.is_set():
                return 0
            found = self.table.find(keys.cpu())
            values, mask = self.memory.packed(found.rows), found.mask.to(self.device)
            # While a tier fails, the rows that it alone has only seem to be gone.
            may_drop = all(tier.is_available for tier in self.table.statistics().tiers)
            with self._lock:
                if changes != self._changes:
                    continue
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


class _Asked:
    """Keys that one lookup asks of one cache."""

    def __init__(self, cache: EmbeddingCache, keys: Tensor, changes: int) -> None:
        self.cache, self._keys, self.changes = cache, keys, changes
        self.slots, self.used, self.absent = cache.slots.touch(keys, pins=True)
        self.missing = self.new_keys = self._places = keys[:0]
        self._rows = self.new_rows = torch.empty(0, cache.table.width, device=keys.device)
        self._is_deferred = False

    def defer(self) -> bool:
        """Return whether absent keys are read in the background, and begin to if so."""
        cache, absent_keys = self.cache, self._keys[self.absent]
        found = row_set(absent_keys)
        self.missing, self._places = absent_keys[found.firsts], found.places
        held, missing = self.used.numel(), self.missing.numel()
        self._is_deferred = held / (held + missing) >= cache.spec.hit_rate_threshold
        if self._is_deferred:
            self._rows = cache.table.default(self.missing.cpu()).to(cache.device)
            cache.read_later(self.missing, self.absent.numel())
        return self._is_deferred

    def take(self, found: Found) -> None:
        """Take over the rows of missing keys, which are inserted by `insert_together`."""
        self._rows = found.rows.to(self.cache.device)
        # A key that no tier has may get a row later: it is asked for again.
        is_complete = bool(found.mask.all())
        mask = found.mask.to(self.cache.device)
        self.new_keys = self.missing if is_complete else self.missing[mask]
        self.new_rows = self._rows if is_complete else self._rows[mask]

    def find_again(self) -> None:
        """Find the slots that the rows were inserted in, and count them. The caller holds the lock."""
        if not self._is_deferred:
            self.cache.note_read(self.missing.numel())
            self.slots[self.absent] = self.cache.slots.find(self.missing)[self._places]

    def copy_rows(self, rows: Tensor) -> None:
        """Copy the rows of absent keys that have no slot to ``rows float32[n, D]`` of all keys."""
        if not self.absent.numel():
            return
        is_absent = self.slots[self.absent] < 0
        rows[self.absent[is_absent]] = self._rows[self._places[is_absent]]


def look_up(
    asked: Sequence[tuple[EmbeddingCache, Tensor]],
    offsets: Tensor,
    layout: BagLayout,
    key_weights: Tensor | None = None,
) -> Tensor:
    """Look up bags of keys in caches that share their memory, in one pass over its rows.

    Args:
        asked: Caches, each with its keys int64[n] on any device; the keys of all are those of the bags.
        offsets: int64[S * B + 1], bags of features.
        layout: Features, with the rows of the caches as tables.
        key_weights: Factors of the keys' vectors.

    Returns:
        As `terarec.ops.bag_lookup`.

    Raises:
        ConfigError: Keys of another shape or type.
    """
    memory = asked[0][0].memory
    for _, keys in asked:
        if keys.ndim != 1 or keys.dtype != torch.int64:
            raise ConfigError("keys", f"got {keys.dtype}{list(keys.shape)}, expected torch.int64[n]")
    parts: list[_Asked] = []
    try:
        with memory.lock:
            parts.extend(cache.begin(keys.to(memory.device)) for cache, keys in asked)
            absent = [part for part in parts if part.absent.numel()]
            if not absent:
                return memory.lookup(_joined(parts), offsets, layout, key_weights)
        # Without the lock: other lookups go on while rows are read. The slots found so far are pinned until the end.
        _read(memory, [part for part in absent if not part.defer()])
        with memory.lock:
            for part in absent:
                part.find_again()
            slots = _joined(parts)
            if bool((slots >= 0).all()):
                return memory.lookup(slots, offsets, layout, key_weights)
            counts = [part.slots.numel() for part in parts]
            rows = torch.cat([part.cache.rows_of(part.slots.clamp(min=0)) for part in parts])
    finally:
        with memory.lock:
            for part in parts:
                part.cache.slots.let_go(part.used)
    for part, held in zip(parts, torch.split(rows, counts), strict=True):
        part.copy_rows(held)
    return pool_rows(rows, offsets, layout, key_weights)


def _read(memory: CacheMemory, parts: Sequence[_Asked]) -> None:
    """Read the rows of absent keys from the tiers and insert them."""
    if not parts:
        return
    for part, found in zip(
        parts, find_together([(part.cache.table, part.missing.cpu()) for part in parts]), strict=True
    ):
        part.take(found)
    waiting: list[_Asked] = []
    for part in parts:
        if part.cache.spec.form == "static":
            continue
        if part.new_keys.numel() > min(INSERT_ROWS, part.cache.capacity):
            part.cache.insert(part.new_keys, part.new_rows, part.changes)
            continue
        if sum(other.new_keys.numel() for other in waiting) + part.new_keys.numel() > INSERT_ROWS:
            _insert(memory, waiting)
            waiting = []
        waiting.append(part)
    _insert(memory, waiting)


def _insert(memory: CacheMemory, parts: Sequence[_Asked]) -> None:
    """Insert the rows of several caches under one hold of the lock, with one copy."""
    if not parts:
        return
    values = memory.packed(torch.cat([part.new_rows for part in parts]))
    with memory.lock:
        places = torch.cat([part.cache.admit(part.new_keys, part.changes) for part in parts])
        memory.write_held(places, values)


def _joined(parts: Sequence[_Asked]) -> Tensor:
    return parts[0].slots if len(parts) == 1 else torch.cat([part.slots for part in parts])
