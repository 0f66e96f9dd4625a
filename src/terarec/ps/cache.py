"""`EmbeddingCache`: rows of a table on the device that computes, in front of its tiers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from terarec.errors import ConfigError, TerarecError
from terarec.kernels.contract import ROW_TAIL_BYTES
from terarec.kernels.rows import allocate_rows
from terarec.ops import bag_lookup, quantize_rows, quantized_bag_lookup
from terarec.ops.layout import single_layout
from terarec.ps.cache_slots import CacheSlots
from terarec.ps.fair_lock import FairLock
from terarec.ps.table import TableTiers
from terarec.spec import CacheSpec

_LOGGER = logging.getLogger(__name__)
_MOST_WAITING = 64  # lookups whose missing keys wait to be read; the keys of later ones are dropped and asked for again
INSERT_ROWS = 4_096
"""Rows inserted under one hold of the lock, for which a lookup waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStatistics:
    """Counters of a cache.

    Attributes:
        keys: Keys that were looked up.
        hits: Those of them that the cache had.
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

    Args:
        table: The tiers behind it.
        rows: Most rows C.
        spec: Form and policies.
        device: Device of the rows and of results.

    Raises:
        StorageError: Not enough memory for the rows.
    """

    def __init__(self, table: TableTiers, rows: int, spec: CacheSpec, device: torch.device | None = None) -> None:
        if rows < 1:
            raise ConfigError("rows", f"got {rows}, expected at least 1")
        self.spec = spec
        self.device = device or torch.device("cpu")
        self._table = table
        self._slots = CacheSlots(rows, self.device)
        self._arena: _Arena = (_Codes if spec.form == "int8" else _Floats)(rows, table.width, self.device)
        self._lock = FairLock()
        self._count = dict.fromkeys(CacheStatistics.__dataclass_fields__, 0)
        self._waiting: queue.Queue[Tensor | None] = queue.Queue(_MOST_WAITING)
        self._workers: list[threading.Thread] = []
        self._is_closed = threading.Event()
        if spec.refresh_seconds:
            self._start(self._refresh_in_turns)

    @property
    def width(self) -> int:
        """Length D of a vector."""
        return self._table.width

    @property
    def capacity(self) -> int:
        """Most rows C."""
        return self._slots.capacity

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows and index."""
        return self._slots.memory_bytes + self._arena.memory_bytes

    def lookup(self, keys: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]`` on any device.

        Keys that the cache does not have are read from the tiers and inserted. If the share of the distinct keys that
        it has is at least `hit_rate_threshold`, that happens in the background, and they get the default vector now.

        Raises:
            ConfigError: Keys of another shape or type.
        """
        if keys.ndim != 1 or keys.dtype != torch.int64:
            raise ConfigError("keys", f"got {keys.dtype}{list(keys.shape)}, expected torch.int64[n]")
        keys = keys.to(self.device)
        with self._lock:
            slots = self._slots.find(keys)
            is_hit = slots >= 0
            hits = int(is_hit.count_nonzero())
            self._count["keys"] += keys.numel()
            self._count["hits"] += hits
            held = slots if hits == keys.numel() else slots[is_hit]
            self._slots.use(held)
            rows = self._arena.read(slots.clamp_(min=0))
            num_held = 0 if hits == keys.numel() else self._slots.num_distinct(held)
        if hits < keys.numel():
            is_missing = ~is_hit
            missing, places = torch.unique(keys[is_missing], return_inverse=True)
            if num_held / (num_held + missing.numel()) >= self.spec.hit_rate_threshold:
                rows[is_missing] = self._table.default(keys[is_missing].cpu()).to(self.device)
                self._read_later(missing, int(is_missing.count_nonzero()))
            else:
                rows[is_missing] = self._read_now(missing)[places]
        return rows

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Insert ``rows float32[n, D]`` of ``keys int64[n]``, distinct; others may lose their slots."""
        for begin in range(0, keys.numel(), min(INSERT_ROWS, self.capacity)):
            part = slice(begin, begin + min(INSERT_ROWS, self.capacity))
            some, values = keys[part].to(self.device), self._arena.packed(rows[part].to(self.device))
            with self._lock:
                slots, evicted = self._slots.assign(some)
                self._arena.write(slots, values)
                self._count["inserted"] += some.numel()
                self._count["evicted"] += evicted

    def fill(self, keys: Tensor, rows: Tensor) -> bool:
        """Insert rows while there is room, as before the first lookup; return whether there is room for more."""
        room = self._slots.room
        self.insert(keys[:room], rows[:room])
        return self._slots.room > 0

    def update(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows ``float32[n, D]`` of those ``keys int64[n]``, distinct, that the cache has."""
        for begin in range(0, keys.numel(), INSERT_ROWS):
            part = slice(begin, begin + INSERT_ROWS)
            some = keys[part].to(self.device)
            with self._lock:
                slots = self._slots.find(some)
                is_held = slots >= 0
                if bool(is_held.any()):
                    values = self._arena.packed(rows[part].to(self.device)[is_held])
                    self._arena.write(slots[is_held], values)

    def forget(self, keys: Tensor) -> None:
        """Remove the rows of ``keys int64[n]``."""
        with self._lock:
            self._slots.release(torch.unique(keys.to(self.device)))

    def refresh(self) -> int:
        """Read all rows again from the tiers, a part at a time; those that no tier has any more leave.

        Returns:
            How many rows were read.
        """
        step = max(1, int(self.capacity * self.spec.refresh_share))
        return sum(self._refresh(begin, begin + step) for begin in range(0, self.capacity, step))

    def wait(self) -> None:
        """Wait until the keys that are read in the background are there."""
        self._waiting.join()

    def statistics(self) -> CacheStatistics:
        """Return what the cache did so far."""
        with self._lock:
            return CacheStatistics(**{**self._count, "rows": len(self._slots)})

    def close(self) -> None:
        """End the work in the background."""
        self._is_closed.set()
        if self._workers:
            self._waiting.put(None)
        for worker in self._workers:
            worker.join()
        self._workers = []

    def _read_now(self, missing: Tensor) -> Tensor:
        found = self._table.find(missing.cpu())
        with self._lock:
            self._count["read"] += missing.numel()
        if self.spec.form != "static":
            # A key that no tier has may get a row later: it is asked for again.
            self.insert(missing.cpu()[found.mask], found.rows[found.mask])
        return found.rows.to(self.device)

    def _read_later(self, missing: Tensor, occurrences: int) -> None:
        with self._lock:
            self._count["deferred"] += occurrences
            if not any(worker.name == "terarec-cache-read" for worker in self._workers):
                self._start(self._read_waiting, "terarec-cache-read")
        try:
            self._waiting.put_nowait(missing)
        except queue.Full:
            with self._lock:
                self._count["dropped"] += missing.numel()

    def _read_waiting(self) -> None:
        while True:
            missing = self._waiting.get()
            try:
                if missing is None or self._is_closed.is_set():
                    return
                with self._lock:
                    missing = missing[self._slots.find(missing) < 0]
                self._read_now(missing)
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
        with self._lock:
            keys = self._slots.held_keys(begin, end)
        if not keys.numel() or self._is_closed.is_set():
            return 0
        found = self._table.find(keys.cpu())
        values = self._arena.packed(found.rows.to(self.device))
        mask = found.mask.to(self.device)
        with self._lock:
            slots = self._slots.find(keys)
            stays = (slots >= 0) & mask
            self._arena.write(slots[stays], values[stays])
            self._count["refreshed"] += int(stays.count_nonzero())
            if all(tier.is_available for tier in self._table.statistics().tiers):
                self._slots.release(keys[~mask])
        return keys.numel()

    def _start(self, work: Callable[[], None], name: str = "terarec-cache-refresh") -> None:
        worker = threading.Thread(target=work, name=name, daemon=True)
        self._workers.append(worker)
        worker.start()


class _Arena(Protocol):
    """Rows of slots in some form."""

    memory_bytes: int

    def packed(self, rows: Tensor) -> Tensor:
        """Return ``rows float32[n, D]`` in this form."""

    def write(self, slots: Tensor, values: Tensor) -> None:
        """Set the rows of ``slots int64[n]`` to packed values."""

    def read(self, slots: Tensor) -> Tensor:
        """Return copies of the rows float32[n, D] of ``slots int64[n]``."""


class _Floats:
    """Rows as float32."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        is_here = device.type == "cpu"
        shape = rows, width
        self._rows = torch.from_numpy(allocate_rows(shape)) if is_here else torch.zeros(shape, device=device)
        self._layout = single_layout(rows, width, "none")
        self.memory_bytes = 4 * self._rows.numel()

    def packed(self, rows: Tensor) -> Tensor:
        return rows

    def write(self, slots: Tensor, values: Tensor) -> None:
        self._rows.index_copy_(0, slots, values)

    def read(self, slots: Tensor) -> Tensor:
        offsets = torch.tensor([0, slots.numel()], device=slots.device)
        return bag_lookup(self._rows, slots, offsets, self._layout)


class _Codes:
    """Rows as 8-bit codes with a scale and an offset."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._rows = torch.zeros(rows, width + ROW_TAIL_BYTES, dtype=torch.uint8, device=device)
        self._layout = single_layout(rows, width, "none")
        self.memory_bytes = self._rows.numel()

    def packed(self, rows: Tensor) -> Tensor:
        return quantize_rows(rows)

    def write(self, slots: Tensor, values: Tensor) -> None:
        self._rows.index_copy_(0, slots, values)

    def read(self, slots: Tensor) -> Tensor:
        offsets = torch.tensor([0, slots.numel()], device=slots.device)
        return quantized_bag_lookup(self._rows, slots, offsets, self._layout)
