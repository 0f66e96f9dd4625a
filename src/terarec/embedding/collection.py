# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingCollection`: all tables of a model, looked up together; a row optimizer updates their rows.

A lookup is one autograd function. Its backward pass stores the gradient of the vectors with their keys;
``optim.RowOptimizer.step`` applies these gradients to the touched rows in place, so that no gradient as large as a
table is ever allocated. The tables are not `torch.nn.Parameter`; one empty `TableParameter` represents all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, check_offsets, select
from terarec.embedding.autograd import LookupGradients, TableParameter, look_up_with_weights, with_gradient
from terarec.embedding.lookups import FoundRows
from terarec.embedding.output import EmbeddingOutput, assemble, bags_of, cast
from terarec.embedding.quantized import QuantizedCollection
from terarec.embedding.row_gradient import PendingGradients
from terarec.embedding.row_loading import RowLoading
from terarec.embedding.tables import (
    AnyTableSpec,
    LookupGroup,
    Translated,
    build_arenas,
    check_keys,
    check_names,
    entries,
    entry_names,
    fitted,
    load_entries,
    lookup_groups,
    tables_to_make,
    translate,
    translated_readers,
)
from terarec.errors import ConfigError
from terarec.memory import Pin, RowBatch
from terarec.memory.fast_tier import TierUse
from terarec.memory.row_placement import PlacedRows
from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.layout import BagLayout, found_rows, placed
from terarec.ops.row_update import BagGradient
from terarec.ops.split_rows import SplitColumns
from terarec.spec import FeatureSpec
from terarec.storage import Arena, Store
from terarec.storage.dynamic import DynamicTable, dynamic_tables
from terarec.storage.kinds import AnyArena, AnyTable
from terarec.storage.static import StaticTable, static_tables
from terarec.storage.tiered import TieredArena, tiered_tables


def columns_of(features: Iterable[FeatureSpec], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return feature -> column of a batch with its keys: that of its name unless `renamed` has another one."""
    return {feature.name: renamed.get(feature.name, feature.name) for feature in features}


class EmbeddingCollection(nn.Module):
    """Tables and the features that look them up.

    Weights keep the types of their tables after ``half()``, ``bfloat16()`` or ``to(dtype)``: these choose the type of
    the vectors that lookups return. ``to(device)`` moves the tables. ``state_dict()`` holds views ``tables.<name>``
    that share memory with the static tables, and copies ``tables.<name>.keys int64[n]`` and
    ``tables.<name>.weights float32[n, D]`` of dynamic ones; loading them replaces the content of a table.

    The tables are trained where autograd is enabled: ``requires_grad_(False)`` of the collection, or of a module around
    it, freezes them, and so does ``torch.no_grad()``. A dynamic table inserts new keys only in forward passes in
    training mode with gradients enabled, and only if it is not frozen.

    Attributes:
        rows: Parameter float32[0] that represents the tables in ``parameters()``.
        pending: Gradients for the row optimizer.
        specs: The tables as the caller described them.
        seed: Seed of the initial weights.
        is_exchanged: Whether the gradients of all ranks reach this collection, so that several ranks may train it.
        split_columns: Tables of which it has only some columns; None for none.
        has_hot_rows: Whether some rows of its tables, but not all of a table, are also on other ranks.
        stores: The tables as checkpoints hold them; of parts of tables, under the keys of the whole ones.
        columns: Feature -> column of a batch, for features that a model gives the keys of a column of another name.
            Rows are read ahead by it; lookups take features by their names.

    Args:
        tables: Tables. The static ones of one width, element type and `optimizer` share an arena, and so do the
            dynamic ones.
        features: Features, in the order of the output's columns.
        seed: Seed of the initial weights, which depend on table name, row and seed only.

    Raises:
        ConfigError: Repeated names, or a feature of an unknown table.
        StorageError: Not enough memory for the tables.
    """

    def __init__(self, tables: Sequence[AnyTableSpec], features: Sequence[FeatureSpec], *, seed: int = 0) -> None:
        super().__init__()
        check_names(tables, features)
        self.specs, self.seed = tuple(tables), seed
        self.is_exchanged, self.has_hot_rows = False, False
        self.split_columns: SplitColumns | None = None
        tables = tables_to_make(tables, features)
        self.features = tuple(features)
        self.arenas = build_arenas(tables, seed=seed)
        stores = {table.name: table for arena in self.arenas for table in _stores(arena)}
        self.tables = {spec.name: stores[spec.name] for spec in tables}
        self.stores: Mapping[str, Store] = self.tables
        self.columns: Mapping[str, str] = {}
        # Empty, so that dense optimizers, norms and all-reduces over the parameters have nothing to do with it.
        self.rows = TableParameter(torch.empty(0))
        self.pending = PendingGradients(
            self.rows, self.arenas, [f"tables {', '.join(arena.table_names)}" for arena in self.arenas]
        )
        self._gradients = LookupGradients(self.arenas, self.pending)
        self._readers = translated_readers(self.arenas, self.features)
        groups = lookup_groups(self.arenas, self.features)
        self._direct_groups = [group for group in groups if group.arena not in self._readers]
        self._translated_groups = [group for group in groups if group.arena in self._readers]
        self._has_limits = any(feature.max_keys is not None for feature in self.features)  # which need bags' lengths
        pooled = [feature for feature in self.features if feature.pooling != "none"]
        self._dtype = torch.float32  # of the vectors; kept here, since reading it from `rows` takes a microsecond
        self.output_width = sum(self.tables[feature.table].width for feature in pooled)

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up.

        Args:
            jagged: Keys of at least this collection's features. Its weights are used for the features pooled by "sum",
                "mean" or "sqrtn".

        Raises:
            ConfigError: A feature that `jagged` does not have, or offsets that decrease or do not cover the keys.
            KeyOutOfRangeError: A key outside its static table, with feature and table named.
            StorageError: Memory or a dynamic table is full.

        If one of these is raised, dynamic tables are unchanged.
        """
        # An exported program has no backward pass, even if it is exported in training mode.
        is_trained = torch.is_grad_enabled() and self.is_trained and not torch.compiler.is_exporting()
        if torch.compiler.is_compiling() and (is_trained or not self._is_traced_whole(jagged)):
            from terarec.ops.traced import run_eager  # loads the compiler

            # A graph cannot hold a backward that keeps its gradient, an index that grows, or a number of keys that has
            # to be read from a tensor. The graph after this takes the vectors as an input that needs a gradient, so
            # nothing is copied. An op in the graph whose backward keeps the gradient would have to copy it: the
            # compiler reuses memory that no later node reads.
            apart: EmbeddingOutput = run_eager(self._look_up, jagged, is_trained)
            return apart
        return self._look_up(jagged, is_trained)

    def _is_traced_whole(self, jagged: Jagged) -> bool:
        """Return whether a graph can hold a lookup of `jagged` that is not trained."""
        if self._has_limits or self._readers:
            return False
        # An exported program may hold numbers that it reads from tensors; a compiled one breaks at each of them.
        takes_all = all(group.layout.feature_names == jagged.names for group in self._direct_groups)
        return takes_all or torch.compiler.is_exporting()

    def _look_up(self, jagged: Jagged, is_trained: bool) -> EmbeddingOutput:
        looked_up = [self._lookup(_Bags(group, bags_of(jagged, group)), is_trained) for group in self._direct_groups]
        if self._readers:  # after the static tables are checked: a batch with a bad key inserts none
            check_offsets(jagged)
            for group in self._translated_groups:
                if not self.arenas[group.arena].is_dynamic:
                    check_keys(bags_of(jagged, group), group.layout)
            rows = self._find_rows(jagged, is_trained)
            looked_up += [self._lookup(bags, is_trained) for bags in rows]
            if not is_trained:
                for bags in rows:
                    bags.unpin()
        out = assemble(self.features, looked_up, jagged)
        return out if self._dtype == torch.float32 else cast(out, self._dtype)

    def find(self, jagged: Jagged, *, is_trained: bool, repeats: Mapping[str, Tensor] | None = None) -> list[FoundRows]:
        """Find the rows of keys that the caller looks up, such as for another rank.

        Args:
            jagged: Keys of this collection's features, of which each table has one, without pooling; one bag each.
            is_trained: Whether gradients will come; a dynamic table in training mode then inserts new keys.
            repeats: Table -> int64[n], how often each of its keys occurs, for policies that count; 1 for others.

        Returns:
            The rows of each arena.

        Raises:
            StorageError: Memory or a dynamic table is full; dynamic tables are unchanged.
        """
        bags_of_groups = [_Bags(group, bags_of(jagged, group)) for group in self._direct_groups]
        if self._readers:
            bags_of_groups += self._find_rows(jagged, is_trained, repeats or {})
        rows = []
        for bags in sorted(bags_of_groups, key=lambda bags: bags.group.arena):
            arena, generation = self.arenas[bags.group.arena], self.arenas[bags.group.arena].generation
            # Rows of a static table have no places of their own: the caller gets arena rows.
            places = bags.slots
            if places is None:
                places = bags.part.keys + _bases(bags.group.layout, bags.part)
            deposit = partial(self._gradients.keep, bags.group.arena, generation, bags.pin)
            layout = bags.group.layout
            rows.append(
                FoundRows(arena.weights, bags.part.keys, places, layout, deposit, slots=bags.slots, pin=bags.pin)
            )
        return rows

    def quantized(self) -> QuantizedCollection:
        """Return a copy for inference whose rows are 8-bit codes, of D + 8 bytes each.

        Raises:
            ConfigError: A value that is not finite, with its row.
        """
        return QuantizedCollection(self.arenas, self.tables, self.features)

    def take_gradients(self) -> tuple[list[list[BagGradient]], float]:
        """Return and remove the gradients of the backward passes since the last call.

        Returns:
            One list per arena, and the factor to multiply them by: 1 unless they were scaled or clipped
            since the backward pass.
        """
        # Before rows are unpinned below: a gradient that is rejected here leaves its rows in place.
        taken, factor = self.pending.take()
        for index, arena in enumerate(self.arenas):
            # Lookups pinned the rows, so that none is evicted before its gradient is taken.
            arena.unpin()
            if arena.is_dynamic:
                # The arena may have grown since the lookup, and the layout has the number of rows at that time.
                taken[index] = [
                    gradient._replace(layout=fitted(gradient.layout, arena.num_rows)) for gradient in taken[index]
                ]
            if arena.tiers is not None:
                arena.tiers.placement.take()
        return taken, factor

    def table(self, name: str) -> Tensor:
        """Return the weights [rows, D] of the static table `name`, in its type and sharing memory with it.

        Where gradients are enabled and the tables are trained, autograd goes through it: a penalty on the result is
        part of the rows' gradients. Such a gradient is as large as the table; the option `l2` of `RowOptions` needs
        none.

        Raises:
            ConfigError: No such table, or a dynamic one.
        """
        if name not in self.tables:
            raise ConfigError("table", f"got {name!r}, expected one of {', '.join(self.tables)}")
        table = self.tables[name]
        if not isinstance(table, StaticTable):
            what = "dynamic" if table.is_dynamic else "in tiers"
            raise ConfigError("table", f"got {name!r}, which is {what}, expected a static one (see Store.export)")
        if not (torch.is_grad_enabled() and self.is_trained):
            return table.weights
        weights = table.weights
        # No view of the arena: torch does not let views that a custom function returns change in place.
        alias = torch.empty(0, dtype=weights.dtype, device=weights.device).set_(
            weights.untyped_storage(), weights.storage_offset(), weights.shape, weights.stride()
        )
        return with_gradient(self.rows, lambda: alias, self._gradients.of_table(table))

    def tier_use(self) -> TierUse | None:
        """Return the counters of the tables' tiers; None without tiers."""
        uses = [arena.tiers.use for arena in self.arenas if arena.tiers is not None]
        return reduce(TierUse.plus, uses) if uses else None

    def memory_bytes(self) -> int:
        """Return the bytes of all weights, optimizer states and indexes."""
        return sum(table.memory_bytes for table in self.tables.values())

    def extra_repr(self) -> str:
        """Return one line per table with the features that read it."""
        lines = []
        for name, table in self.tables.items():
            readers = [f"{f.name} ({f.pooling})" for f in self.features if f.table == name]
            size = f"{len(table)} keys" if table.is_dynamic else f"{len(table)}"
            lines.append(f"{name}: {size} x {table.width} <- {', '.join(readers) or 'no feature'}")
        return "\n".join(lines)

    def prefetch(self, jagged: Jagged, number: int = 1) -> None:
        """Read the rows of a coming batch into memory, for tables in tiers; another thread may train at the same time.

        Args:
            jagged: Keys of the batch, by its columns; those that no table has are ignored, and so are features whose
                `columns` it does not have.
            number: Number of lookups from now on to that of the batch: 1 for the next.
        """
        RowLoading(self.arenas, self._readers, self.tables).prefetch(self._of_columns(jagged), number)

    def preload(self, keys: Mapping[str, Tensor]) -> None:
        """Load the rows of keys that a part of the data needs, where tables have tiers; changed rows are written back.

        As many as fit come into the fastest memory; the others move there when a batch needs them.

        Args:
            keys: Feature -> int64[n]; those that no table has are ignored, and so are further features.
        """
        RowLoading(self.arenas, self._readers, self.tables).preload(keys)

    def preload_next(
        self, present: Mapping[str, Tensor], keys: Mapping[str, Tensor], goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Load rows of the data's next part next to the present part's; another thread may train at the same time.

        They take the room in the fastest memory that the rows of neither part need; of those beyond, some MiB wait in
        host memory.

        Args:
            present: Feature -> int64[n], keys of the present part.
            keys: Feature -> int64[n], keys of the next part.
            goes_on: Function that is called often; the call returns early once it returns False.
        """
        RowLoading(self.arenas, self._readers, self.tables).preload_next(present, keys, goes_on)

    def _of_columns(self, jagged: Jagged) -> Jagged:
        """Return the columns of a batch that features read, under the names of these."""
        if not self.columns:
            return jagged
        columns = columns_of(self.features, self.columns)
        there = {name: column for name, column in columns.items() if column in jagged.names}
        return replace(select(jagged, tuple(there.values())), names=tuple(there))

    def _find_rows(self, jagged: Jagged, is_trained: bool, repeats: Mapping[str, Tensor] | None = None) -> list[_Bags]:
        """Return the bags of the features whose rows an index finds."""
        rows: dict[int, tuple[Translated, PlacedRows | None]] = {}
        # All transactions end together: if a table is full, those before it undo their inserts, too.
        with ExitStack() as all_or_none:
            for index, readers in self._readers.items():
                arena = self.arenas[index]
                if is_trained:
                    all_or_none.enter_context(arena.transaction)  # so that no thread evicts a row before it is pinned
                part = translate(jagged, readers, self.tables, train=is_trained and self.training, repeats=repeats)
                where = None
                if arena.tiers is not None:
                    where = arena.tiers.placement.place(
                        RowBatch(part.rows, part.part.keys, part.tables), purpose="this batch", is_trained=is_trained
                    )
                rows[index] = part, where
                if is_trained:
                    arena.pin()
        for number, group in enumerate(self._translated_groups):
            # Kept for the next lookups: layouts are checked when they are made, and arenas grow rarely.
            layout = fitted(group.layout, self.arenas[group.arena].num_rows)
            if layout is not group.layout:
                self._translated_groups[number] = replace(group, layout=layout)
        return [self._bags(group, *rows[group.arena]) for group in self._translated_groups]

    def _bags(self, group: LookupGroup, part: Translated, where: PlacedRows | None) -> _Bags:
        arena = self.arenas[group.arena]
        rows = part.rows if arena.is_dynamic else part.part.keys
        bags = bags_of(replace(part.part, keys=rows), group)
        if where is None:
            return _Bags(group, bags)
        assert arena.tiers is not None, "only tiers have slots"
        slots = bags_of(replace(part.part, keys=where.slots), group).keys
        return _Bags(
            group,
            bags,
            slots,
            placed(group.layout, found_rows(arena.weights)),
            arena.tiers.placement.share_pin(where.pin),
        )

    def _lookup(self, bags: _Bags, is_trained: bool) -> tuple[LookupGroup, Jagged, Tensor]:
        """Return a group and its bags with their vectors, whose gradient is deposited here if its rows learn."""
        group, part = bags.group, bags.part
        weights = self.arenas[group.arena].weights
        keys, layout = (part.keys, group.layout) if bags.slots is None else (bags.slots, bags.layout or group.layout)
        key_weights = part.weights if layout.takes_key_weights else None
        deposit = None
        if is_trained:
            deposit = self._gradients.of_bags(
                group.arena, part.keys, part.offsets, group.layout, key_weights, bags.slots, bags.pin
            )
        if key_weights is not None and key_weights.requires_grad and torch.is_grad_enabled():
            pin, bags.is_read_later = bags.pin, True
            vectors = look_up_with_weights(
                weights, keys, part.offsets, layout, key_weights=key_weights, deposit=deposit, pin=pin
            )
            return group, part, vectors

        def look_up() -> Tensor:
            return bag_lookup(weights, keys, part.offsets, layout, key_weights=key_weights)

        return group, part, look_up() if deposit is None else with_gradient(self.rows, look_up, deposit)

    @property
    def is_trained(self) -> bool:
        """Whether the tables are not frozen."""
        with torch._C.DisableTorchFunctionSubclass():  # which would take microseconds
            return self.rows.requires_grad

    def share_weights(self, path: Path) -> None:
        """Read the rows of static tables in memory from files that other processes map, too.

        Args:
            path: Start of the names of the files; one that is not there is written. They may be removed afterwards.

        Raises:
            StorageError: The file system is full.
        """
        for number, arena in enumerate(self.arenas):
            arena.share_weights(path.with_name(f"{path.name}-{number}"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingCollection:
        """Follow ``to(device)``; leave the weights' type, and let lookups return the requested type."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._dtype = self.rows.dtype
        for arena in self.arenas:
            # `fn` does not say where it moves tensors to, so an empty one is sent ahead.
            arena.move(fn(torch.empty(0, device=arena.device)).device)
        for table in self.tables.values():
            if isinstance(table, DynamicTable):
                table.follow_arena()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A marker of the tables for autograd, without memory; the tables write their own entries.
        del destination[f"{prefix}rows"]
        for table in self.tables.values():
            destination.update(entries(table, prefix))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Not by torch's own loading: tables are not tensors of the module, and `rows` has no entry.
        known: set[str] = set()
        for table in self.tables.values():
            known.update(entry_names(table, prefix))
            missing, error = load_entries(table, prefix, state_dict)
            missing_keys.extend(missing)
            if error is not None:
                error_msgs.append(error)
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)


def _bases(layout: BagLayout, part: Jagged) -> Tensor:
    """Return the first arena row int64[N] of the table of each key."""
    bases = _on_device(tuple(layout.table_base[table] for table in layout.feature_table), part.keys.device)
    # With the number of keys, for which a device would be waited for.
    return bases.repeat_interleave(part.offsets.diff(), output_size=part.keys.numel())


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as int64[n] on a device, which a copy in each step would make wait."""
    return torch.tensor(numbers, device=device)


def _stores(arena: AnyArena) -> Sequence[AnyTable]:
    if isinstance(arena, TieredArena):
        return tiered_tables(arena)
    return static_tables(arena) if isinstance(arena, Arena) else dynamic_tables(arena)


@dataclass(slots=True)
class _Bags:
    """The bags of one lookup group.

    Attributes:
        group: The group.
        part: Its bags; keys of dynamic tables are arena rows.
        slots: int64[N], the rows of the arena's weights, where they are in tiers.
        layout: Layout of a lookup of `slots`.
        pin: Pin that keeps the slots.
        is_read_later: Whether a backward pass reads the rows.
    """

    group: LookupGroup
    part: Jagged
    slots: Tensor | None = None
    layout: BagLayout | None = None
    pin: Pin | None = None
    is_read_later: bool = False

    def unpin(self) -> None:
        """Unpin the slots, unless a backward pass reads them."""
        if self.pin is not None and not self.is_read_later:
            self.pin.release()
