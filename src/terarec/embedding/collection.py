"""`EmbeddingCollection`: all tables of a model, looked up together, their rows updated apart from autograd.

A forward pass gathers the vectors outside autograd and hands them on as a leaf tensor. Backward deposits the leaf's
gradient here, with the keys it belongs to; ``optim.RowOptimizer.step`` takes the deposits and updates the touched
rows in place. So no gradient as large as a table ever exists, and the tables are not `torch.nn.Parameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, check_offsets
from terarec.embedding.grouping import (
    AnyArena,
    AnyTableSpec,
    LookupGroup,
    build_arenas,
    check_names,
    dynamic_readers,
    fitted,
    lookup_groups,
)
from terarec.embedding.learned_weights import look_up_with_weights
from terarec.embedding.output import EmbeddingOutput, assemble, bags_of
from terarec.embedding.pending import PendingGradients
from terarec.embedding.quantized import QuantizedCollection
from terarec.embedding.table_state import AnyTable, entries, entry_names, load_entries
from terarec.embedding.translation import translate
from terarec.errors import ConfigError, StorageError
from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.row_update import BagGradient
from terarec.spec import FeatureSpec
from terarec.storage import Arena, DynamicArena, DynamicTable, dynamic_tables, static_tables


class EmbeddingCollection(nn.Module):
    """Tables and the features that look them up.

    Weights keep the types of their tables whatever ``half()``, ``bfloat16()`` or ``to(dtype)`` ask of the module;
    ``to(device)`` moves them. ``state_dict()`` holds views ``tables.<name>`` that share memory with the static tables,
    and copies ``tables.<name>.keys int64[n]`` and ``tables.<name>.weights float32[n, D]`` of dynamic ones; loaded,
    these replace all that a table held.

    A dynamic table takes up unseen keys in forward passes in training mode with gradients enabled, and only there.

    Args:
        tables: the tables; the static ones of one width and element type share an arena, and so do the dynamic ones.
        features: the features; the order of the output's columns.
        seed: of the first weights, which depend on table name, row and seed only.

    Raises:
        ConfigError: repeated names, or a feature of an unknown table.
        StorageError: not enough memory for the tables.
    """

    def __init__(self, tables: Sequence[AnyTableSpec], features: Sequence[FeatureSpec], *, seed: int = 0) -> None:
        super().__init__()
        check_names(tables, features)
        self.features = tuple(features)
        self.arenas = build_arenas(tables, seed=seed)
        stores = {table.name: table for arena in self.arenas for table in _stores(arena)}
        self.tables = {spec.name: stores[spec.name] for spec in tables}
        self.pending = tuple(PendingGradients(f"tables {', '.join(arena.table_names)}") for arena in self.arenas)
        self._dynamic_readers = dynamic_readers(self.arenas, self.features)
        groups = lookup_groups(self.arenas, self.features)
        self._static_groups = [group for group in groups if group.arena not in self._dynamic_readers]
        self._dynamic_groups = [group for group in groups if group.arena in self._dynamic_readers]
        self._has_limits = any(feature.max_keys is not None for feature in self.features)  # which need bags' lengths
        pooled = [feature for feature in self.features if feature.pooling != "none"]
        self.output_width = sum(self.tables[feature.table].width for feature in pooled)

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up.

        Args:
            jagged: keys of at least this collection's features; its weights count for the features that are pooled by
                "sum", "mean" or "sqrtn".

        Raises:
            ConfigError: a feature that `jagged` does not hold, or offsets that fall or do not cover the keys.
            KeyOutOfRangeError: a key outside its static table, with feature and table named.
            StorageError: memory or a dynamic table is full.

        Where one of these is raised, dynamic tables are as they were.
        """
        learns = self.training and torch.is_grad_enabled()
        if (learns or self._has_limits or self._dynamic_readers) and torch.compiler.is_compiling():
            from terarec.embedding.traced import beside_graph  # loads the compiler

            # A graph would lose the hooks that take gradients, and an index that grows. The one after this takes the
            # vectors as an input that needs a gradient, so nothing is copied. An op in the graph whose backward puts
            # the gradient aside would have to copy it: the compiler reuses the memory of what no later node reads.
            apart: EmbeddingOutput = beside_graph(self._look_up, jagged, learns)
            return apart
        return self._look_up(jagged, learns)

    def _look_up(self, jagged: Jagged, learns: bool) -> EmbeddingOutput:
        looked_up = [self._lookup(group, bags_of(jagged, group), learns) for group in self._static_groups]
        if self._dynamic_readers:  # after the static tables refused a bad key: no key of such a batch is taken up
            check_offsets(jagged)
            rows = self._translate(jagged, learns)
            looked_up += [
                self._lookup(group, bags_of(rows[group.arena], group), learns) for group in self._dynamic_groups
            ]
        return assemble(self.features, looked_up, jagged)

    def quantized(self) -> QuantizedCollection:
        """A copy for inference whose rows are 8-bit codes, of D + 8 bytes each.

        Raises:
            ConfigError: a value that is not finite, with its row.
        """
        return QuantizedCollection(self.arenas, self.tables, self.features)

    def take_gradients(self) -> list[list[BagGradient]]:
        """Hand over, and forget, the gradients that backward passes left here: one list per arena."""
        taken = []
        for arena, gradients in zip(self.arenas, self.pending, strict=True):
            mine = gradients.take()
            if isinstance(arena, DynamicArena):
                arena.let_go()
                mine = [held._replace(layout=fitted(held.layout, arena.num_rows)) for held in mine]
            taken.append(mine)
        return taken

    def table(self, name: str) -> Tensor:
        """The weights [rows, D] of the static table `name`, in its type and sharing memory with it.

        Raises:
            ConfigError: no such table, or a dynamic one.
        """
        if name not in self.tables:
            raise ConfigError(f"table: got {name!r}, expected one of {', '.join(self.tables)}")
        table = self.tables[name]
        if isinstance(table, DynamicTable):
            raise ConfigError(f"table: got {name!r}, which is dynamic, expected a static one (see Store.export)")
        return table.weights

    def memory_bytes(self) -> int:
        """Bytes of all weights, optimizer states and indexes."""
        return sum(table.memory_bytes for table in self.tables.values())

    def extra_repr(self) -> str:
        """One line per table with the features that read it."""
        lines = []
        for name, table in self.tables.items():
            readers = [f"{f.name} ({f.pooling})" for f in self.features if f.table == name]
            size = f"{len(table)} keys" if table.is_dynamic else f"{len(table)}"
            lines.append(f"{name}: {size} x {table.width} <- {', '.join(readers) or 'no feature'}")
        return "\n".join(lines)

    def _translate(self, jagged: Jagged, learns: bool) -> dict[int, Jagged]:
        """Number of a dynamic arena -> its features with arena rows as keys."""
        rows = {}
        with ExitStack() as all_or_none:
            for index, readers in self._dynamic_readers.items():
                arena = self.arenas[index]
                assert isinstance(arena, DynamicArena)
                if learns:  # locks the arena: else another thread could evict a row between finding and holding it
                    all_or_none.enter_context(arena.changes)
                rows[index] = translate(jagged, readers, self.tables, train=learns)
                if learns:
                    arena.hold()
        for number, group in enumerate(self._dynamic_groups):
            layout = fitted(group.layout, self.arenas[group.arena].num_rows)
            if layout is not group.layout:
                self._dynamic_groups[number] = replace(group, layout=layout)
        return rows

    def _lookup(self, group: LookupGroup, part: Jagged, learns: bool) -> tuple[LookupGroup, Jagged, Tensor]:
        """The bags of `group` with their vectors, whose gradient is deposited here if its rows learn."""
        weights, layout = self.arenas[group.arena].weights, group.layout
        key_weights = part.weights if layout.takes_key_weights else None
        if key_weights is not None and key_weights.requires_grad and torch.is_grad_enabled():
            deposit = self._deposit_of(group, part, key_weights) if learns else None
            vectors = look_up_with_weights(
                weights, part.keys, part.offsets, layout, key_weights=key_weights, deposit=deposit
            )
            return group, part, vectors
        vectors = bag_lookup(weights, part.keys, part.offsets, layout, key_weights=key_weights)
        if learns:
            _make_leaf(vectors, self._deposit_of(group, part, key_weights))
        return group, part, vectors

    def _deposit_of(self, group: LookupGroup, part: Jagged, key_weights: Tensor | None) -> Callable[[Tensor], None]:
        """What takes the gradient of the vectors of `group`, and puts it aside for the row optimizer."""
        arena, pending = self.arenas[group.arena], self.pending[group.arena]
        generation = arena.generation

        def deposit(grad: Tensor) -> None:
            if arena.generation != generation:
                raise _rows_gone(arena)
            factors = None if key_weights is None else key_weights.detach()
            pending.put(BagGradient(part.keys, part.offsets, grad, group.layout, factors))

        return deposit

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingCollection:
        """Follow ``to(device)``; leave the weights' type."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for arena in self.arenas:
            arena.move(fn(torch.empty(0, device=arena.device)).device)
        for table in self.tables.values():
            if isinstance(table, DynamicTable):
                table.follow_arena()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
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
        known: set[str] = set()
        for table in self.tables.values():
            known.update(entry_names(table, prefix))
            missing, error = load_entries(table, prefix, state_dict)
            missing_keys.extend(missing)
            if error is not None:
                error_msgs.append(error)
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in known)


def _stores(arena: AnyArena) -> Sequence[AnyTable]:
    return static_tables(arena) if isinstance(arena, Arena) else dynamic_tables(arena)


def _rows_gone(arena: AnyArena) -> StorageError:
    return StorageError(
        f"backward: rows of tables {', '.join(arena.table_names)} were evicted and given to other keys since the "
        "forward pass, expected the row optimizer's step before the next forward pass"
    )


def _make_leaf(vectors: Tensor, deposit: Callable[[Tensor], None]) -> None:
    """Let autograd end at `vectors`, and hand their gradient to `deposit`."""

    def hand_over(leaf: Tensor) -> None:
        grad = leaf.grad
        if grad is not None:
            deposit(grad)
            leaf.grad = None

    vectors.requires_grad_()
    # What `register_post_accumulate_grad_hook` does, but for a handle to take the hook away, which costs 7 us a call.
    vectors._post_accumulate_grad_hooks = {0: hand_over}
