# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingCache` of a table and `ModelCaches` of all tables of a model, which one call looks up together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from terarec.ops import BagLayout
from terarec.ops.layout import single_layout
from terarec.ps.cache_memory import CacheMemory
from terarec.ps.group_cache import CacheStatistics, GroupCache
from terarec.ps.table import TableTiers
from terarec.spec import CacheSpec


class EmbeddingCache:
    """Rows of a table in the memory of a device, alone or in a cache that other tables share.

    Args:
        table: The tiers behind it.
        rows: Maximum number of rows C; not used in a cache that tables share.
        spec: Form and policies; as `rows`.
        device: Device of the rows and of results; the CPU by default.
        shared: A cache that has the table; None for one of its own.
        place: Place of the table in `shared`.

    Raises:
        ConfigError: A cache without rows.
        StorageError: Not enough memory for the rows.
    """

    def __init__(
        self,
        table: TableTiers,
        rows: int,
        spec: CacheSpec,
        device: torch.device | None = None,
        *,
        shared: GroupCache | None = None,
        place: int = 0,
    ) -> None:
        self.table = table
        device = device or torch.device("cpu")
        self.shared = shared or GroupCache(table.group, [table.number], [rows], spec, device)
        self.place = place
        first, capacity = self.shared.firsts[place], self.capacity
        self._layout = replace(single_layout(capacity, table.width, "none"), table_base=(first,))

    @property
    def device(self) -> torch.device:
        """Device of the rows and of results."""
        return self.shared.device

    @property
    def memory(self) -> CacheMemory:
        """The rows, which other caches may share."""
        return self.shared.memory

    @property
    def first(self) -> int:
        """First row in that memory."""
        return self.shared.firsts[self.place]

    @property
    def capacity(self) -> int:
        """Most rows C."""
        return self.shared.slots[self.place].capacity

    def lookup(self, keys: Tensor) -> Tensor:
        """Return the rows float32[n, D] of ``keys int64[n]`` on any device; see `GroupCache.lookup`."""
        offsets = torch.tensor([0, keys.numel()], device=self.device)
        return self.shared.lookup([self.place], keys, [keys.numel()], offsets, self._layout)

    def insert(self, keys: Tensor, rows: Tensor) -> None:
        """Insert ``rows float32[n, D]`` of ``keys int64[n]``, distinct; others may lose their slots."""
        self.shared.insert(self.place, keys, rows)

    def fill(self, keys: Tensor, rows: Tensor) -> bool:
        """Insert rows while there is room, as before the first lookup; return whether there is room for more."""
        slots = self.shared.slots[self.place]
        self.insert(keys[: slots.room], rows[: slots.room])
        return slots.room > 0

    def update(self, keys: Tensor, rows: Tensor) -> None:
        """Set the rows ``float32[n, D]`` of those ``keys int64[n]``, distinct, that the cache has."""
        self.shared.update(self.place, keys, rows)

    def forget(self, keys: Tensor) -> None:
        """Remove the rows of ``keys int64[n]``."""
        self.shared.forget(self.place, keys)

    def refresh(self) -> int:
        """Read all rows again from the tiers, in parts, and remove rows that no tier has; return the rows read."""
        return self.shared.refresh(self.place)

    def wait(self) -> None:
        """Wait until the keys that are read in the background are there."""
        self.shared.wait()

    def statistics(self) -> CacheStatistics:
        """Return the counters of the cache."""
        return self.shared.statistics(self.place)

    def close(self) -> None:
        """End the work in the background, also for other tables that share the memory."""
        self.shared.close()


class ModelCaches:
    """The caches of a model's tables on a device; those of a group share their memory.

    Attributes:
        caches: Table -> its cache.

    Args:
        tables: The tables.
        rows: Table -> most rows of its cache.
        spec: Form and policies.
        device: Device of the rows and of results; the CPU by default.
    """

    def __init__(
        self,
        tables: Mapping[str, TableTiers],
        rows: Mapping[str, int],
        spec: CacheSpec,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        self.caches: dict[str, EmbeddingCache] = {}
        self._layouts: dict[BagLayout, BagLayout] = {}
        for group in dict.fromkeys(table.group for table in tables.values()):
            names = [name for name, table in tables.items() if table.group is group]
            numbers = [tables[name].number for name in names]
            shared = GroupCache(group, numbers, [rows[name] for name in names], spec, device)
            for place, name in enumerate(names):
                self.caches[name] = EmbeddingCache(tables[name], rows[name], spec, shared=shared, place=place)

    def bags(self, keys: Tensor, offsets: Tensor, layout: BagLayout, key_weights: Tensor | None = None) -> Tensor:
        """Look up features of tables of one width, those of a table one after the other.

        Missing rows of tables on one server are read at once. See `EmbeddingCache.lookup`.

        Args:
            keys: int64[N].
            offsets: int64[S * B + 1], feature-major.
            layout: Features and tables, all of which have caches.
            key_weights: Factors of the keys' vectors.

        Returns:
            As `terarec.ops.bag_lookup`.
        """
        batch_size = (offsets.numel() - 1) // len(layout.feature_names)
        # Bags are feature-major, so that each B-th offset is the end of a feature's keys.
        ends = offsets[:: max(1, batch_size)].tolist()
        caches: list[EmbeddingCache] = []
        own_ends, done = [], 0
        for table, members in groupby(layout.feature_table):
            done += len(list(members))
            caches.append(self.caches[layout.table_names[table]])
            own_ends.append(ends[done])
        device, shared = caches[0].device, caches[0].shared
        weights = None if key_weights is None else key_weights.to(device)
        places = [cache.place for cache in caches]
        return shared.lookup(places, keys[: own_ends[-1]], own_ends, offsets.to(device), self._own(layout), weights)

    def close(self) -> None:
        """End the work in the background."""
        for cache in self.caches.values():
            cache.close()

    def _own(self, layout: BagLayout) -> BagLayout:
        """Return `layout` over the rows of the caches."""
        # Made once for each layout: a session looks up few layouts, and many times.
        if layout not in self._layouts:
            caches = [self.caches[name] for name in layout.table_names]
            self._layouts[layout] = replace(
                layout,
                table_base=tuple(cache.first for cache in caches),
                table_rows=tuple(cache.capacity for cache in caches),
            )
        return self._layouts[layout]
