# SPDX-License-Identifier: Apache-2.0
"""`TableGroup`: tables of one width in one stack of levels, with default vectors for keys that no level has."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from terarec.errors import ConfigError, StorageError
from terarec.kernels.cpu.host import empty_floats
from terarec.kernels.rows import initialise_keys
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import batch_of, table_spans
from terarec.memory.guarded import Guarded, TierUseStatistics
from terarec.memory.initial_values import initial_scale
from terarec.memory.renewal import RowSource
from terarec.memory.stack import Stack
from terarec.spec import DynamicTableSpec, TableSpec


class Found(NamedTuple):
    """The result of a lookup.

    Attributes:
        rows: float32[n, D]; the default vector for keys that were not found.
        mask: bool[n], the keys that were found.
    """

    rows: Tensor
    mask: Tensor


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


class TableGroup:
    """Tables of one width whose rows are in the same levels.

    A key is looked up in one level after the other until one has it.

    Attributes:
        names: The tables.
        width: Length D of a vector.
        stack: The levels.

    Args:
        levels: The levels, the fastest first, with rows of 4 * D bytes.
        defaults: For each table, the vectors of keys that no level has; zeros by default.
    """

    def __init__(
        self, names: Sequence[str], width: int, levels: Sequence[Guarded], defaults: Sequence[DefaultRows] = ()
    ) -> None:
        self.names = tuple(names)
        self.width = width
        self.stack = Stack(levels, len(self.names), 4 * width)
        self.defaults = tuple(defaults) or (constant_rows(width),) * len(self.names)
        self._lock = threading.Lock()
        self._num_keys, self._num_defaults = [0] * len(self.names), [0] * len(self.names)

    def find(self, batch: RowBatch) -> Found:
        """Look up keys of the tables, which come one after the other, rising; keys may repeat."""
        self._check_use()
        # Large results come from memory that the core keeps, on pages that were touched before.
        rows = empty_floats(batch.keys.numel(), self.width)
        mask = self.stack.read(batch, rows.view(torch.uint8))
        all_there = bool(mask.all())
        if not all_there:
            self._check_use()  # again: rows that go while they are read seem never to have been there
        for span in table_spans(batch, len(self.names)):
            num_missing = 0
            if not all_there:
                missing = (~mask[span.places]).nonzero()[:, 0]
                num_missing = missing.numel()
                if num_missing:
                    rows[missing + span.begin] = self.defaults[span.table](batch.keys[span.places][missing])
            with self._lock:
                self._num_keys[span.table] += span.end - span.begin
                self._num_defaults[span.table] += num_missing
        return Found(rows, mask)

    def _check_use(self) -> None:
        if self.stack.is_retired:
            raise StorageError(f"tables {', '.join(self.names)}", "were closed or unloaded, expected a loaded version")

    def retire(self) -> None:
        """Let all lookups and changes raise from here on, before rows are removed or levels closed."""
        self.stack.is_retired = True

    def close(self) -> None:
        """Close the levels; lookups raise then."""
        self.retire()
        self.stack.close()

    def table(self, number: int) -> TableTiers:
        """Return a table by its number."""
        return TableTiers(self, number)

    def statistics(self, table: int) -> TableStatistics:
        """Return the counters of a table."""
        with self._lock:
            keys, defaults = self._num_keys[table], self._num_defaults[table]
        tiers = tuple(level.statistics(table) for level in self.stack.levels)
        return TableStatistics(keys=keys, defaults=defaults, tiers=tiers)


class TableTiers:
    """A table of a group: its rows in several tiers, the fastest first.

    A tier that fails rests: lookups pass it over, and one of them tries it again after 0.25 s, then after twice as long
    each time, at most 4 s.

    A tier that cannot take a change while another one with all rows does is stale: so is one whose fence notices rows
    of another time. Lookups pass it over until `renew` has brought it up to date.
    """

    def __init__(self, group: TableGroup, number: int) -> None:
        self.group = group
        self.number = number

    @property
    def width(self) -> int:
        """Length D of a vector."""
        return self.group.width

    @property
    def default(self) -> DefaultRows:
        """Vectors of keys that no tier has."""
        return self.group.defaults[self.number]

    def lookup(self, keys: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]``; keys that no tier has get the default vector.

        The keys may be on any device; the rows are in host memory. A tier that fails is passed over.

        Raises:
            ConfigError: Keys of another shape or type.
            StorageError: The table was closed or unloaded.
        """
        return self.find(keys.cpu()).rows  # a model on a GPU has its keys there

    def find(self, keys: Tensor) -> Found:
        """Return rows and which keys have one; the others have the default vector."""
        return self.group.find(batch_of(check_key_tensor(keys), self.number))

    def changing(self, state: str | None = None, through: Collection[str] = ()) -> AbstractContextManager[None]:
        """Change rows by `insert` and `erase` in one go; see `terarec.memory.stack.Stack.changing`."""
        return self.group.stack.changing(self.number, state, through)

    def renew(
        self,
        state: str | None = None,
        source: RowSource | None = None,
        turn: AbstractContextManager[object] | None = None,
    ) -> int:
        """Bring stale tiers up to date; see `terarec.memory.stack.Stack.renew`."""
        return self.group.stack.renew(self.number, state, source, turn)

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows of ``keys int64[n]`` in all tiers that can be written; the last one counts of a repeated key.

        A tier that fails is stale from then on, and the others take the rows.

        Args:
            keys: As above.
            rows: float32[n, D].

        Raises:
            ConfigError: Another shape or type.
            StorageError: No tier with all rows can be written; others may have the rows by then.
        """
        keys = check_key_tensor(keys)
        if rows.shape != (keys.numel(), self.width) or rows.dtype != torch.float32 or rows.device.type != "cpu":
            got = f"{rows.dtype}{list(rows.shape)} on {rows.device}"
            raise ConfigError("rows", f"got {got}, expected torch.float32[{keys.numel()}, {self.width}] on cpu")
        last = last_places(keys)
        if last is not None:
            keys, rows = keys[last], rows[last]
        self.group.stack.write(batch_of(keys, self.number), rows.contiguous().view(torch.uint8))

    def erase(self, keys: Tensor) -> None:
        """Remove the rows of ``keys int64[n]`` from all tiers that can be written.

        Raises:
            ConfigError: Another shape or type.
            StorageError: No tier with all rows can be written.
        """
        keys = check_key_tensor(keys)
        self.group.stack.erase(batch_of(torch.from_numpy(np.unique(keys.numpy())), self.number))

    def count(self) -> int:
        """Return the number of rows in the slowest tier, which has all of them."""
        return self.group.stack.levels[-1].level.count(self.number)

    def clear(self) -> None:
        """Remove all rows from all tiers that can be written; see `terarec.memory.stack.Stack.clear`."""
        self.group.stack.clear(self.number)

    def flush(self) -> None:
        """Make inserted and erased rows durable, where there is a disk."""
        self.group.stack.commit(self.number)

    def statistics(self) -> TableStatistics:
        """Return the counters of the table."""
        return self.group.statistics(self.number)

    def close(self) -> None:
        """Close the tiers of all tables of the group."""
        self.group.close()


def check_key_tensor(keys: Tensor) -> Tensor:
    """Return ``keys int64[n]`` in one piece, or raise `ConfigError` for another tensor."""
    if keys.dtype != torch.int64 or keys.ndim != 1 or keys.device.type != "cpu":
        raise ConfigError(
            "keys", f"got {keys.dtype}{list(keys.shape)} on {keys.device}, expected torch.int64[n] on cpu"
        )
    return keys.contiguous()


def last_places(keys: Tensor) -> Tensor | None:
    """Return the last place of each of ``keys int64[n]``, None where each is there once."""
    # By NumPy, on one thread and without Python's lock: lookups need torch's threads, and `row_set` would hold them up.
    numbers = keys.numpy()
    ordered = np.sort(numbers)
    if not bool((ordered[1:] == ordered[:-1]).any()):
        return None
    # Stable, so that of equal keys the last one given is the last one here.
    order = np.argsort(numbers, kind="stable")
    is_last = np.append(numbers[order[1:]] != numbers[order[:-1]], True)
    return torch.from_numpy(order[is_last])
