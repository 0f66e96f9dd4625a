# SPDX-License-Identifier: Apache-2.0
"""The tables of a collection: arenas, lookup groups, rows of dynamic keys, ``state_dict`` entries, records of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from terarec.batch import Jagged, feature_ends, first_keys, select
from terarec.errors import ConfigError
from terarec.memory.budget import TierBudget
from terarec.ops.checks import bad_key
from terarec.ops.layout import BagLayout
from terarec.spec import DynamicTableSpec, FeatureSpec, Pooling, TableSpec, Tiers
from terarec.storage import Arena, RowValues
from terarec.storage.changes import discard_changes
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.kinds import AnyArena, AnyTable
from terarec.storage.static import StaticTable
from terarec.storage.tiered import TieredArena, TieredTable

AnyTableSpec = TableSpec | DynamicTableSpec

POOLING_KINDS: tuple[tuple[Pooling, ...], ...] = (("sum", "mean", "sqrtn"), ("max",), ("none",))
"""Poolings that one call of a lookup may have together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupGroup:
    """The features of one call of ``ops.bag_lookup``: those of one arena and one kind of pooling.

    Attributes:
        arena: Index of the arena.
        layout: Layout of the features.
        max_keys: Number of first keys to use of each feature's bags, None for all; None if no feature has a limit.
    """

    arena: int
    layout: BagLayout
    max_keys: tuple[int | None, ...] | None


def check_names(tables: Sequence[AnyTableSpec], features: Sequence[FeatureSpec]) -> None:
    """Raise `ConfigError` unless there are tables, names are distinct and each feature's table exists."""
    if not tables:
        raise ConfigError("tables", "got none, expected at least one")
    _check_distinct("tables", [table.name for table in tables])
    _check_distinct("features", [feature.name for feature in features])
    known = {table.name for table in tables}
    for feature in features:
        if feature.table not in known:
            raise ConfigError(
                f"feature {feature.name!r}", f"got table {feature.table!r}, expected one of {', '.join(sorted(known))}"
            )


def arena_groups(tables: Sequence[AnyTableSpec]) -> list[list[AnyTableSpec]]:
    """Return the tables of each arena: static or dynamic, and of one width, element type, optimizer and tiers.

    The groups are in the order of their first tables.
    """
    groups: dict[tuple[bool, int, str, str, Tiers | None], list[AnyTableSpec]] = {}
    for table in tables:
        # Everything that one call of a kernel shares: width, type, rule, and memory in which the rows lie.
        kind = (isinstance(table, DynamicTableSpec), table.width, table.dtype, table.optimizer, table.tiers)
        groups.setdefault(kind, []).append(table)
    return list(groups.values())


def build_arenas(tables: Sequence[AnyTableSpec], *, seed: int) -> tuple[AnyArena, ...]:
    """Return an arena for each of `arena_groups`."""
    arenas: list[AnyArena] = []
    for group in arena_groups(tables):
        dynamic = [table for table in group if isinstance(table, DynamicTableSpec)]
        static = [table for table in group if isinstance(table, TableSpec)]
        if dynamic:
            arenas.append(DynamicArena(dynamic, seed=seed))
        elif static[0].tiers is None:
            arenas.append(Arena(static, seed=seed))
        else:
            arenas.append(TieredArena(static, seed=seed))
    share_tiers(arenas)
    return tuple(arenas)


def share_tiers(arenas: Sequence[AnyArena]) -> None:
    """Let arenas of equal tiers share their budgets; call it before they take memory."""
    budgets: dict[Tiers, TierBudget] = {}
    for arena in arenas:
        if arena.tiers is not None:
            sizes = arena.tiers.sizes
            sizes.budget = budgets.setdefault(sizes.tiers, TierBudget())
            sizes.budget.add(sizes)


def lookup_groups(arenas: Sequence[AnyArena], features: Sequence[FeatureSpec]) -> list[LookupGroup]:
    """Return one group per arena and kind of pooling: those with key weights, "max", and "none"."""
    groups: list[LookupGroup] = []
    for index, arena in enumerate(arenas):
        mine = [feature for feature in features if feature.table in arena.table_names]
        for poolings in POOLING_KINDS:
            members = [feature for feature in mine if feature.pooling in poolings]
            if members:
                limits = tuple(feature.max_keys for feature in members)
                max_keys = None if limits.count(None) == len(limits) else limits
                groups.append(LookupGroup(arena=index, layout=_layout(arena, members), max_keys=max_keys))
    return groups


def translated_readers(arenas: Sequence[AnyArena], features: Sequence[FeatureSpec]) -> dict[int, list[FeatureSpec]]:
    """Return the features of each arena whose rows are found by an index, dynamic or tiered, by its number.

    They are in order, table by table, in the order of the features.

    Most features are in such an order already, so that their keys need not be copied.
    """
    readers: dict[int, list[FeatureSpec]] = {}
    tables = list(dict.fromkeys(feature.table for feature in features))
    for feature in sorted(features, key=lambda feature: tables.index(feature.table)):
        for index, arena in enumerate(arenas):
            if (arena.is_dynamic or arena.tiers is not None) and feature.table in arena.table_names:
                readers.setdefault(index, []).append(feature)
    return readers


def whole_table(arena: Arena, name: str) -> BagLayout:
    """Return the layout of a lookup of the table `name` alone, without pooling."""
    return _layout(arena, [FeatureSpec(name=name, table=name, pooling="none")])


def fitted(layout: BagLayout, num_rows: int) -> BagLayout:
    """Return `layout` with the present `num_rows` of its arena: of a dynamic one these grow."""
    if layout.num_rows == num_rows:
        return layout
    return replace(layout, table_rows=(num_rows,) * len(layout.table_rows))


def _layout(arena: AnyArena, features: Sequence[FeatureSpec]) -> BagLayout:
    """Return the layout of some features; `translate` replaces keys of dynamic tables by rows of the whole arena."""
    return BagLayout(
        table_names=arena.table_names,
        table_base=arena.table_base,
        table_rows=arena.table_rows,
        feature_names=tuple(feature.name for feature in features),
        feature_table=tuple(arena.table_names.index(feature.table) for feature in features),
        pooling=tuple(feature.pooling for feature in features),
        width=arena.width,
    )


def _check_distinct(what: str, names: Sequence[str]) -> None:
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ConfigError(what, f"the name {repeated[0]!r} occurs more than once, expected distinct names")


class KeyFinder(Protocol):
    """Maps keys to rows, as a `terarec.storage.Store` does."""

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return the rows int64[n] of ``keys int64[n]``; with `train` new keys may be inserted."""


class Translated(NamedTuple):
    """The features of one arena.

    Attributes:
        part: Their keys.
        rows: int64[N], the arena row of each key.
        tables: int64[N], the number of its table in the arena.
    """

    part: Jagged
    rows: Tensor
    tables: Tensor


def check_keys(part: Jagged, layout: BagLayout) -> None:
    """Raise `KeyOutOfRangeError` as a lookup of `part` by `layout` does for a key outside its table."""
    batch_size = part.batch_size
    if not batch_size or not part.keys.numel():
        return
    ends = feature_ends(part)
    for feature, table in enumerate(layout.feature_table):
        keys = part.keys[ends[feature] : ends[feature + 1]]
        if not keys.numel():
            continue
        rows = layout.table_rows[table]
        low, high = torch.aminmax(keys)
        if int(low) < 0 or int(high) >= rows:
            position = int(((keys < 0) | (keys >= rows)).nonzero()[0])
            raise bad_key(layout, feature, ends[feature] + position, int(keys[position]))


def translate(
    jagged: Jagged,
    features: Sequence[FeatureSpec],
    tables: Mapping[str, KeyFinder],
    *,
    train: bool,
    repeats: Mapping[str, Tensor] | None = None,
) -> Translated:
    """Return `features` of `jagged` with their arena rows.

    A table receives all keys of the batch in one call, so that it does not evict some of them to insert others.

    Args:
        jagged: Keys of at least `features`, with offsets that `terarec.batch.check_offsets` accepted.
        features: Features of tables of one arena, table by table.
        tables: Tables by name.
        train: Whether tables may insert new keys.
        repeats: Table -> int64[n], how often each of its keys occurs in the batch; None for once each.

    Raises:
        ConfigError: A feature that `jagged` does not have.
        StorageError: Memory or a table is full.
    """
    part = select(jagged, [feature.name for feature in features])
    if any(feature.max_keys is not None for feature in features):
        part = first_keys(part, [feature.max_keys for feature in features])  # the others get no rows
    batch_size = part.batch_size
    if not batch_size:
        return Translated(part, part.keys, part.keys)
    ends = feature_ends(part)
    rows, numbers = torch.empty_like(part.keys), torch.empty_like(part.keys)
    done = 0
    for name, readers in groupby(features, key=lambda feature: feature.table):
        first, done = done, done + len(list(readers))
        span = slice(ends[first], ends[done])
        keys = part.keys[span]
        times = None if repeats is None else repeats.get(name)
        if times is None:
            rows[span] = tables[name].rows(keys, train=train)
        else:
            # Policies of a table count occurrences, so that it sees all of them; of a key the first one is read back.
            rows[span] = tables[name].rows(keys.repeat_interleave(times), train=train)[times.cumsum(0) - times]
        numbers[span] = getattr(tables[name], "number", 0)
    return Translated(part, rows, numbers)


def entry_names(table: AnyTable, prefix: str) -> tuple[str, ...]:
    """Return the names of the entries of `table` in ``state_dict``."""
    name = f"{prefix}tables.{table.name}"
    return (f"{name}.keys", f"{name}.weights") if table.is_dynamic else (name,)


def entries(table: AnyTable, prefix: str) -> dict[str, Tensor]:
    """Return the entries of `table` in ``state_dict``: shared weights, or copies of its sorted keys and weights.

    Of a static table in tiers it is a copy of all rows.
    """
    if isinstance(table, StaticTable):
        values: tuple[Tensor, ...] = (table.weights,)
    elif isinstance(table, TieredTable):
        values = (table.copied_weights(),)
    else:
        pieces = list(table.export_chunks(max(1, len(table))))
        # The order of keys in an index differs between processes.
        keys, order = torch.cat([piece.keys for piece in pieces]).sort()
        values = (keys, torch.cat([piece.weights for piece in pieces])[order])
    return dict(zip(entry_names(table, prefix), values, strict=True))


def load_entries(table: AnyTable, prefix: str, state: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Load `table` from its entries in `state`.

    Returns:
        Missing entries, and what is wrong with the others or None; with either, `table` is unchanged.
    """
    names = entry_names(table, prefix)
    missing = [name for name in names if name not in state]
    if missing:
        return missing, None
    # Of a static table both are the one entry, its weights.
    keys, weights = state[names[0]], state[names[-1]]
    if not (isinstance(keys, Tensor) and isinstance(weights, Tensor)):
        return [], f"{names[0]}: got {type(keys).__name__} and {type(weights).__name__}, expected tensors"
    if not table.is_dynamic:
        expected, what = [len(table), table.width], "(rows, width)"
    else:
        expected, what = [keys.numel(), table.width], "(keys, width)"
        if keys.dtype != torch.int64 or keys.dim() != 1:
            return [], f"{names[0]}: got {keys.dtype}{list(keys.shape)}, expected torch.int64[n]"
    if list(weights.shape) != expected:
        return [], f"{names[-1]}: got shape {list(weights.shape)}, expected {expected} {what}"
    if isinstance(table, StaticTable):
        # All rows change at once, so that no delta can follow the checkpoint before.
        discard_changes(table.arena)
        table.weights.copy_(weights)
    elif isinstance(table, TieredTable):
        table.import_(RowValues(keys=table.keys(), weights=weights.to(table.arena.dtype)))
    else:
        rows = RowValues(keys=keys.to(table.arena.device), weights=weights.to(table.arena.dtype))
        if torch.equal(rows.keys.sort().values, table.keys()):
            table.import_(rows)  # as with a static table, the optimizer state stays
        else:
            table.replace(rows)
    return [], None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTables:
    """The tables of one collection."""

    tables: tuple[TableSpec | DynamicTableSpec, ...]
    features: tuple[FeatureSpec, ...]


# A context variable, so that models that other threads create at the same time are not recorded.
_RECORD: ContextVar[list[RecordedTables] | None] = ContextVar("record", default=None)


@contextmanager
def record_tables() -> Iterator[list[RecordedTables]]:
    """Record the tables of all collections that this thread makes in the block.

    These collections have static tables of one row, so that a model of any size can be built to see what it needs.

    Yields:
        The list of records, which grows within the block.
    """
    recorded: list[RecordedTables] = []
    token = _RECORD.set(recorded)
    try:
        yield recorded
    finally:
        _RECORD.reset(token)


def tables_to_make(
    tables: Sequence[TableSpec | DynamicTableSpec], features: Sequence[FeatureSpec]
) -> Sequence[TableSpec | DynamicTableSpec]:
    """Return the tables that a collection makes: `tables` or, where they are recorded, small ones in their place."""
    record = _RECORD.get()
    if record is None:
        return tables
    record.append(RecordedTables(tables=tuple(tables), features=tuple(features)))
    return [replace(table, rows=1) if isinstance(table, TableSpec) else table for table in tables]
