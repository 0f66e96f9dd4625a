# SPDX-License-Identifier: Apache-2.0
"""`QuantizedCollection`: the tables of a collection as rows of 8-bit codes, for inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terarec.batch import Jagged, check_offsets
from terarec.embedding.output import EmbeddingOutput, assemble, bags_of
from terarec.embedding.tables import fitted, lookup_groups, translate, translated_readers
from terarec.ops.bag_lookup import quantize_rows, quantized_bag_lookup
from terarec.spec import FeatureSpec
from terarec.storage.key_rows import FrozenKeys
from terarec.storage.kinds import AnyArena, AnyTable

_ROWS_AT_ONCE = 1 << 18


class QuantizedCollection(nn.Module):
    """A copy of a collection for inference, with rows of 8-bit codes with a scale and an offset each.

    A row takes D + 8 bytes, and a key of a dynamic table 8 bytes and its index entry. Later training does not change
    the copy. Buffers of the module are ``rows_<n>`` uint8[V, D + 8] for each arena, and for those of
    dynamic tables ``keys_<n>_<t>`` int64[*] of each of the T tables: rows t < T are the defaults, the others follow
    table by table in the order of the keys. Buffers of any number of keys can be loaded.

    Args:
        arenas: Arenas of the collection.
        tables: Tables of these arenas by name.
        features: Features, in the order of the output's columns.

    Raises:
        ConfigError: A value that is not finite.
    """

    def __init__(
        self, arenas: Sequence[AnyArena], tables: Mapping[str, AnyTable], features: Sequence[FeatureSpec]
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self._groups = lookup_groups(arenas, features)
        self._dynamic_names = {number: arena.table_names for number, arena in enumerate(arenas) if arena.is_dynamic}
        self._dynamic_readers = {
            number: readers
            for number, readers in translated_readers(arenas, features).items()
            if number in self._dynamic_names
        }
        self._keys: dict[str, FrozenKeys] = {}
        for number, arena in enumerate(arenas):
            for place, name in enumerate(self._dynamic_names.get(number, ())):
                self.register_buffer(f"keys_{number}_{place}", tables[name].keys())
            self.register_buffer(f"rows_{number}", self._packed(number, arena, tables))
        self._follow_buffers()

    def _packed(self, number: int, arena: AnyArena, tables: Mapping[str, AnyTable]) -> Tensor:
        """Return the rows of an arena as codes: of dynamic tables the defaults, then the rows in key order."""
        if not arena.is_dynamic and arena.tiers is None:
            return quantize_rows(arena.weights)
        parts = []
        if arena.num_defaults:
            parts.append(quantize_rows(arena.weights[: arena.num_defaults]))
        for place, name in enumerate(arena.table_names):
            table = tables[name]
            keys = self.get_buffer(f"keys_{number}_{place}") if table.is_dynamic else table.keys()
            # In pieces, which bound the float32 copies that an export makes.
            parts += [quantize_rows(table.export(part).weights) for part in torch.split(keys, _ROWS_AT_ONCE)]
        return torch.cat(parts)

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up; a key that was not in its dynamic table gives the table's default vector.

        Args:
            jagged: Keys of at least this collection's features.

        Raises:
            ConfigError: A feature that `jagged` does not have, or offsets that decrease or do not cover the keys.
            KeyOutOfRangeError: A key outside its static table, with feature and table named.
        """
        if torch.compiler.is_compiling() and self._dynamic_readers:
            from terarec.ops.traced import run_eager  # loads the compiler

            apart: EmbeddingOutput = run_eager(self._look_up, jagged)  # a graph cannot contain an index
            return apart
        return self._look_up(jagged)

    def memory_bytes(self) -> int:
        """Return the bytes of all packed rows, keys and indexes."""
        indexes = sum(index.memory_bytes for index in self._keys.values())
        return indexes + sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def _look_up(self, jagged: Jagged) -> EmbeddingOutput:
        rows = {}
        if self._dynamic_readers:
            check_offsets(jagged)
            for number, readers in self._dynamic_readers.items():
                translated = translate(jagged, readers, self._keys, train=False)
                # Rows in place of keys: the layout of a dynamic arena takes rows of the whole arena.
                rows[number] = dataclasses.replace(translated.part, keys=translated.rows)
        looked_up = []
        for group in self._groups:
            part = bags_of(rows.get(group.arena, jagged), group)
            key_weights = part.weights if group.layout.takes_key_weights else None
            packed = self.get_buffer(f"rows_{group.arena}")
            vectors = quantized_bag_lookup(packed, part.keys, part.offsets, group.layout, key_weights=key_weights)
            looked_up.append((group, part, vectors))
        return assemble(self.features, looked_up, jagged)

    def _follow_buffers(self) -> None:
        """Build indexes and layouts from the keys in the buffers."""
        for number, names in self._dynamic_names.items():
            next_row = len(names)
            for place, name in enumerate(names):
                keys = self.get_buffer(f"keys_{number}_{place}")
                self._keys[name] = FrozenKeys(keys, first_row=next_row, default_row=place)
                next_row += keys.numel()
        for place, group in enumerate(self._groups):
            if group.arena in self._dynamic_names:
                layout = fitted(group.layout, self.get_buffer(f"rows_{group.arena}").shape[0])
                self._groups[place] = dataclasses.replace(group, layout=layout)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedCollection:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._follow_buffers()
        return self

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
        error = self._fit_buffers(state_dict, prefix)
        if error is not None:
            error_msgs.append(error)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._follow_buffers()

    def _fit_buffers(self, state: Mapping[str, Any], prefix: str) -> str | None:
        """Resize the buffers of dynamic tables to those in `state`; return the problem with these, or None."""
        for number, names in self._dynamic_names.items():
            buffers = [f"rows_{number}", *(f"keys_{number}_{place}" for place in range(len(names)))]
            lengths = [state[prefix + name].shape[0] for name in buffers if prefix + name in state]
            if len(lengths) < len(buffers):
                continue  # the module reports those that are missing
            expected = len(names) + sum(lengths[1:])
            if lengths[0] != expected:
                return f"{prefix}rows_{number}: got {lengths[0]} rows, expected {expected}, one a key and table"
            for name, length in zip(buffers, lengths, strict=True):
                buffer = self.get_buffer(name)
                # torch copies into the buffers that are there, and rejects other shapes.
                setattr(self, name, buffer.new_empty(length, *buffer.shape[1:]))
        return None

    # Indexes follow from the keys in the buffers, and are built again.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_keys": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._follow_buffers()
