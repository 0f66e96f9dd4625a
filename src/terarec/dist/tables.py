# SPDX-License-Identifier: Apache-2.0
"""`ShardedTable`: a table on several ranks as a store of the rows on this one, under the keys of the whole table.

All ranks write their rows into one checkpoint, and each reads its own rows: a checkpoint does not depend on ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from terarec.dist.placement import COPIES, PlacedTable
from terarec.dist.ranks import Ranks
from terarec.errors import StorageError
from terarec.kernels.rows import initialise_keys
from terarec.memory.initial_values import initial_scale
from terarec.spec import DynamicTableSpec, EvictionSpec, TableSpec
from terarec.storage import RowValues
from terarec.storage.dynamic import DynamicTable
from terarec.storage.kinds import AnyTable
from terarec.storage.static import StaticTable
from terarec.storage.store import KeyedRows
from terarec.storage.tiered import TieredTable

_KEYED_MEMORY = ("admission_keys", "evicted")
_ROWS_AT_ONCE = 1 << 20
_DRAWN_AT_ONCE = 1 << 18  # rows of initial values, which bounds their memory


class ShardedTable:
    """The rows of a table on this rank. Implements `terarec.storage.Store`.

    For a checkpoint it returns this rank's share: rows with copies on all ranks belong to rank 0, and rows
    whose columns are on several ranks belong to the first of them. All ranks have to export a table at the same time.

    Attributes:
        placed: The table.
        part: The part of it on this rank.

    Args:
        placed: The table.
        part: The part of it on this rank.
        ranks: The ranks.
        seed: Seed of the initial weights.
    """

    def __init__(self, placed: PlacedTable, part: AnyTable, ranks: Ranks, *, seed: int) -> None:
        self.placed = placed
        self.part = part
        self._ranks = ranks
        self._seed = seed

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.placed.spec.name

    @property
    def width(self) -> int:
        """Length D of a vector of the whole table."""
        return self.placed.spec.width

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors; empty until an optimizer is attached."""
        return self.part.state_names

    @property
    def initial_seed(self) -> int | None:
        """Seed of the initial weights of a static table, whose rows come with their keys; None for a dynamic one."""
        return None if self.is_dynamic else self._seed

    @property
    def num_changed(self) -> int:
        """Rows of this rank's share."""
        if not self._exports:
            return 0
        if self._is_sparse:
            # Each rank has copies of hot rows, and only the first counts them.
            if not self.placed.has_hot_rows:
                return self.part.num_changed
            return sum(rows.keys.numel() for rows in self._own(self.part.export_changed(_ROWS_AT_ONCE)))
        if not self.is_dynamic and not self.placed.has_hot_rows:
            return self._static_keys(0, len(self.part))[0].numel()
        if not self.placed.has_hot_rows:
            return len(self.part)
        return sum(rows.numel() for rows, _ in self._own_rows(_ROWS_AT_ONCE))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights, optimizer state and uses on this rank."""
        return self.part.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, optimizer state and index on this rank."""
        return self.part.memory_bytes

    @property
    def is_dynamic(self) -> bool:
        """Whether keys are inserted and evicted."""
        return isinstance(self.placed.spec, DynamicTableSpec)

    @property
    def keyed(self) -> KeyedRows | None:
        """The keys on this rank of a dynamic table; None for a static one."""
        return None

    @property
    def is_part(self) -> bool:
        """True: other ranks may have further rows."""
        return True

    @property
    def changes_since(self) -> str | None:
        """Id of the checkpoint after which all changes of rows on this rank are known; None if they are not."""
        return self.part.changes_since

    def __len__(self) -> int:
        """Return the rows of the whole table if it is static, else those on this rank."""
        return self.placed.spec.rows if isinstance(self.placed.spec, TableSpec) else len(self.part)

    def keys(self) -> Tensor:
        """Return the keys int64[n] of the rows on this rank, in ascending order."""
        if self.is_dynamic:
            return self.part.keys()
        return self._static_keys(0, len(self.part))[1].sort().values

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return arena rows int64[n] on this rank of ``keys int64[n]``, which it has to have."""
        return self.part.rows(self.placed.local_keys(keys), train=train)

    def export(self, keys: Tensor) -> RowValues:
        """Return copies of the rows of ``keys int64[n]`` on this rank, of their columns here."""
        return replace(self.part.export(self.placed.local_keys(keys)), keys=keys)

    def export_chunks(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return this rank's share; see `export_changed`."""
        return self.export_changed(chunk_rows)

    def export_changed(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return this rank's share under the keys of the whole table; nothing if it has none."""
        if self.placed.by_column:
            keys = self._changed_keys(chunk_rows) if self._is_sparse else self.part.keys()
            yield from self._export_columns(keys, chunk_rows)
            return
        is_empty = True
        for chunk in self._own(self.part.export_changed(chunk_rows)) if self._is_sparse else ():
            is_empty = False
            yield chunk
        for rows, keys in () if self._is_sparse else self._own_rows(chunk_rows):
            if keys.numel():
                is_empty = False
                yield replace(self.part.export(rows), keys=keys)
        # A table without rows has a file, too: it says the width and the optimizer's states.
        if is_empty and self._exports:
            yield self.part.export(torch.empty(0, dtype=torch.int64))

    def restart(self, seed: int) -> None:
        """Give the rows of a static table the initial weights of `seed`, and initial state."""
        if self.is_dynamic:
            raise StorageError(f"table {self.name!r}: restart", "the table is dynamic, expected a static one")
        self.part.restart(seed)
        # The part has drawn by its own numbers of rows, which may be other ones than those of the table.
        self._draw(seed)

    def fill(self, whole: AnyTable) -> None:
        """Fill the rows: with initial weights, or with the rows of the table on one device.

        Args:
            whole: The table of one device; one that was only recorded has fewer rows than its spec.
        """
        spec, columns = self.placed.spec, self.placed.columns(self._ranks.rank)
        is_recorded = isinstance(spec, TableSpec) and len(whole) != spec.rows
        if isinstance(spec, DynamicTableSpec) or spec.tiers is not None:
            self._draw_like_whole_table()
            # A table without rows of its own is not read: that opens the files of tiers, which all ranks would try to
            # take.
            for piece in () if is_recorded or not whole.num_changed else whole.export_changed(_DRAWN_AT_ONCE):
                self.import_(RowValues(keys=piece.keys, weights=piece.weights))
        elif is_recorded:
            self._draw(self._seed)
        else:
            for rows, keys in self._static_rows():
                self.part.import_(RowValues(keys=rows, weights=whole.export(keys).weights[:, columns].contiguous()))

    def _draw_like_whole_table(self) -> None:
        """Let rows that are drawn when they are first used get the initial weights that they have in one process.

        These depend on the key and the column: a part whose rows have other numbers, or whose columns do not begin at
        0, draws them by those of the whole table.
        """
        placed, part, rank = self.placed, self.part, self._ranks.rank
        assert not isinstance(part, StaticTable), "its rows are drawn when it is made"
        if placed.by_column:
            part.arena.data.draw_columns(part.number, self.width, placed.columns(rank).start)
        elif isinstance(part, TieredTable) and not placed.keeps_numbers:
            part.arena.data.draw_by(part.number, partial(placed.keys_of, rank))

    def import_(self, rows: RowValues) -> None:
        """Overwrite those of the rows that are on this rank."""
        if self.placed.by_column:
            if self._ranks.rank not in self.placed.ranks:
                return
            columns = self.placed.columns(self._ranks.rank)
            # State with one number a row, such as that of row-wise AdaGrad, is the same on all ranks of the columns.
            state = {name: tensor[:, columns] if tensor.dim() == 2 else tensor for name, tensor in rows.state.items()}
            state = {name: tensor.contiguous() for name, tensor in state.items()}
            self.part.import_(replace(rows, weights=rows.weights[:, columns].contiguous(), state=state))
            return
        mine = self._is_here(rows.keys)
        if not bool(mine.any()):
            return
        self.part.import_(
            RowValues(
                keys=self.placed.local_keys(rows.keys[mine]),
                weights=rows.weights[mine],
                state={name: tensor[mine] for name, tensor in rows.state.items()},
                uses={name: counts[mine] for name, counts in rows.uses.items()},
            )
        )

    def snapshot(self, directory: Path) -> bool:
        """Return False: the rows of ranks come together in files of a checkpoint."""
        return False

    def adopt(self, directory: Path) -> bool:
        """Return False: a rank takes its rows alone."""
        return False

    def follow_changes(self, since: str) -> None:
        """Begin to note which rows on this rank change; see `Store.follow_changes`."""
        self.part.follow_changes(since)

    @property
    def num_since(self) -> int:
        """Rows of this rank's share that changed after `changes_since`."""
        if not self._exports:
            return 0
        if not self.placed.has_hot_rows:
            return self.part.num_since
        return sum(rows.keys.numel() for rows in self._own(self.part.export_since(_ROWS_AT_ONCE)))

    def export_since(self, chunk_rows: int) -> Iterator[RowValues]:
        """Return those of this rank's share that changed after `changes_since`; see `export_changed`."""
        if self.placed.by_column:
            keys_of_chunks = [rows.keys for rows in self.part.export_since(chunk_rows)]
            keys = torch.cat(keys_of_chunks).sort().values if keys_of_chunks else torch.empty(0, dtype=torch.int64)
            yield from self._export_columns(keys, chunk_rows)
        elif self._exports:
            yield from self._own(self.part.export_since(chunk_rows))

    def _draw(self, seed: int) -> None:
        """Give the part of a static table the initial weights of a seed."""
        placed, spec = self.placed, self.placed.spec
        if (placed.keeps_numbers and not placed.by_column) or spec.tiers is not None:
            return  # a table of this name draws the same rows
        assert isinstance(spec, TableSpec), "rows of a dynamic table are drawn when they are inserted"
        for rows, keys in self._static_rows():
            weights = torch.empty(keys.numel(), spec.width, dtype=getattr(torch, spec.dtype))
            initialise_keys(
                weights,
                torch.arange(keys.numel()),
                keys,
                table=spec.name,
                seed=seed,
                initializer=spec.initializer,
                scale=initial_scale(spec),
            )
            self.part.import_(RowValues(keys=rows, weights=weights[:, placed.columns(self._ranks.rank)].contiguous()))

    def _static_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of the part of a static table and their keys, int64[n] each."""
        if self.placed.by_column and self._ranks.rank not in self.placed.ranks:
            return
        # In parts: the weights of all rows are never in memory a second time.
        for first in range(0, len(self.part), _DRAWN_AT_ONCE):
            rows, keys = self._static_keys(first, min(first + _DRAWN_AT_ONCE, len(self.part)))
            if keys.numel():
                yield rows, keys

    @property
    def _exports(self) -> bool:
        """Whether this rank writes any rows."""
        if self.placed.has_copies or self.placed.by_column:  # one of the equal copies is written, or whole rows
            return self._ranks.rank == self._first_rank
        return self._ranks.rank in self.placed.ranks or (self.placed.has_hot_rows and self._ranks.is_first)

    @property
    def _first_rank(self) -> int:
        """The first rank that writes rows."""
        return 0 if self.placed.has_copies or self.placed.has_hot_rows else self.placed.ranks[0]

    @property
    def _is_sparse(self) -> bool:
        """Whether a checkpoint has those rows alone that were trained or imported: static ones in tiers."""
        return self.placed.spec.tiers is not None and not self.is_dynamic

    def _changed_keys(self, chunk_rows: int) -> Tensor:
        """Return the keys int64[n] of a static table in tiers that were trained or imported, rising."""
        return torch.cat([rows.keys for rows in self.part.export_changed(chunk_rows)]).sort().values

    def _own(self, pieces: Iterator[RowValues]) -> Iterator[RowValues]:
        """Yield this rank's share of pieces of the part, under the keys of the whole table; no empty ones."""
        if not self._exports:
            return
        for rows in pieces:
            keys = self.placed.keys_of(self._ranks.rank, rows.keys)
            is_mine = self._is_mine(keys)
            if bool(is_mine.all()):
                if keys.numel():
                    yield replace(rows, keys=keys)
            elif bool(is_mine.any()):
                yield RowValues(
                    keys=keys[is_mine],
                    weights=rows.weights[is_mine],
                    state={name: tensor[is_mine] for name, tensor in rows.state.items()},
                    uses={name: counts[is_mine] for name, counts in rows.uses.items()},
                )

    def _is_mine(self, keys: Tensor) -> Tensor:
        """Return which of the keys of rows on this rank are of its share, bool[n]; not where it has none."""
        if not self.placed.has_hot_rows:
            return torch.ones_like(keys, dtype=torch.bool)
        owners = self.placed.owners(keys)
        return (owners == self._ranks.rank) | ((owners == COPIES) & self._ranks.is_first)

    def _is_here(self, keys: Tensor) -> Tensor:
        """Return whether this rank has the row of each key, bool[n]."""
        return self.placed.is_on(keys, self._ranks.rank)

    def _static_keys(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.placed.keys_on(self._ranks.rank, first, stop)

    def _own_rows(self, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys of the part and of the whole table, int64[n] each: those of this rank's share, not by column."""
        if not self._exports:
            return
        keys = self.part.keys() if self.is_dynamic else None
        count = len(self.part) if keys is None else keys.numel()
        for first in range(0, count, chunk_rows):
            stop = min(first + chunk_rows, count)
            if keys is None:
                rows, whole = self._static_keys(first, stop)
            else:
                rows = whole = keys[first:stop]
            is_mine = self._is_mine(whole)
            yield rows[is_mine], whole[is_mine]

    def _export_columns(self, keys: Tensor, chunk_rows: int) -> Iterator[RowValues]:
        """Yield rows with the columns of all ranks on the first of them; all ranks call it, and the others get none.

        Args:
            keys: Keys int64[n], rising; on ranks of the table the same.
            chunk_rows: Rows at a time.
        """
        if self._ranks.rank not in self.placed.ranks:
            keys = keys[:0]
        what = f"columns of {self.name}"
        # Ranks without columns of the table take part in as many collectives as the others.
        count = int(self._ranks.all_reduce_(what, torch.tensor([keys.numel()]), "max"))
        for first in range(0, max(1, count), chunk_rows):
            own_columns = self.part.export(keys[first : first + chunk_rows])
            weights = self._all_columns(what, own_columns.weights)
            state = {
                name: self._all_columns(what, part) if part.dim() == 2 else part
                for name, part in own_columns.state.items()
            }
            if self._exports:
                yield replace(own_columns, weights=weights, state=state)

    def _all_columns(self, what: str, own_columns: Tensor) -> Tensor:
        """Return ``[n, columns]`` of all ranks side by side, on the first of them."""
        ranks, size = self.placed.ranks, self._ranks.size
        sent, received = [0] * size, [0] * size
        # Only to the first rank of the table, which writes its rows.
        sent[ranks[0]] = own_columns.numel()
        if self._exports:
            received = [own_columns.numel() if rank in ranks else 0 for rank in range(size)]
        parts = torch.split(self._ranks.all_to_all(what, own_columns.flatten(), sent, received), received)
        return (
            torch.cat([parts[rank].view(own_columns.shape) for rank in ranks], dim=1) if self._exports else own_columns
        )


class ShardedDynamicTable(ShardedTable):
    """The rows and keys of a dynamic table on this rank. Implements `terarec.storage.KeyedRows`, too."""

    part: DynamicTable

    def __init__(self, placed: PlacedTable, part: DynamicTable, ranks: Ranks, *, seed: int) -> None:
        super().__init__(placed, part, ranks, seed=seed)
        assert isinstance(placed.spec, DynamicTableSpec)
        part.begin_part(placed.hot_keys, placed.spec.max_rows)

    @property
    @override
    def keyed(self) -> ShardedDynamicTable:
        return self

    def evict(self, by: EvictionSpec | None = None, *, keep_at_least: int | None = None) -> Tensor:
        """Evict rows of this rank; see `terarec.storage.dynamic.DynamicTable.evict`."""
        return self.part.evict(by, keep_at_least=keep_at_least)

    def take_evicted(self) -> Tensor:
        """Return the keys int64[n] that were evicted on this rank since the last call and have no row now."""
        return self.part.take_evicted()

    def clear(self) -> None:
        """Remove all keys on this rank."""
        self.part.clear()

    def export_keys(self, chunk_keys: int) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Return the keys int64[n] on this rank and their uses."""
        return self.part.export_keys(chunk_keys)

    def import_keys(self, keys: Tensor, uses: Mapping[str, Tensor]) -> None:
        """Insert those of the keys whose rows belong to this rank."""
        mine = self._is_here(keys)
        self.part.import_keys(keys[mine], {name: counts[mine] for name, counts in uses.items()})

    def removed_since(self) -> Tensor:
        """Return those of the keys of this rank's share that were removed after `changes_since`."""
        keys = self.part.removed_since() if self._exports else torch.empty(0, dtype=torch.int64)
        return keys[self._is_mine(keys)]

    def remove(self, keys: Tensor) -> None:
        """Remove those of ``keys int64[n]`` that are on this rank."""
        self.part.remove(keys[self._is_here(keys)])

    def export_memory(self, chunk_keys: int) -> Iterator[Mapping[str, Tensor]]:
        """Return this rank's share of the state other than rows; that of all keys together is of rank 0."""
        for piece in self.part.export_memory(chunk_keys):
            if "clock" in piece:
                # Ranks with copies or columns have evicted the same rows.
                mine = piece["num_evicted"] * self._exports
                evicted = self._ranks.all_reduce_(f"evicted rows of {self.name}", mine)
                if self._ranks.is_first:
                    yield {**piece, "num_evicted": evicted}
            elif "admission_filter" in piece:  # counts in the filter of all are none too low for the keys of any rank
                what = f"counting filter of {self.name}"
                # A clone, since the collective writes into its argument: the cells are those that this rank counts in.
                cells = self._ranks.all_reduce_(what, piece["admission_filter"].clone(), "max")
                if self._ranks.is_first:
                    yield {**piece, "admission_filter": cells}
            elif self._exports:
                yield piece

    def import_memory(self, piece: Mapping[str, Tensor]) -> None:
        """Import this rank's part of a piece."""
        keys = next((piece[name] for name in _KEYED_MEMORY if name in piece), None)
        # State without an entry for each key, such as the clock and the cells of a filter, is the same on all ranks.
        if keys is None or any(tensor.shape[:1] != keys.shape for tensor in piece.values()):
            # `export_memory` adds up those of all ranks with rows of their own.
            if "num_evicted" in piece and self._ranks.rank != self._first_rank:
                piece = {**piece, "num_evicted": torch.zeros_like(piece["num_evicted"])}
            self.part.import_memory(piece)
            return
        mine = self._is_here(keys)
        self.part.import_memory({name: tensor[mine] for name, tensor in piece.items()})


def sharded_table(placed: PlacedTable, part: AnyTable, ranks: Ranks, *, seed: int) -> ShardedTable:
    """Return the rows of a table on this rank; arguments are those of `ShardedTable`."""
    if isinstance(part, DynamicTable):
        return ShardedDynamicTable(placed, part, ranks, seed=seed)
    return ShardedTable(placed, part, ranks, seed=seed)
