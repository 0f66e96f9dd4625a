"""`EmbeddingCollection`: all tables of a model, looked up together, their rows updated apart from autograd.

A forward pass gathers the vectors outside autograd and hands them on as a leaf tensor. Backward deposits the leaf's
gradient here, with the keys it belongs to; ``optim.RowOptimizer.step`` takes the deposits and updates the touched
rows in place. So no gradient as large as a table ever exists, and the tables are not `torch.nn.Parameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, select
from terarec.embedding.grouping import LookupGroup, check_names, lookup_groups, split_by_width
from terarec.errors import ConfigError
from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.row_update import BagGradient
from terarec.spec import FeatureSpec, TableSpec
from terarec.storage import Arena, static_tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The unpooled vectors of one feature: sample b holds ``values[offsets[b] : offsets[b + 1]]``.

    Attributes:
        values: float32[n, D] for the feature's n keys.
        offsets: int64[B + 1].
    """

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingOutput:
    """What a lookup gives.

    Attributes:
        pooled: float32[B, sum(D)], the pooled features side by side in feature order.
        sequences: unpooled feature -> its vectors.
    """

    pooled: Tensor
    sequences: Mapping[str, Sequences]


class EmbeddingCollection(nn.Module):
    """Tables and the features that look them up.

    Weights stay float32 whatever ``half()``, ``bfloat16()`` or ``to(dtype)`` ask of the module; ``to(device)`` moves
    them. ``state_dict()`` holds ``tables.<name>`` views that share memory with the tables.

    Args:
        tables: the tables; those of one width share an arena.
        features: the features; the order of the output's columns.
        seed: of the first weights, which depend on table name, row and seed only.

    Raises:
        ConfigError: repeated names, or a feature of an unknown table.
        StorageError: not enough memory for the tables.
    """

    def __init__(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], *, seed: int = 0) -> None:
        super().__init__()
        check_names(tables, features)
        self.features = tuple(features)
        self.arenas = tuple(Arena(group, seed=seed) for group in split_by_width(tables))
        stores = {table.name: table for arena in self.arenas for table in static_tables(arena)}
        self.tables = {spec.name: stores[spec.name] for spec in tables}
        self.pending: tuple[list[BagGradient], ...] = tuple([] for _ in self.arenas)
        self._groups = lookup_groups(self.arenas, self.features)
        pooled = [feature for feature in self.features if feature.pooling != "none"]
        self._pooled_names = tuple(feature.name for feature in pooled)
        self.output_width = sum(self.tables[feature.table].width for feature in pooled)

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up.

        Args:
            jagged: keys of at least this collection's features.

        Raises:
            ConfigError: a feature that `jagged` does not hold.
            KeyOutOfRangeError: a key outside its table, with feature and table named.
        """
        pooled: dict[tuple[str, ...], Tensor] = {}
        sequences: dict[str, Sequences] = {}
        for group in self._groups:
            names = group.layout.feature_names
            part = select(jagged, names)
            vectors = self._lookup(group, part)
            if group.is_pooled:
                pooled[names] = vectors
            else:
                sequences.update(_split_sequences(part, vectors))
        return EmbeddingOutput(pooled=self._in_feature_order(pooled, jagged), sequences=sequences)

    def take_gradients(self) -> list[list[BagGradient]]:
        """Hand over, and forget, the gradients that backward passes left here: one list per arena."""
        taken = [list(gradients) for gradients in self.pending]
        for gradients in self.pending:
            gradients.clear()
        return taken

    def table(self, name: str) -> Tensor:
        """The weights float32[rows, D] of table `name`, sharing memory with it.

        Raises:
            ConfigError: no such table.
        """
        if name not in self.tables:
            raise ConfigError(f"table: got {name!r}, expected one of {', '.join(self.tables)}")
        return self.tables[name].weights

    def memory_bytes(self) -> int:
        """Bytes of all weights and optimizer states."""
        return sum(arena.memory_bytes for arena in self.arenas)

    def extra_repr(self) -> str:
        """One line per table with the features that read it."""
        lines = []
        for name, table in self.tables.items():
            readers = [f"{f.name} ({f.pooling})" for f in self.features if f.table == name]
            lines.append(f"{name}: {len(table)} x {table.width} <- {', '.join(readers) or 'no feature'}")
        return "\n".join(lines)

    def _lookup(self, group: LookupGroup, part: Jagged) -> Tensor:
        """The vectors of `group`, as a leaf whose gradient is deposited here when training."""
        arena = self.arenas[group.arena]
        with torch.no_grad():
            vectors = bag_lookup(arena.weights, part.keys, part.offsets, group.layout)
        if self.training and torch.is_grad_enabled():
            pending = self.pending[group.arena]

            def deposit(leaf: Tensor) -> None:
                if leaf.grad is not None:
                    pending.append(
                        BagGradient(keys=part.keys, offsets=part.offsets, grad=leaf.grad, layout=group.layout)
                    )
                    leaf.grad = None

            vectors.requires_grad_()
            vectors.register_post_accumulate_grad_hook(deposit)  # type: ignore[no-untyped-call]
        return vectors

    def _in_feature_order(self, pooled: Mapping[tuple[str, ...], Tensor], jagged: Jagged) -> Tensor:
        if len(pooled) == 1:
            return next(iter(pooled.values()))
        columns: dict[str, Tensor] = {}
        for names, vectors in pooled.items():
            columns.update(zip(names, torch.split(vectors, vectors.shape[1] // len(names), dim=1), strict=True))
        in_order = [columns[feature.name] for feature in self.features if feature.name in columns]
        if in_order:
            return torch.cat(in_order, dim=1)
        return self.arenas[0].weights.new_empty(jagged.batch_size, 0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingCollection:
        """Follow ``to(device)``; leave the weights float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for arena in self.arenas:
            arena.move(fn(torch.empty(0, device=arena.device)).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, table in self.tables.items():
            destination[f"{prefix}tables.{name}"] = table.weights

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
        keys = {f"{prefix}tables.{name}": table.weights for name, table in self.tables.items()}
        for key, weights in keys.items():
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != weights.shape:
                got, expected = list(state_dict[key].shape), list(weights.shape)
                error_msgs.append(f"{key}: got shape {got}, expected {expected} (rows, width)")
            else:
                weights.copy_(state_dict[key])
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in keys)


def _split_sequences(part: Jagged, vectors: Tensor) -> dict[str, Sequences]:
    """Cut ``vectors float32[N, D]`` of several features into one `Sequences` each."""
    batch_size = part.batch_size
    starts = part.offsets[::batch_size] if batch_size else part.offsets.expand(len(part.names) + 1)
    values = torch.split(vectors, starts.diff().tolist())
    return {
        name: Sequences(
            values=values[index],
            offsets=part.offsets[index * batch_size : (index + 1) * batch_size + 1] - starts[index],
        )
        for index, name in enumerate(part.names)
    }
