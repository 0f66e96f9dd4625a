# SPDX-License-Identifier: Apache-2.0
"""`Cache`: rows in host memory, bounded, in front of another level or of none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from terarec.kernels.slots import SLOT_BYTES, RowBatch, gather_from, touch_maps
from terarec.memory.batch_parts import by_partition, by_table, table_ends, table_spans
from terarec.memory.cached_part import CachedPart
from terarec.memory.level import ChangeCounts, FileLevel, clear_rows
from terarec.memory.row_store import RowStore
from terarec.parallel import FairLock
from terarec.spec import OverflowSpec

SERVED_ROWS = 1_024
"""Rows that are written under one hold of a lock for which lookups of a server wait: some 0.1 ms (Zen 4)."""
_WRITTEN_ROWS = 8_192  # under one hold of the lock, for which reads wait: 1.5 ms at 512 bytes
_PAUSED_ROWS = 4_096  # after which a write gives way to reads
# With a pause after 1,024 rows, 99 % of lookups during a delta took at most 2.8 to 4.2 ms, without one 4.2 to 4.3 ms;
# 1 M rows took 0.1 to 0.3 s longer (three turns on two busy Zen 4 cores).
_PAUSE_SECONDS = 50e-6


class Cache:
    """Rows in host memory in front of another level, or of none: then rows beyond the bound are an error or evicted.

    With one part, all rows of an arena are in it, by their arena rows. With more, each table has a part, or as many as
    there are partitions; the arena rows of a batch are then its keys, and its tables come one after the other, rising.

    Rows that are read below are kept only if no row of their part changed since: so a row that is older than what a
    write has left is never kept.

    Args:
        row_bytes: Bytes of a row.
        capacities: Slots of each part, or of a table's partitions; None for as many as memory has.
        below: Level of the rows that do not fit; None for none.
        name: Name of the tier, for errors.
        slot_bytes: Bytes that a slot takes besides its row.
        keeps_read: Whether rows that are read from the level below stay here, as those do that are written; not above
            which a faster tier keeps them.
        serves: Whether lookups of a server must not wait for writes for long.
        num_partitions: Parts of each table.
        overflow: Bound of the rows of a part.
    """

    def __init__(
        self,
        row_bytes: int,
        capacities: Sequence[int | None],
        below: FileLevel | None,
        *,
        name: str,
        slot_bytes: int = SLOT_BYTES,
        keeps_read: bool = False,
        serves: bool = False,
        num_partitions: int = 1,
        overflow: OverflowSpec | None = None,
    ) -> None:
        self.below = below
        self._at_once = SERVED_ROWS if serves else _WRITTEN_ROWS
        self.parts = [
            CachedPart(name, row_bytes, capacity, slot_bytes=slot_bytes, overflow=overflow, at_once=self._at_once)
            for capacity in capacities
            for _ in range(num_partitions)
        ]
        self._changes = ChangeCounts(len(self.parts))
        self._num_partitions = num_partitions
        # Uses decide which rows leave; without a bound none does, and a search is enough.
        self._counts_uses = below is not None or (overflow is not None and overflow.evict != "random")
        # Fair, since writes take it piece after piece: a read gets its turn between two pieces.
        self._lock = FairLock()
        self._keeps_read = keeps_read
        self._serves = serves
        self._num_reads = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of slots that were used, and of the level below."""
        below = 0 if self.below is None else self.below.memory_bytes
        return sum(part.memory_bytes for part in self.parts) + below

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of the level below."""
        return 0 if self.below is None else self.below.index_bytes

    @property
    def capacity(self) -> int:
        """Number of slots that may be used."""
        return sum(part.capacity for part in self.parts)

    def __len__(self) -> int:
        """Return the number of rows that are here."""
        return sum(len(part.slots) for part in self.parts)

    def evicted(self, table: int) -> int:
        """Return the rows of a table that were evicted for good."""
        return sum(part.evicted for part in self._parts_of(table))

    def lower(self, capacity: int) -> None:
        """Give up slots until `capacity` are left, writing changed rows to the level below, and their memory."""
        # Only training gives slots up, whose rows are in one part.
        (part,) = self.parts
        below = self.below
        if below is not None:
            with part.writing, self._lock:
                part.lower(capacity, lambda slots: _write_changed(below, part, part.slots.by_table(slots)))

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `Level.read`."""
        with self._lock:
            self._num_reads += 1
            # No pins: the rows are copied before the lock is released.
            is_there = self._read_here(batch, out)
            seen = self._changes.seen()
        if self.below is not None and not bool(is_there.all()):
            self._read_below(self.below, batch, seen, out, is_there)
        return is_there

    def _read_here(self, batch: RowBatch, out: Tensor) -> Tensor:
        if len(self.parts) == 1:
            slots = self._find(self.parts[0], batch.rows)
            self.parts[0].read(slots, out)
            return slots >= 0
        if self._num_partitions > 1:
            is_there = torch.empty(batch.rows.numel(), dtype=torch.bool)
            for span in table_spans(batch, len(self.parts) // self._num_partitions):
                parts = self._parts_of(span.table)
                is_there[span.places] = self._read_partitions(parts, batch.keys[span.places], out[span.places])
            return is_there
        ends = table_ends(batch, len(self.parts))
        slots = touch_maps([part.slots for part in self.parts], batch.rows, ends, pins=False).slots
        gather_from([part.values for part in self.parts], slots, ends, out)
        for part, begin, end in zip(self.parts, (0, *ends), ends, strict=False):
            part.note_use(slots[begin:end])
        return slots >= 0

    def _read_partitions(self, parts: Sequence[CachedPart], keys: Tensor, out: Tensor) -> Tensor:
        is_there = torch.zeros(keys.numel(), dtype=torch.bool)
        for number, places in by_partition(keys, self._num_partitions):
            # Each part copies to its places in the result; gathering its rows apart would copy them twice.
            slots = torch.full_like(keys, -1)
            slots[places] = self._find(parts[number], keys[places])
            parts[number].read(slots, out)
            is_there |= slots >= 0
        return is_there

    def _find(self, part: CachedPart, rows: Tensor) -> Tensor:
        slots = part.slots.touch(rows, pins=False).slots if self._counts_uses else part.slots.find(rows)
        part.note_use(slots)
        return slots

    def _read_below(self, below: FileLevel, batch: RowBatch, seen: Sequence[int], out: Tensor, hits: Tensor) -> None:
        """Read rows of `batch` that are not here, for which the lock need not be held."""
        # Not under the lock: rows that are here need not wait for a disk.
        absent = (~hits).nonzero()[:, 0]
        values = torch.empty(absent.numel(), out.shape[1], dtype=torch.uint8)
        there = below.read(batch.part(absent), values)
        got = absent[there]
        out[got] = values[there]
        hits[got] = True
        if not self._keeps_read or not got.numel():
            return
        kept, kept_values = batch.part(got), values[there]
        for number, places in self._by_part(kept):
            part = self.parts[number]
            with self._lock:
                # After a write or an erasure meanwhile, what was read may be old. The next read of these rows finds the
                # new ones.
                if self._changes.may_keep(number, seen):
                    part.keep(kept.part(places), kept_values[places])

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set rows; see `Level.write`."""
        for number, places in self._by_part(batch):
            part, rows, mine = self.parts[number], batch.part(places), values[places]
            at_once = max(1, min(part.capacity // 2, self._at_once)) if self.below is not None else self._at_once
            num_reads = self._num_reads
            for begin in range(0, rows.rows.numel(), at_once):
                some = slice(begin, begin + at_once)
                self._write_piece(number, rows.part(some), mine[some])
                if self._serves and begin % _PAUSED_ROWS == 0 and num_reads != (num_reads := self._num_reads):
                    # A core shared with lookups goes back to them now, not at the scheduler's next tick (up to 4 ms).
                    time.sleep(_PAUSE_SECONDS)

    def _write_piece(self, number: int, rows: RowBatch, values: Tensor) -> None:
        part, below, is_again = self.parts[number], self.below, False
        with part.writing:
            while True:
                with self._lock:
                    leaving = part.write(rows, values, is_backed=below is not None, is_again=is_again)
                    if not leaving.numel():
                        self._changes.note(number)
                        return
                assert below is not None, "without it no row leaves"
                # They are still here, for reads, and also if the level below fails.
                self._write_back(below, part, leaving, leaves=True)
                is_again = True  # a read may have taken the room

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `Level.erase`."""
        for number, places in self._by_part(batch):
            part, rows = self.parts[number], batch.part(places)
            for begin in range(0, rows.rows.numel(), self._at_once):
                some = rows.part(slice(begin, begin + self._at_once))
                with part.writing:
                    with self._lock:
                        self._changes.begin(number)  # what reads find below until the end, they do not keep
                    try:
                        # The level below does so first: if it fails, an older row there must not show.
                        if self.below is not None:
                            self.below.erase(some)
                        with self._lock:
                            part.erase(some.rows)
                    finally:
                        with self._lock:
                            self._changes.end(number)

    def _forget(self) -> None:
        """Drop all rows that were not changed: the level below has others now."""
        with self._lock:
            for number, part in enumerate(self.parts):
                self._changes.note(number)
                used = part.slots.used_slots
                # Changed rows stay: the level below does not have them yet.
                part.slots.release((part.slots.is_held[:used] & ~part.slots.is_dirty[:used]).nonzero()[:, 0])

    def clear(self, table: int) -> None:
        """Remove all rows of a table; see `Level.clear`. Without a level below, it has parts of its own."""
        if self.below is not None:
            clear_rows(self, table)
            return
        for number in self._numbers_of(table):
            with self.parts[number].writing, self._lock:
                self._changes.note(number)
                self.parts[number].clear()

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows of a table; see `Level.items`."""
        if self.below is not None:
            self._flush()
            yield from self.below.items(table, chunk_rows)
            return
        for part in self._parts_of(table):
            mine = part.of_table(table)
            for slots in torch.split(mine, chunk_rows) if mine.numel() else ():
                yield part.slots.owners.keys[slots], part.values[slots]

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `Level.count`."""
        if self.below is not None:
            self._flush()
            return self.below.count(table)
        with self._lock:
            return sum(part.of_table(table).numel() for part in self._parts_of(table))

    def metadata(self, table: int) -> Mapping[str, str]:
        """Return what the last commit noted; see `Level.metadata`."""
        return {} if self.below is None else self.below.metadata(table)

    def commit(self, metadata: Mapping[str, str] | None = None, table: int | None = None) -> None:
        """Make written rows durable; see `Level.commit`."""
        self._flush()
        if self.below is not None:
            self.below.commit(metadata, table)

    def refresh(self) -> bool:
        """Read the last commit of another process; see `Level.refresh`."""
        has_moved = self.below is not None and self.below.refresh()
        if has_moved:
            self._forget()  # which rows the other process changed is not known
        return has_moved

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table as a row file; see `FileLevel.snapshot`."""
        self._flush()
        return self.below is not None and self.below.snapshot(table, directory)

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `FileLevel.take_over`."""
        assert self.below is not None, "rows in memory alone have no store"
        with ExitStack() as stack:
            for part in self._parts_of(table):
                stack.enter_context(part.writing)
            stack.enter_context(self._lock)
            # Nothing is written back, since the store replaces all rows of the table.
            for number in self._numbers_of(table):
                self._changes.note(number)
                part = self.parts[number]
                part.slots.release(part.of_table(table))
            self.below.take_over(table, store)

    def close(self) -> None:
        """Release files and memory; see `Level.close`."""
        if self.below is not None:
            self.below.close()

    def _numbers_of(self, table: int) -> range:
        first = 0 if len(self.parts) == self._num_partitions else table * self._num_partitions
        return range(first, first + self._num_partitions)

    def _parts_of(self, table: int) -> list[CachedPart]:
        return [self.parts[number] for number in self._numbers_of(table)]

    def _by_part(self, batch: RowBatch) -> Iterator[tuple[int, Tensor | slice]]:
        """Yield each part that has rows of a batch, with their places."""
        if len(self.parts) == 1:
            if batch.rows.numel():
                yield 0, slice(None)
            return
        if self._num_partitions == 1:
            yield from by_table(batch)
            return
        for span in table_spans(batch, len(self.parts) // self._num_partitions):
            for number, places in by_partition(batch.keys[span.places], self._num_partitions):
                assert isinstance(places, Tensor)
                yield span.table * self._num_partitions + number, places + span.begin

    def _write_back(self, below: FileLevel, part: CachedPart, slots: Tensor, *, leaves: bool) -> None:
        """Write the changed rows of pinned slots below, and unpin them; the caller holds `writing` of the part alone.

        `slots` int64[n] come table by table.
        """
        is_written = False
        try:
            # Not under the lock: reads need not wait for a disk.
            _write_changed(below, part, slots)
            is_written = True
        finally:
            with self._lock:
                if is_written and leaves:
                    part.leave(slots)
                else:
                    part.stay(slots, is_written=is_written)

    def _flush(self) -> None:
        if self.below is None:
            return
        for part in self.parts:
            with self._lock:
                changed = part.slots.is_dirty[: part.slots.used_slots].nonzero()[:, 0]
            for slots in torch.split(changed, _WRITTEN_ROWS):
                with part.writing:
                    # A row may have been written or evicted since the list was made.
                    with self._lock:
                        leaving = part.kept(slots[part.slots.is_dirty[slots]])
                    self._write_back(self.below, part, leaving, leaves=False)


def _write_changed(below: FileLevel, part: CachedPart, slots: Tensor) -> None:
    if slots.numel():
        below.write(part.owners(slots), part.values[slots])
