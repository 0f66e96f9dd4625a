# SPDX-License-Identifier: Apache-2.0
"""Protocols of rows that are stored elsewhere, and `FoundRows`, the rows of keys that another rank looks up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, check_offsets, feature_ends
from terarec.embedding.output import EmbeddingOutput, assemble, bags_of
from terarec.embedding.tables import POOLING_KINDS, AnyTableSpec, LookupGroup, check_names
from terarec.errors import ConfigError
from terarec.memory import Pin
from terarec.ops.bag_lookup import bag_lookup, pool_rows
from terarec.ops.layout import BagLayout, found_rows, single_layout
from terarec.ops.row_update import BagGradient
from terarec.spec import FeatureSpec


class FoundRows:
    """The rows of the tables of one arena for N keys, table by table.

    Args:
        weights: Weights [V, D] of the arena, as they are at the lookup.
        keys: int64[N], as gradients name them: keys of static tables, else arena rows.
        places: int64[N], the rows of `weights`.
        layout: Layout of one feature without pooling for each table.
        deposit: Function that keeps a gradient for the row optimizer.
        slots: `places`, if rows are in tiers, for gradients.
        pin: Pin that keeps rows in tiers in place.
    """

    def __init__(
        self,
        weights: Tensor,
        keys: Tensor,
        places: Tensor,
        layout: BagLayout,
        deposit: Callable[[BagGradient], None],
        *,
        slots: Tensor | None = None,
        pin: Pin | None = None,
    ) -> None:
        self.tables = tuple(layout.table_names[table] for table in layout.feature_table)
        self._weights, self._keys, self._places, self._layout = weights, keys, places, layout
        self._deposit, self._slots, self._pin = deposit, slots, pin

    def vectors(self, order: Tensor) -> Tensor:
        """Return the vectors float32[n, D] of the keys at the positions ``order int64[n]``."""
        places = self._places[order]
        layout = single_layout(found_rows(self._weights), self._weights.shape[1], "none")
        # By the device, which a copy of these two numbers would make wait.
        offsets = torch.arange(2, device=places.device) * places.numel()
        return bag_lookup(self._weights, places, offsets, layout)

    def keep(self, order: Tensor | None, counts: Tensor, counts_here: Sequence[int], grad: Tensor) -> None:
        """Keep a gradient for the row optimizer, which adds up those of a row in their order.

        Args:
            order: Positions int64[n] of keys, table by table; they may repeat and be left out. None for all keys once.
            counts: int64[T], the positions of each table.
            counts_here: The same in host memory.
            grad: float32[n, D], the gradients of the vectors at `order`.
        """
        keys, slots = self._keys, self._slots
        if order is not None:
            keys, slots = keys[order], None if slots is None else slots[order]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        ends = (0, *accumulate(counts_here))
        self._deposit(BagGradient(keys, offsets, grad, self._layout, None, slots, ends))

    def release(self) -> None:
        """Unpin rows in tiers: no gradient will come."""
        if self._pin is not None:
            self._pin.release()


class RowLookup(Protocol):
    """Finds the rows of a table."""

    def __call__(self, keys: Tensor, /) -> Tensor:
        """Return float32[n, D] for ``keys int64[n]``; every key has a row, or the table's default vector."""


class BagSource(Protocol):
    """Looks up bags of features in rows that are stored elsewhere."""

    def __call__(
        self, keys: Tensor, offsets: Tensor, layout: BagLayout, key_weights: Tensor | None = None, /
    ) -> Tensor:
        """Return the result of `terarec.ops.bag_lookup`; features of one table are adjacent."""


class LookupCollection(nn.Module):
    """Looks features up as a `terarec.embedding.EmbeddingCollection` in evaluation does; it holds no rows.

    Keys outside of a static table are not an error here: the lookup defines their vectors.

    Attributes:
        specs: The tables.
        features: Features, in the order of the output's columns.
        output_width: Columns of the pooled output.

    Args:
        tables: The tables.
        features: Features of these tables.
        lookups: Table -> its rows; None to `connect` them later.
    """

    def __init__(
        self,
        tables: Sequence[AnyTableSpec],
        features: Sequence[FeatureSpec],
        lookups: Mapping[str, RowLookup] | None = None,
    ) -> None:
        super().__init__()
        check_names(tables, features)
        self.specs = tuple(tables)
        self.features = tuple(features)
        widths = {table.name: table.width for table in tables}
        self.output_width = sum(widths[feature.table] for feature in features if feature.pooling != "none")
        self._groups = _groups(tables, features)
        self._lookups: Mapping[str, RowLookup] = {}
        self._bags: BagSource | None = None
        if lookups is not None:
            self.connect(lookups)

    def connect(self, lookups: Mapping[str, RowLookup], bags: BagSource | None = None) -> None:
        """Look rows up in `lookups`, which has every table.

        Args:
            lookups: Table -> its rows.
            bags: Looks up the bags of tables of one width at once, in place of `lookups`.
        """
        missing = [table.name for table in self.specs if table.name not in lookups]
        if missing:
            raise ConfigError("lookups", f"got none of table {missing[0]!r}, expected one of each table")
        self._lookups, self._bags = dict(lookups), bags

    def __deepcopy__(self, memo: dict[int, object]) -> LookupCollection:
        copied = LookupCollection(self.specs, self.features)
        if self._lookups:
            copied.connect(self._lookups, self._bags)  # which stay those of the original
        memo[id(self)] = copied
        return copied.train(self.training)

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up.

        Args:
            jagged: Keys of at least this collection's features.

        Raises:
            ConfigError: A feature that `jagged` does not have, or offsets that decrease or do not cover the keys.
        """
        check_offsets(jagged)
        looked_up = []
        for group in self._groups:
            part = bags_of(jagged, group)
            key_weights = part.weights if group.layout.takes_key_weights else None
            if self._bags is not None and part.batch_size:
                rows = self._bags(part.keys, part.offsets, group.layout, key_weights).to(part.keys.device)
            else:
                rows = pool_rows(self._rows(part, group.layout), part.offsets, group.layout, key_weights)
            looked_up.append((group, part, rows))
        return assemble(self.features, looked_up, jagged)

    def _rows(self, part: Jagged, layout: BagLayout) -> Tensor:
        """Return the rows float32[N, D] of the keys of a group; features of one table are looked up together."""
        batch_size = part.batch_size
        if not batch_size:
            return torch.empty(0, layout.width, device=part.keys.device)
        ends = feature_ends(part)
        parts, done = [], 0
        for table, members in groupby(layout.feature_table):
            first, done = done, done + len(list(members))
            parts.append(self._lookups[layout.table_names[table]](part.keys[ends[first] : ends[done]]))
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows.to(part.keys.device)


def _groups(tables: Sequence[AnyTableSpec], features: Sequence[FeatureSpec]) -> list[LookupGroup]:
    """Return a group for the features of each width and kind of pooling, table by table."""
    groups: list[LookupGroup] = []
    order = {table.name: place for place, table in enumerate(tables)}
    for number, width in enumerate(dict.fromkeys(table.width for table in tables)):
        names = tuple(table.name for table in tables if table.width == width)
        for poolings in POOLING_KINDS:
            members = [feature for feature in features if feature.table in names and feature.pooling in poolings]
            # So that features of one table are looked up in one call.
            members.sort(key=lambda feature: order[feature.table])
            if not members:
                continue
            layout = BagLayout(
                table_names=names,
                table_base=(0,) * len(names),
                # Sizes are not known here: the lookup decides which keys are valid.
                table_rows=(0,) * len(names),
                feature_names=tuple(feature.name for feature in members),
                feature_table=tuple(names.index(feature.table) for feature in members),
                pooling=tuple(feature.pooling for feature in members),
                width=width,
            )
            limits = tuple(feature.max_keys for feature in members)
            has_limits = limits.count(None) < len(limits)
            groups.append(LookupGroup(arena=number, layout=layout, max_keys=limits if has_limits else None))
    return groups
