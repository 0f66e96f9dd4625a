# SPDX-License-Identifier: Apache-2.0
"""`Guarded`: a level whose tables rest after errors, so that lookups go on without it; and counters of its use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terarec.errors import StaleRowsError, StorageError, UnreachableError
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import TableSpan, table_spans
from terarec.memory.fence import Fence, OwnFence
from terarec.memory.level import Level

_LOGGER = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 4.0
_NO_KEYS = torch.zeros(0, dtype=torch.int64)
STATE = "loaded"
"""Key in the metadata of a table: the state of its rows, as of the last commit."""
MOST_MISSED_KEYS = 4_194_304
"""Keys that a table may miss before it is filled anew; 32 MiB of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierStatistics:
    """Counters of a table in a tier.

    Attributes:
        keys: Keys that were looked up.
        hits: Keys found.
        inserted: Rows that were inserted.
        evicted: Rows that were evicted.
        damaged: Rows of another size than the table's, which count as missing.
    """

    keys: int = 0
    hits: int = 0
    inserted: int = 0
    evicted: int = 0
    damaged: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TierUseStatistics:
    """A tier of a table.

    Attributes:
        name: Kind of the memory.
        is_available: Whether lookups read it: the last operation on it succeeded, and its rows are not stale.
        errors: Operations that failed.
        skipped: Lookups that passed it over while it rested after an error or was stale.
        is_stale: Whether it misses changes, or holds rows of another time; lookups pass it over until it is renewed.
        is_replaced: Whether lookups read it all the same: nothing else has all rows, and they are being replaced.
        missed: Changes of keys that it has missed so far.
        renewed: Times that it was brought up to date.
        counted: Statistics of the tier.
    """

    name: str
    is_available: bool
    errors: int
    skipped: int
    is_stale: bool = False
    is_replaced: bool = False
    missed: int = 0
    renewed: int = 0
    counted: TierStatistics


class _TableUse:
    """How a table of a level is used.

    Attributes:
        pause: Seconds of the present rest, 0 while the table works.
        is_read_stale: Whether reads try a stale table.
        missed: Keys whose changes a stale table has missed; None for any number of them, so that it is filled anew.
    """

    def __init__(self) -> None:
        self.pause = self.rests_until = 0.0
        self.errors = self.skipped = self.keys = self.hits = self.inserted = self.num_missed = self.renewed = 0
        self.is_stale = self.is_read_stale = False
        self.missed: list[Tensor] | None = []


class Guarded:
    """A level of which tables that fail rest: reads pass them over, as they do those whose rows are stale.

    One read tries a table again after 0.25 s, then after twice as long each time, at most 4 s. A table is stale from a
    failed change on, or once its fence notices rows of another time, until it is renewed.

    Attributes:
        level: The level.
        name: Kind of the memory: "host", "redis", "row_file" or "rocksdb".
        is_writable: For each table, whether rows can be written and erased; others are passed over.
        keeps_found: Whether rows that a slower level had are written here.
        share: Share of the rows of a table that are loaded here.
        fences: For each table, which state its rows are of.
        join: Lets other processes know that this one has the tables; None where no other can remove them.
        retain: Removes all rows of a table but those of keys int64[n]; None where no other process reads meanwhile.
        await_rows: Returns once the rows that another process loads are there, and calls its argument until then; None
            where none does.
        is_due: Returns whether it is time to look by `refresh` for what another process has committed; None where that
            is left to the caller.

    Args:
        num_tables: Number of tables.
        is_writable: As above; None for all of them.
        has_all: Whether all rows of a table are here, unless they come in when they are found.
        fences: As above; None for rows that no other process changes, with the state that their last commit notes.
        losses: Returns how many rows of a table were evicted, and how many were damaged; None where there are none.
        clock: Returns seconds.
    """

    def __init__(
        self,
        level: Level,
        name: str,
        num_tables: int,
        *,
        is_writable: Sequence[bool] | None = None,
        keeps_found: bool = False,
        share: float = 1.0,
        has_all: bool = True,
        fences: Sequence[Fence] | None = None,
        losses: Callable[[int], tuple[int, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.level = level
        self.name = name
        self.is_writable = (True,) * num_tables if is_writable is None else tuple(is_writable)
        self.keeps_found = keeps_found
        self.share = share
        self._has_all = has_all
        self.fences: list[Fence] = list(fences or map(self._noted, range(num_tables)))
        self.join: Callable[[], None] | None = None
        self.retain: Callable[[int, Tensor], None] | None = None
        self.await_rows: Callable[[Callable[[], None]], None] | None = None
        self.is_due: Callable[[], bool] | None = None
        self._losses = losses or (lambda table: (0, 0))
        self._clock = clock
        self._lock = threading.Lock()
        self._tables = [_TableUse() for _ in range(num_tables)]
        self._resting: set[int] = set()  # numbers of the tables that have a pause or are stale

    @property
    def is_complete(self) -> bool:
        """Whether it has all rows of its tables."""
        # What comes in when it is found may lack any row.
        return self._has_all and not self.keeps_found

    def _noted(self, table: int) -> OwnFence:
        return OwnFence(self.level.metadata(table).get(STATE, ""))

    def is_stale(self, table: int) -> bool:
        """Return whether a table misses changes, or has rows of another time."""
        return self._tables[table].is_stale

    def is_available(self, table: int) -> bool:
        """Return whether the last operation on a table succeeded and its rows are not stale."""
        return table not in self._resting

    def missed(self, table: int) -> Tensor | None:
        """Return the distinct keys int64[n] whose changes a stale table has missed; None if it is to be filled anew."""
        with self._lock:
            missed = self._tables[table].missed
            return None if missed is None else torch.unique(torch.cat([_NO_KEYS, *missed]))

    def miss(self, table: int, keys: Tensor | None) -> None:
        """Note keys whose changes a table misses, None for all of them; it is stale from here on."""
        use = self._tables[table]
        with self._lock:
            use.is_stale, use.is_read_stale = True, False
            self._resting.add(table)
            use.num_missed += 0 if keys is None else keys.numel()
            if use.missed is not None:
                num_keys = sum(some.numel() for some in use.missed) + (0 if keys is None else keys.numel())
                # The list must not grow without end while a server is away.
                use.missed = None if keys is None or num_keys > MOST_MISSED_KEYS else [*use.missed, keys]

    def fail(self, table: int, error: StorageError, keys: Tensor | None) -> None:
        """Note that a change failed: the table is stale, and misses the changes of `keys`, None for all."""
        self.note_error(table, error)
        # Of rows of another time it is not known which are old.
        self.miss(table, None if isinstance(error, StaleRowsError) else keys)

    def note_replacing(self, table: int) -> None:
        """Let reads find rows of a stale table while they are replaced, of before or new, if nothing else has any."""
        self._tables[table].is_read_stale = self.fences[table].takes_later

    def note_renewed(self, table: int) -> None:
        """Note that the rows of a table are up to date again."""
        use = self._tables[table]
        with self._lock:
            use.is_stale, use.is_read_stale, use.missed = False, False, []
            use.renewed += 1
        _LOGGER.warning("tier %s: is up to date again", self.name)
        self._note_success(table)

    def commit(self, table: int) -> None:
        """Make written rows of a table durable, with the name of their state; see `Level.commit`."""
        state = self.fences[table].state
        self.level.commit({**self.level.metadata(table), STATE: state} if state else None, table)

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the rows that another process loads are there; `check` may raise an error, which ends that.

        Raises:
            StorageError: The process ended before.
        """
        if self.await_rows is not None:
            self.await_rows(check)
            self.refresh()

    def refresh(self) -> bool:
        """Read the last commit of another process; see `Level.refresh`."""
        has_moved = self.level.refresh()
        if has_moved:
            for table, is_writable in enumerate(self.is_writable):
                # This process knows the state of the rows that it writes.
                if not is_writable:
                    self.fences[table] = self._noted(table)
        return has_moved

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows as `Level.read`; those of tables that fail, or are not tried again yet, are not found."""
        spans = table_spans(batch, len(self._tables))
        # Read without the lock, which lookups of a tier that works would share: at worst one more tries a failed tier.
        if not self._resting:
            return self._try(batch, out, spans)
        tried = [span for span in spans if self._may_try(span.table)]
        is_there = torch.zeros(batch.rows.numel(), dtype=torch.bool)
        if tried:
            places = torch.cat([torch.arange(span.begin, span.end) for span in tried])
            values, part = torch.empty(places.numel(), out.shape[1], dtype=torch.uint8), batch.part(places)
            there = self._try(part, values, table_spans(part, len(self._tables)))
            out[places[there]] = values[there]
            is_there[places] = there
        return is_there

    def _try(self, batch: RowBatch, out: Tensor, spans: Sequence[TableSpan]) -> Tensor:
        try:
            is_there = self.level.read(batch, out)
        except StorageError as error:
            is_there = torch.zeros(batch.rows.numel(), dtype=torch.bool)
            if len(spans) == 1 or isinstance(error, UnreachableError):
                for span in spans:
                    self.note_error(span.table, error)
                return is_there
            # One table may be damaged; the others are read without it.
            for span in spans:
                part = batch.part(span.places)
                is_there[span.places] = self._try(part, out[span.places], table_spans(part, len(self._tables)))
            return is_there
        self._count(is_there, spans)
        return is_there

    def _count(self, is_there: Tensor, spans: Sequence[TableSpan]) -> None:
        # Most often: then no table needs a pass of its own.
        all_there = bool(is_there.all())
        with self._lock:
            for span in spans:
                use, count = self._tables[span.table], span.end - span.begin
                use.keys += count
                use.hits += count if all_there else int(is_there[span.places].count_nonzero())
        if self._resting:
            for span in spans:
                self._note_success(span.table)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set distinct rows of tables that can be written; see `Level.write`."""
        spans = table_spans(batch, len(self._tables))
        for places in self._writable(spans):
            self.level.write(batch.part(places), values[places])
        with self._lock:
            for span in spans:
                self._tables[span.table].inserted += (span.end - span.begin) * self.is_writable[span.table]

    def erase(self, batch: RowBatch) -> None:
        """Remove distinct rows of tables that can be written; see `Level.erase`."""
        for places in self._writable(table_spans(batch, len(self._tables))):
            self.level.erase(batch.part(places))

    def _writable(self, spans: Sequence[TableSpan]) -> list[slice]:
        """Return the places of rows of tables that can be written, in one piece where these are all."""
        if not spans:
            return []
        if all(self.is_writable):
            return [slice(0, spans[-1].end)]
        return [span.places for span in spans if self.is_writable[span.table]]

    def keep(self, batch: RowBatch, values: Tensor) -> None:
        """Write distinct rows that a slower level had, except those of tables that rest."""
        for span in table_spans(batch, len(self._tables)):
            if self._may_try(span.table, counts=False):
                try:
                    self.write(batch.part(span.places), values[span.places])
                except StorageError as error:
                    self.note_error(span.table, error)

    def statistics(self, table: int) -> TierUseStatistics:
        """Return the counters of a table."""
        evicted, damaged = self._losses(table)
        with self._lock:
            use = self._tables[table]
            return TierUseStatistics(
                name=self.name,
                is_available=self.is_available(table),
                errors=use.errors,
                skipped=use.skipped,
                is_stale=use.is_stale,
                is_replaced=use.is_read_stale,
                missed=use.num_missed,
                renewed=use.renewed,
                counted=TierStatistics(
                    keys=use.keys, hits=use.hits, inserted=use.inserted, evicted=evicted, damaged=damaged
                ),
            )

    def _may_try(self, table: int, *, counts: bool = True) -> bool:
        """Return whether reads may try a table: it is not stale, and does not rest or it is time to try again."""
        use = self._tables[table]
        if not use.is_stale or use.is_read_stale:
            return self.is_rested(table, counts=counts)
        with self._lock:
            use.skipped += counts
        return False

    def is_rested(self, table: int, *, counts: bool = False, tries: bool = True) -> bool:
        """Return whether a table does not rest after an error, or it is time to try it again, as the caller `tries`."""
        use = self._tables[table]
        if not use.pause:
            return True
        with self._lock:
            now = self._clock()
            if now < use.rests_until:
                use.skipped += counts
                return False
            if tries:
                use.rests_until = now + use.pause  # others wait for the outcome of this try
            return True

    def note_error(self, table: int, error: StorageError) -> None:
        """Let a table rest. Rows of another state make it stale instead, as the memory does answer."""
        use = self._tables[table]
        with self._lock:
            # One warning until all tables answer again, and not one for each lookup.
            is_first = not self._resting
            use.errors += 1
            if not isinstance(error, StaleRowsError):
                use.pause = min(max(2 * use.pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
                use.rests_until = self._clock() + use.pause
            self._resting.add(table)
        if isinstance(error, StaleRowsError):
            self.miss(table, None)
        if is_first:
            _LOGGER.warning("tier %s: %s; lookups go on without it", self.name, error)

    def _note_success(self, table: int) -> None:
        with self._lock:
            if table not in self._resting:
                return
            self._tables[table].pause = 0.0
            # It answers, but lookups pass it over until it is renewed.
            if self._tables[table].is_stale:
                return
            self._resting.discard(table)
            is_last = not self._resting
        if is_last:
            _LOGGER.warning("tier %s: answers again", self.name)
