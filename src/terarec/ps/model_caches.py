"""`ModelCaches`: the caches of all tables of a model, which one call looks up together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from terarec.ops import BagLayout
from terarec.ps.cache import EmbeddingCache, look_up
from terarec.ps.cache_memory import CacheMemory
from terarec.ps.table import TableTiers
from terarec.spec import CacheSpec


class ModelCaches:
    """The caches of a model's tables on a device; those of one width share their memory.

    Attributes:
        caches: Table -> its cache.

    Args:
        tables: The tables.
        rows: Table -> most rows of its cache.
        spec: Form and policies.
        device: Device of the rows and of results; the CPU by default.

    Raises:
        StorageError: Not enough memory for the rows.
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
        for width in dict.fromkeys(table.width for table in tables.values()):
            names = [name for name, table in tables.items() if table.width == width]
            memory = CacheMemory(sum(rows[name] for name in names), width, device, is_coded=spec.form == "int8")
            first = 0
            for name in names:
                self.caches[name] = EmbeddingCache(tables[name], rows[name], spec, device, memory=memory, first=first)
                first += rows[name]

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

        Raises:
            ConfigError: Keys of another shape or type.
        """
        batch_size = (offsets.numel() - 1) // len(layout.feature_names)
        # Bags are feature-major, so that each B-th offset is the end of a feature's keys.
        ends = offsets[:: max(1, batch_size)].tolist()
        caches, own_ends, done = [], [], 0
        for table, members in groupby(layout.feature_table):
            done += len(list(members))
            caches.append(self.caches[layout.table_names[table]])
            own_ends.append(ends[done])
        device = caches[0].device
        weights = None if key_weights is None else key_weights.to(device)
        return look_up(caches, keys[: own_ends[-1]], own_ends, offsets.to(device), self._own(layout), weights)

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
