# SPDX-License-Identifier: Apache-2.0
"""`PlacedTable`: the rank of each key's row, and the number of the row in the part of the table on that rank."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from terarec.dist.plan import ColumnWise, DataParallel, Hybrid, Placement, ShardingPlan
from terarec.embedding.tables import AnyTableSpec
from terarec.spec import DynamicTableSpec, TableSpec, Tiers

_CPU = torch.device("cpu")
COPIES = -1
"""Stands for the rank of a row that every rank has."""

_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # SplitMix64's finalizer: 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class PlacedTable:
    """A table whose rows, or columns, are on several ranks.

    A row of a static table is on rank number ``key mod k`` of the k ranks of its placement, as in HugeCTR; keys of
    dynamic tables, which may have any structure, are hashed first.

    Attributes:
        spec: The whole table.
        ranks: The ranks that share the rows or columns.
        has_copies: Whether every rank has all rows.
        by_column: Whether each of `ranks` has some columns of all rows.

    Args:
        spec: The whole table.
        placement: Its placement.
        plan: The plan that it is of.
    """

    def __init__(self, spec: AnyTableSpec, placement: Placement, plan: ShardingPlan) -> None:
        self.spec = spec
        self.ranks = plan.ranks_of(placement)
        self.has_copies = isinstance(placement, DataParallel)
        self.by_column = isinstance(placement, ColumnWise) and len(self.ranks) > 1
        hot = placement.hot_keys if isinstance(placement, Hybrid) else ()
        self._num_hot = len(hot)
        # By device: hot keys, rising, and `ranks`. A copy of them in each step would make a device wait.
        self._constants = {_CPU: (torch.tensor(sorted(hot), dtype=torch.int64), torch.tensor(self.ranks))}
        is_moved = not self.has_copies and (len(self.ranks) > 1 or bool(hot))
        # Dynamic tables find rows by key, and parts with all rows have them in the order of the keys. Only a part with
        # some rows of a static table numbers them again, without gaps.
        self.keeps_numbers = isinstance(spec, DynamicTableSpec) or not (is_moved and not self.by_column)

    @property
    def width(self) -> int:
        """Columns on each of `ranks`."""
        return self.spec.width // len(self.ranks) if self.by_column else self.spec.width

    @property
    def has_hot_rows(self) -> bool:
        """Whether some rows, not all, have copies on every rank."""
        return self._num_hot > 0

    @property
    def hot_keys(self) -> Tensor:
        """Keys int64[h], rising, of the rows that have copies on every rank, where others have none."""
        return self._constants[_CPU][0]

    def owners(self, keys: Tensor) -> Tensor:
        """Return the rank int64[n] of each row of ``keys int64[n]``, `COPIES` for those on all. Not by column."""
        if self.has_copies:
            return torch.full_like(keys, COPIES)
        if len(self.ranks) == 1:
            owners = torch.full_like(keys, self.ranks[0])
        else:
            numbers = keys if isinstance(self.spec, TableSpec) else _mixed(keys)
            owners = numbers.remainder(len(self.ranks))
            # On all ranks in order, which is usual, the place of a rank is its number.
            if self.ranks != tuple(range(len(self.ranks))):
                owners = self._on(keys.device)[1][owners]
        return owners.masked_fill_(self._is_hot(keys), COPIES) if self.has_hot_rows else owners

    def is_on(self, keys: Tensor, rank: int) -> Tensor:
        """Return whether a rank has the rows, or columns of the rows, of ``keys int64[n]``, bool[n]."""
        if self.by_column:
            return torch.full(keys.shape, rank in self.ranks, device=keys.device)
        owners = self.owners(keys)
        return (owners == rank) | (owners == COPIES)

    def local_keys(self, keys: Tensor) -> Tensor:
        """Return the keys int64[n] that rows of ``keys int64[n]`` have in the part of their rank."""
        if self.keeps_numbers:
            return keys
        # Hot rows come first in a part, in the order of their keys. The other rows of a rank have keys that are equal
        # modulo k, so that key // k numbers them.
        spread = keys.div(len(self.ranks), rounding_mode="floor")
        if not self._num_hot:
            return spread
        place = torch.searchsorted(self._on(keys.device)[0], keys)
        return torch.where(self._is_hot(keys), place, spread + self._num_hot)

    def part(self, rank: int) -> AnyTableSpec:
        """Return the spec of the part on `rank`; a rank without rows of a static table has one row that no key uses.

        So all ranks have the same tables, and row optimizers count the same steps on them.
        """
        spec = self.spec
        if isinstance(spec, DynamicTableSpec):
            most = spec.max_rows
            if most is not None and not self.has_copies and not self.by_column:
                # Every rank has the hot rows besides its share of the others. All shares together fit one process.
                most = (most - self._num_hot) // len(self.ranks) + self._num_hot
            default = self._part_of_default(spec, rank)
            return replace(spec, width=self.width, default=default, max_rows=most, tiers=self._own_tiers(rank))
        holds = self.has_copies or rank in self.ranks
        # That of the whole table: a part has fewer rows, from which it would take a larger one.
        scale = spec.init_scale if spec.init_scale is not None else 1.0 / math.sqrt(spec.rows)
        if self.keeps_numbers and not self.by_column:
            return replace(spec, rows=spec.rows if holds else 1, init_scale=scale, tiers=self._own_tiers(rank))
        rows = -(-spec.rows // len(self.ranks)) if not self.by_column else spec.rows
        num_rows = max(1, self._num_hot + (rows if holds else 0))
        if spec.tiers is not None:  # which draw a row when it is first used
            return replace(spec, rows=num_rows, width=self.width, init_scale=scale, tiers=self._own_tiers(rank))
        # Rows of the part have other numbers than keys, so `ShardedTable.fill` draws their initial weights by key.
        return replace(spec, rows=num_rows, width=self.width, init_scale=scale, initializer="zeros")

    def columns(self, rank: int) -> slice:
        """Return the columns of the part on `rank`."""
        if not self.by_column:
            return slice(0, self.spec.width)
        first = self.ranks.index(rank) * self.width if rank in self.ranks else 0
        return slice(first, first + self.width)

    def keys_on(self, rank: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return rows of the part of a static table on `rank`, and their keys.

        Args:
            rank: The rank.
            first: First row.
            stop: Row behind the last one.

        Returns:
            The rows int64[n] that a key has, and these keys int64[n].
        """
        assert isinstance(self.spec, TableSpec), "rows of a dynamic table have no fixed keys"
        rows = torch.arange(first, stop)
        keys = self.keys_of(rank, rows)
        if self.has_copies:
            return rows, keys
        is_hot_row = rows < self._num_hot
        if rank not in self.ranks:
            return rows[is_hot_row], keys[is_hot_row]
        if self.keeps_numbers:
            return rows, keys
        # A share is rounded up to whole rows on each rank, and has unused rows in the places of hot keys.
        is_used = (keys < self.spec.rows) & (is_hot_row | ~self._is_hot(keys))
        return rows[is_used], keys[is_used]

    def keys_of(self, rank: int, rows: Tensor) -> Tensor:
        """Return the keys int64[n] of ``rows int64[n]`` of the part on `rank`; of a row that no key has, any number."""
        if self.keeps_numbers:
            return rows
        first = self.ranks.index(rank) if rank in self.ranks else 0
        keys = (rows - self._num_hot) * len(self.ranks) + first
        if not self._num_hot:
            return keys
        hot, _ = self._on(rows.device)
        return torch.where(rows < self._num_hot, hot[rows.clamp(max=self._num_hot - 1)], keys)

    def numbers(self, rank: int, base: int, whole_base: int) -> list[tuple[int, int, int]]:
        """Return the segments of the rows of the part on `rank` that begins at arena row `base`.

        Their numbers are the arena rows of one process, in which the table begins at `whole_base`: rows of 16 bits are
        rounded by them, or copies of a row would drift apart. See `terarec.ops.row_update.row_update_`.
        """
        if self.keeps_numbers:
            return [(base, 1, whole_base - base)]
        hot, size = self._constants[_CPU][0].tolist(), len(self.ranks)
        # Rows that no key has may have any number.
        first = whole_base + (self.ranks.index(rank) if rank in self.ranks else 0)
        of_others = (base + self._num_hot, size, first - (base + self._num_hot) * size)
        return [*((base + row, 0, whole_base + key) for row, key in enumerate(hot)), of_others]

    def _is_hot(self, keys: Tensor) -> Tensor:
        if not self._num_hot:
            return torch.zeros(keys.shape, dtype=torch.bool, device=keys.device)
        hot, _ = self._on(keys.device)
        # For a key above the last hot one `searchsorted` returns the length, which is not an index.
        place = torch.searchsorted(hot, keys).clamp_(max=self._num_hot - 1)
        return hot[place] == keys

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the hot keys, rising, and `ranks` on a device."""
        if device not in self._constants:
            hot, ranks = self._constants[_CPU]
            self._constants[device] = hot.to(device), ranks.to(device)
        return self._constants[device]

    def _own_tiers(self, rank: int) -> Tiers | None:
        """Return the tiers with a directory of this rank."""
        tiers = self.spec.tiers
        if tiers is None or tiers.file is None:
            return tiers
        return replace(tiers, file=str(Path(tiers.file) / f"rank-{rank}"))

    def _part_of_default(self, spec: DynamicTableSpec, rank: int) -> float | tuple[float, ...]:
        return spec.default[self.columns(rank)] if isinstance(spec.default, tuple) else spec.default


def _mixed(keys: Tensor) -> Tensor:
    """Return SplitMix64's finalizer of keys, as numbers >= 0."""
    # The masks make shifts of unsigned numbers: torch's shift of int64 copies the sign.
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        keys = (keys ^ ((keys >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (keys ^ ((keys >> 31) & ((1 << 33) - 1))) & (2**63 - 1)
