# SPDX-License-Identifier: Apache-2.0
"""Rows that lookups to come need, loaded into the faster tiers of a collection's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.embedding.tables import translate
from terarec.memory import RowBatch
from terarec.memory.tiered_rows import TieredRows
from terarec.spec import FeatureSpec
from terarec.storage.dynamic import DynamicTable
from terarec.storage.kinds import AnyArena, AnyTable
from terarec.storage.static import StaticTable

_KEYS_AT_ONCE = 1 << 20  # of a keyset, which bounds the memory of finding their rows
_BYTES_STAGED = 32 << 20  # of rows of the next part in addition to the budget of an arena
_BYTES_AHEAD = 4 << 20  # of rows of the next part, so that training waits for a short time while they get their slots


class RowLoading:
    """Loads rows of tables in tiers; those of other tables are there already.

    Args:
        arenas: Arenas of a collection.
        readers: Index of an arena -> the features of its tables, of those whose rows are found by an index.
        tables: Tables of these arenas by name.
    """

    def __init__(
        self,
        arenas: Sequence[AnyArena],
        readers: Mapping[int, Sequence[FeatureSpec]],
        tables: Mapping[str, AnyTable],
    ) -> None:
        self._arenas, self._readers = arenas, readers
        self._tables = {name: _HeldRows(table) for name, table in tables.items()}

    def prefetch(self, jagged: Jagged, number: int) -> None:
        """Read the rows of a coming batch; see `EmbeddingCollection.prefetch`."""
        for _, tiers, readers in self._in_tiers():
            # Of features that a batch does not have, rows are read when they are looked up.
            there = [feature for feature in readers if feature.name in jagged.names]
            part = translate(jagged, there, self._tables, train=False)
            batch = RowBatch(part.rows, part.part.keys, part.tables)
            tiers.coming.ahead(batch.part((part.rows >= 0).nonzero()[:, 0]), number)

    def preload(self, keys: Mapping[str, Tensor]) -> None:
        """Load the rows of a part of the data; see `EmbeddingCollection.preload`."""
        for _, tiers, readers in self._in_tiers():
            tiers.flush()
            # Pinned before any is loaded: a row of this part that is there already must not go for another.
            pins = [tiers.placement.keep(batch.to(tiers.device)) for batch in self._batches(readers, keys)]
            for batch in self._batches(readers, keys):
                pin, has_room = tiers.coming.preload(batch.to(tiers.device))
                pins.append(pin)
                if not has_room:
                    break
            for pin in pins:
                pin.release()

    def preload_next(
        self, present: Mapping[str, Tensor], keys: Mapping[str, Tensor], goes_on: Callable[[], bool]
    ) -> None:
        """Load the rows of the next part of the data; see `EmbeddingCollection.preload_next`."""
        for arena, tiers, readers in self._in_tiers():
            # Held while rows are found and loaded, so that none gets another key between. What reads files holds none.
            with arena.lock, tiers.lock:
                kept = [tiers.placement.keep(batch.to(tiers.device)) for batch in self._batches(readers, present)]
                absent = 0
                for batch in self._batches(readers, keys):
                    kept.append(tiers.placement.keep(batch.to(tiers.device)))
                    absent += batch.rows.numel() - kept[-1].slots.numel()
                tiers.placement.make_room(absent)
                for pin in kept:
                    pin.release()
            at_once = max(1, min(_BYTES_AHEAD // tiers.row_bytes, _KEYS_AT_ONCE))
            pieces = _pieces(readers, keys, at_once)
            for feature, piece in pieces:
                if not goes_on():
                    return
                batch = self._rows_of(feature, piece)
                tiers.coming.ahead(batch, 1)
                with arena.lock:
                    # Search again, since training may have assigned the rows to other keys while files were read
                    # without the lock.
                    if arena.is_dynamic:
                        batch = self._rows_of(feature, piece)
                    pin, has_room = tiers.coming.preload(batch.to(tiers.device), evicts=False)
                    pin.release()
                if not has_room:
                    waiting, room = [batch], _BYTES_STAGED // tiers.row_bytes - batch.rows.numel()
                    for feature, piece in pieces:
                        if room <= 0:
                            break
                        waiting.append(self._rows_of(feature, piece[:room]))
                        room -= waiting[-1].rows.numel()
                    tiers.coming.stage_part(RowBatch(*map(torch.cat, zip(*waiting, strict=True))))
                    break

    def _in_tiers(self) -> Iterator[tuple[AnyArena, TieredRows, Sequence[FeatureSpec]]]:
        """Yield each arena of tables in tiers, with their features."""
        for index, readers in self._readers.items():
            arena = self._arenas[index]
            if arena.tiers is not None:
                yield arena, arena.tiers, readers

    def _batches(self, features: Sequence[FeatureSpec], keys: Mapping[str, Tensor]) -> Iterator[RowBatch]:
        """Yield the rows of each feature's keys that tables have, in pieces that bound the memory of finding them."""
        for feature, piece in _pieces(features, keys, _KEYS_AT_ONCE):
            yield self._rows_of(feature, piece)

    def _rows_of(self, feature: FeatureSpec, keys: Tensor) -> RowBatch:
        """Return the rows of ``keys int64[n]`` that the table of a feature has."""
        loaded = self._tables[feature.table]
        rows = loaded.rows(keys, train=False)
        batch = RowBatch(rows, keys, torch.full_like(keys, loaded.number))
        return batch.part((rows >= 0).nonzero()[:, 0])


def _pieces(
    features: Sequence[FeatureSpec], keys: Mapping[str, Tensor], at_once: int
) -> Iterator[tuple[FeatureSpec, Tensor]]:
    """Yield each feature with its keys, `at_once` at a time."""
    for feature in features:
        for piece in torch.split(keys[feature.name], at_once) if feature.name in keys else ():
            yield feature, piece


class _HeldRows:
    """Finds the rows that a table has; -1 for keys that it has not."""

    def __init__(self, table: AnyTable) -> None:
        self._table = table
        self.number = 0 if isinstance(table, StaticTable) else table.number

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return rows int64[n] of ``keys int64[n]``."""
        table = self._table
        if isinstance(table, DynamicTable):
            rows = table.rows(keys.to(table.arena.device), train=False)
            return rows.masked_fill_(rows == table.number, -1).to(keys.device)
        is_key = (keys >= 0) & (keys < len(table))
        return torch.where(is_key, keys + table.base, -1)
