# SPDX-License-Identifier: Apache-2.0
"""`Stack`: levels of the same served tables, one behind the other, the fastest first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from terarec.closer import Closer
from terarec.errors import StaleRowsError, StorageError
from terarec.kernels.slots import RowBatch, row_set
from terarec.memory.batch_parts import table_spans
from terarec.memory.fence import Fence
from terarec.memory.guarded import Guarded
from terarec.memory.level import ChangeCounts
from terarec.memory.renewal import RowSource, StaleTable, renew
from terarec.repeating import RepeatedCall

WATCH_SECONDS = 1.0
"""Between two looks for what other processes have committed, where no lookup looks."""


class Stack:
    """Levels in which a row is looked for, one after the other, until one has it.

    Attributes:
        levels: The levels, the fastest first.
        num_tables: Number of tables.
        is_retired: Whether rows may change no more, as they are about to be removed; once True, for good.
        has_moved: Whether other processes have committed what no `refresh` has told of yet, as lookups have seen.
    """

    def __init__(self, levels: Sequence[Guarded], num_tables: int, row_bytes: int) -> None:
        self.levels = tuple(levels)
        self.num_tables = num_tables
        self.is_retired = self.has_moved = False
        self._row_bytes = row_bytes
        # Held while a level keeps what a slower one had, and where an update begins or ends.
        self._keeping = threading.Lock()
        self._changes = ChangeCounts(num_tables)
        # Held by the one thread that changes rows of a table; the keys of its change so far, None between changes.
        self._changing = [threading.RLock() for _ in range(num_tables)]
        self._changed: list[list[Tensor] | None] = [None] * num_tables
        # For which levels another process has made that change.
        self._made: list[list[Guarded]] = [[] for _ in range(num_tables)]
        # Levels of which reads look for what other processes have committed.
        self._looking = [(place, level.is_due) for place, level in enumerate(self.levels) if level.is_due is not None]
        self._closer: Closer | None = None
        complete = [level for level in self.levels if level.is_complete]
        for level in self.levels:
            for fence in level.fences:
                fence.takes_later = all(other is level for other in complete)

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `Level.read`. Levels that fail are passed over."""
        if self._looking:
            self._look()
        # Without the lock, which is held while a server takes rows.
        seen = self._changes.seen()
        is_there = self.levels[0].read(batch, out)
        for number in range(1, len(self.levels)):
            missing = (~is_there).nonzero()[:, 0]
            if not missing.numel():
                break
            # In slow levels a row is looked up once.
            wanted, places = _distinct(batch.part(missing), self.num_tables)
            values = torch.empty(wanted.rows.numel(), out.shape[1], dtype=torch.uint8)
            there = self.levels[number].read(wanted, values)
            has_row = there[places]
            got = missing[has_row]
            out[got] = values[places[has_row]]
            is_there[got] = True
            # Levels that keep what they lacked find it themselves the next time.
            self._keep(number, wanted.part(there.nonzero()[:, 0]), values[there], seen)
        return is_there

    def _look(self) -> None:
        """Read the last commits of other processes, where it is time for that."""
        for place, is_due in self._looking:
            if is_due():
                with suppress(StorageError):  # which reads of the level raise, too
                    self._refresh(place)

    def watch(self) -> None:
        """Look for commits of other processes also where no lookup does, until `close` or `follow`.

        The files of a commit take memory until all processes have moved on to a later one.
        """
        if self._looking and self._closer is None:
            # Weak, as the thread must not keep what nobody closes.
            watcher = RepeatedCall("terarec-watch-rows", partial(_look_in, weakref.ref(self)), WATCH_SECONDS)
            self._closer = Closer(self, watcher.close, at_exit=False)

    def _keep(self, number: int, batch: RowBatch, values: Tensor, seen: Sequence[int]) -> None:
        """Write rows of the level `number` to those before it that keep them, unless they may be old."""
        keeping = [level for level in self.levels[:number] if level.keeps_found]
        if not keeping or not batch.rows.numel():
            return
        # Changes begin and end under this lock, too: none does so between the look and the write.
        with self._keeping:
            for span in table_spans(batch, self.num_tables):
                if self._changes.may_keep(span.table, seen):
                    for level in keeping:
                        level.keep(batch.part(span.places), values[span.places])

    @contextmanager
    def changing(self, table: int, state: str | None = None, through: Collection[str] = ()) -> Iterator[None]:
        """Change rows of a table by `write` and `erase` in one go; other threads that change its rows wait.

        Args:
            table: Number of the table.
            state: Name of the state that the change leads to, which levels note beside the rows; None to keep the name.
            through: Names of states on the way there: a level that another process brought to one of them takes the
                change as well.

        Raises:
            StorageError: No level with all rows can be changed, or rows may change no more.
        """
        with self._changing[table]:
            if self._changed[table] is not None:  # part of a change
                yield
                return
            # Under the lock, which `clear` takes: a change that begins later would leave rows where all were removed.
            if self.is_retired:
                raise StorageError("tables", "were closed or unloaded, expected a loaded version")
            self._changed[table] = []
            try:
                with self._updating_tables([table]):
                    self._change(table, partial(self._begin, table=table, state=state, through=through))
                    yield
                    # What a level that fails now has stored of this change is not known.
                    self._change(table, lambda level: level.fences[table].end())
            finally:
                self._changed[table], self._made[table] = None, []

    def _begin(self, level: Guarded, table: int, state: str | None, through: Collection[str]) -> None:
        if level.fences[table].begin(state, through):
            self._made[table].append(level)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set distinct rows in all levels that can be written, the slowest first; see `Level.write`.

        A level that fails is stale from then on, and the others take the rows.

        Raises:
            StorageError: No level with all rows can be written; others may have the rows by then.
        """
        # If one fails, the faster ones, which lookups read first, still have the former rows.
        for span in table_spans(batch, self.num_tables):
            part, rows = batch.part(span.places), values[span.places]
            with self._noting(span.table, part.keys):
                self._change(span.table, partial(Guarded.write, batch=part, values=rows))

    def erase(self, batch: RowBatch) -> None:
        """Remove distinct rows from all levels that can be written; errors are those of `write`."""
        for span in table_spans(batch, self.num_tables):
            part = batch.part(span.places)
            with self._noting(span.table, part.keys):
                # If one fails, lookups still find the former rows in the slower ones.
                self._change(span.table, partial(Guarded.erase, batch=part), is_fastest_first=True)

    @contextmanager
    def _noting(self, table: int, keys: Tensor) -> Iterator[None]:
        """Change some keys, which stale levels miss."""
        with self.changing(table):
            changed = self._changed[table]
            assert changed is not None
            changed.append(keys)
            for level in self.levels:
                if level.is_stale(table) and level.is_writable[table]:
                    level.miss(table, keys)
            yield

    def _change(self, table: int, change: Callable[[Guarded], None], *, is_fastest_first: bool = False) -> None:
        """Do something with each level that can be written and is not stale."""
        writable = [level for level in self.levels if level.is_writable[table]]
        # Where no level has all rows, any that takes the change is enough.
        complete = [level for level in writable if level.is_complete] or writable
        failed: list[tuple[Guarded, StorageError]] = []
        taken: list[Guarded] = []
        for level in writable if is_fastest_first else reversed(writable):
            if level.is_stale(table):
                continue
            try:
                if level not in self._made[table]:
                    change(level)
                taken.append(level)
            except StorageError as error:
                failed.append((level, error))
        if writable and not any(level in taken for level in complete):
            for level, problem in failed:
                # Others may still be read, as those of a full disk, and so may later ones that nothing else has.
                if isinstance(problem, StaleRowsError) and not (problem.is_later and level.fences[table].takes_later):
                    level.note_error(table, problem)
            if not failed:
                raise StorageError("tiers", "all are stale, expected one that holds the rows")
            raise failed[0][1]
        for level, problem in failed:
            # All keys of the change: a server that comes back may have lost what it had stored of it.
            level.fail(table, problem, torch.cat([torch.zeros(0, dtype=torch.int64), *(self._changed[table] or ())]))

    def renew(
        self,
        table: int,
        state: str | None = None,
        source: RowSource | None = None,
        turn: AbstractContextManager[object] | None = None,
    ) -> int:
        """Bring stale levels of a table up to date that can be written again; return how many are.

        A level gets the keys that it missed. One that came back with rows of another time is filled anew.

        Args:
            table: Number of the table.
            state: Name of the state that the rows are of; None for the one of before.
            source: All rows of that state; None to take them from a level that has them.
            turn: Held while all rows of a level are replaced; calls for several tables may share a semaphore; None for
                nothing.
        """
        # The usual case, without the lock that changes take.
        if not any(level.is_stale(table) for level in self.levels):
            return 0
        with self._changing[table], self._updating_tables([table]):
            writable = () if self.is_retired else [level for level in self.levels if level.is_writable[table]]
            stale = [level for level in writable if level.is_stale(table)]
            return sum(self._renew(level, table, state, source, turn) for level in stale)

    def _renew(
        self,
        level: Guarded,
        table: int,
        state: str | None,
        source: RowSource | None,
        turn: AbstractContextManager[object] | None,
    ) -> bool:
        others = [other for other in self.levels if other is not level and other.is_complete]
        donor = next((other for other in others if other.is_available(table)), None)
        # Without rows to fill it with, a call must not use up the try of the next one, which may have them.
        if not level.is_rested(table, tries=bool(donor or source or not level.is_complete)):
            return False
        try:
            is_renewed = renew(StaleTable(level, table, self._row_bytes), state, donor, source, turn)
        except StorageError as error:
            level.note_error(table, error)
            return False
        if is_renewed:
            level.note_renewed(table)
        return is_renewed

    def clear(self, table: int) -> None:
        """Remove all rows of a table from all levels that can be written, for good; see `Level.clear`.

        Those that other processes look up stay.
        """
        self._clear(table, lambda fence: not fence.leave())

    def give_up(self, table: int) -> None:
        """Remove what loading of a table has written that failed; rows that were there before, or others use, stay."""
        self._clear(table, lambda fence: fence.give_up() and not fence.leave())

    def _clear(self, table: int, clears: Callable[[Fence], bool]) -> None:
        with self._changing[table], self._updating_tables([table]):
            for level in self.levels:
                if level.is_writable[table] and clears(level.fences[table]):
                    # Past the guard: who removes a table has to know that rows stay.
                    level.level.clear(table)
                    level.fences[table].remove()

    @contextmanager
    def _updating_tables(self, tables: Sequence[int]) -> Iterator[None]:
        with self._keeping:
            for table in tables:
                self._changes.begin(table)
        try:
            yield
        finally:
            with self._keeping:
                for table in tables:
                    self._changes.end(table)

    def commit(self, table: int) -> None:
        """Make written rows of a table durable; see `Level.commit`."""
        for level in self.levels:
            if level.is_writable[table] and not level.is_stale(table):
                level.commit(table)

    def refresh(self) -> bool:
        """Read the last commits of other processes, and renew stale levels from others; see `Level.refresh`."""
        for place in range(len(self.levels)):
            self._refresh(place)
        for table in range(self.num_tables):
            self.renew(table)
        has_moved = self.has_moved
        if has_moved:  # not cleared otherwise: a lookup may see a commit here
            self.has_moved = False
        return has_moved

    def _refresh(self, place: int) -> None:
        tables = range(self.num_tables)
        with self._updating_tables(tables):  # what was read before is not kept
            if self.levels[place].refresh():
                self.has_moved = True
                self._forget_kept(place, tables)  # which rows the other process changed is not known

    def follow(self, state: str) -> bool:
        """Read the last commits of other processes where rows are not of a state; return whether all are now.

        From the first call on lookups see such commits by these calls alone.

        Faster levels forget what they kept, unless the rows are of `state` now: the caller then knows what has changed.
        """
        self._looking = []
        for place, level in enumerate(self.levels):
            behind = self._behind(level, state)
            with self._updating_tables(behind):
                if behind and level.refresh():
                    self._forget_kept(place, self._behind(level, state))
        # Rows without a name are as good as any.
        return not any(level.fences[table].state for level in self.levels for table in self._behind(level, state))

    def _behind(self, level: Guarded, state: str) -> list[int]:
        """Return the tables whose rows another process writes, and which are not of a state."""
        return [
            table
            for table in range(self.num_tables)
            if not level.is_writable[table] and level.fences[table].state != state
        ]

    def _forget_kept(self, place: int, tables: Iterable[int]) -> None:
        for faster in self.levels[:place]:
            for table in tables:
                if faster.keeps_found and faster.is_writable[table]:
                    try:
                        faster.level.clear(table)
                    except StorageError as error:  # lookups pass over what it still has
                        faster.fail(table, error, None)

    def close(self) -> None:
        """Close all levels."""
        if self._closer is not None:
            self._closer()
        for level in self.levels:
            level.level.close()


def _look_in(reference: weakref.ref[Stack]) -> None:
    stack = reference()
    if stack is not None:
        stack._look()


def _distinct(batch: RowBatch, num_tables: int) -> tuple[RowBatch, Tensor]:
    """Return each row once, in the order in which they first occur, and the place of each row among them."""
    names = row_set(batch.keys)
    if num_tables > 1:
        names = row_set(names.places * num_tables + batch.tables)
    return batch.part(names.firsts), names.places
