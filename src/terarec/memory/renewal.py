# SPDX-License-Identifier: Apache-2.0
"""Renewal of stale levels: what they missed, or all rows, from another level or a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from terarec.errors import StaleRowsError
from terarec.memory.batch_parts import batch_of
from terarec.memory.guarded import Guarded
from terarec.memory.row_store import SCAN_ROWS

_PART_KEYS = 65_536
_NO_KEYS = torch.zeros(0, dtype=torch.int64)


class RowChunk(NamedTuple):
    """Some rows of a table: keys int64[n], distinct, and rows float32[n, D]."""

    keys: Tensor
    rows: Tensor


class RowSource(Protocol):
    """All rows of a table."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    @property
    def earlier(self) -> Collection[str]:
        """Names of states that come before that of the rows."""

    @property
    def read(self) -> Callable[[], Iterator[RowChunk]]:
        """Yields them."""


class StaleTable(NamedTuple):
    """A table of a level that misses changes, or has rows of another time."""

    level: Guarded
    table: int
    row_bytes: int


def renew(
    stale: StaleTable,
    state: str | None,
    donor: Guarded | None,
    source: RowSource | None,
    turn: AbstractContextManager[object] | None = None,
) -> bool:
    """Bring a stale table of a level up to date; return whether it is.

    Args:
        stale: The table.
        state: Name of the state that the rows are to be of; None for the one of before.
        donor: A level with all rows; None for none.
        source: All rows of `state`, for where the donor does not have that.
        turn: Held while all rows are replaced: before it, lookups find those that are there; None for nothing.

    Raises:
        StorageError: The level or the donor cannot be reached, or another process is changing the rows.
    """
    level, table, _ = stale
    fence, missed = level.fences[table], level.missed(table)
    if donor is not None and source is not None and donor.fences[table].state != state:
        donor = None
    try:
        fence.compare()
    except StaleRowsError as error:
        if fence.adopt(state):
            missed = missed if missed is not None else _NO_KEYS
        elif error.is_later and not fence.adopt(*(source.earlier if source is not None else ())):
            raise
        else:
            missed = None
    if donor is None and source is None and level.is_complete and (missed is None or missed.numel()):
        return False
    if missed is None:
        if level.missed(table) is not None:
            level.miss(table, None)  # also where filling fails before a mark of its own stands there
        replacement = Replacement(level, table, state)
        with turn or nullcontext():
            _fill(stale, replacement, donor, source)
    elif fence.begin(state):
        return True
    else:
        _catch_up(stale, missed, donor, source)
        fence.end()
    return True


class Replacement:
    """Rows of a table of a level in place of all that are there, of any state.

    Rows that several processes look up are overwritten, and those of other keys removed last, so that none is missing
    meanwhile; others are removed first.

    With `may_keep`, rows that are of that state already, or of none, may stay.
    """

    def __init__(self, level: Guarded, table: int, state: str | None, *, may_keep: bool = False) -> None:
        self._level, self._table = level, table
        self._fence = level.fences[table]
        removes = self._fence.reset(state) or not may_keep
        self._keys: list[Tensor] = []  # those of the new rows, where others are removed last
        self._retain = level.retain if removes and level.is_complete else None
        if self._retain is not None:
            level.note_replacing(table)
        elif removes:
            level.level.clear(table)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Set rows ``uint8[n, row_bytes]`` of ``keys int64[n]``, distinct; errors are those of `Guarded.write`."""
        self._level.write(batch_of(keys, self._table), values)
        if self._retain is not None:
            self._keys.append(keys)

    def end(self) -> None:
        """Remove the rows of other keys, and note the state; errors are those of `Fence.end`."""
        if self._retain is not None:
            self._retain(self._table, torch.cat([_NO_KEYS, *self._keys]))
        self._fence.end()


def _fill(stale: StaleTable, replacement: Replacement, donor: Guarded | None, source: RowSource | None) -> None:
    """Replace all rows by those that loading would insert."""
    level, table, _ = stale
    if donor is not None:
        chunks, num_rows = donor.level.items(table, SCAN_ROWS), donor.level.count(table)
    elif source is not None:
        chunks, num_rows = map(_as_bytes, source.read()), source.num_rows
    else:
        chunks, num_rows = iter(()), 0  # lookups find the rows in slower levels
    # A complete level with a share of 0 has rows that others wrote there, and now has to get them from here. It gets
    # all that come: a server may name a key twice, and has others than those counted by then.
    room = sys.maxsize if level.is_complete else round(level.share * num_rows)
    for keys, values in chunks:
        if room <= 0:
            break
        replacement.write(keys[:room], values[:room])
        room -= keys.numel()
    replacement.end()


def _catch_up(stale: StaleTable, missed: Tensor, donor: Guarded | None, source: RowSource | None) -> None:
    """Change the rows of ``missed int64[n]``, distinct."""
    level, table, row_bytes = stale
    if not level.is_complete or donor is None:
        level.erase(batch_of(missed, table))  # where a level has not all rows, lookups find these in slower ones
    if not level.is_complete:
        return
    if donor is not None:
        for keys in torch.split(missed, _PART_KEYS):
            batch = batch_of(keys, table)
            values = torch.empty(keys.numel(), row_bytes, dtype=torch.uint8)
            there = donor.level.read(batch, values)
            level.erase(batch.part((~there).nonzero()[:, 0]))
            level.write(batch.part(there.nonzero()[:, 0]), values[there])
    elif source is not None:
        for keys, values in map(_as_bytes, source.read()):
            level.fences[table].extend()  # also where none of the keys was missed for long
            is_missed = torch.isin(keys, missed)
            level.write(batch_of(keys[is_missed], table), values[is_missed])


def _as_bytes(chunk: RowChunk) -> tuple[Tensor, Tensor]:
    return chunk.keys, chunk.rows.contiguous().view(torch.uint8)
