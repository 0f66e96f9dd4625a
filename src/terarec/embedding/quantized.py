"""`QuantizedCollection`: the tables of a collection as rows of 8-bit codes, for inference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from terarec.batch import Jagged
from terarec.embedding.grouping import LookupGroup
from terarec.embedding.output import EmbeddingOutput, assemble, bags_of
from terarec.errors import ConfigError
from terarec.ops.quantized import quantize_rows, quantized_bag_lookup
from terarec.spec import FeatureSpec
from terarec.storage import Arena, DynamicArena


class QuantizedCollection(nn.Module):
    """Looks up as the collection it was made from, in rows of 8-bit codes with a scale and an offset each.

    A row takes D + 8 bytes. It is a copy: later training does not reach it, and it does not train. The packed rows are
    buffers ``rows_<n>`` of the module, uint8[V, D + 8] for each arena.

    Args:
        arenas: of the collection.
        groups: of its features.
        features: the order of the output's columns.

    Raises:
        ConfigError: dynamic tables, or a value that is not finite.
    """

    def __init__(
        self, arenas: Sequence[Arena | DynamicArena], groups: Sequence[LookupGroup], features: Sequence[FeatureSpec]
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self._groups = tuple(groups)
        for number, arena in enumerate(arenas):
            if isinstance(arena, DynamicArena):
                raise ConfigError(f"quantized: got the dynamic tables {', '.join(arena.table_names)}, expected static")
            self.register_buffer(f"rows_{number}", quantize_rows(arena.weights))

    def forward(self, jagged: Jagged) -> EmbeddingOutput:
        """Look every feature up.

        Args:
            jagged: keys of at least this collection's features.

        Raises:
            ConfigError: a feature that `jagged` does not hold.
            KeyOutOfRangeError: a key outside its table, with feature and table named.
        """
        looked_up = []
        for group in self._groups:
            part = bags_of(jagged, group)
            key_weights = part.weights if group.layout.takes_key_weights else None
            packed = self.get_buffer(f"rows_{group.arena}")
            vectors = quantized_bag_lookup(packed, part.keys, part.offsets, group.layout, key_weights=key_weights)
            looked_up.append((group, part, vectors))
        return assemble(self.features, looked_up, jagged)

    def memory_bytes(self) -> int:
        """Bytes of all packed rows."""
        return sum(rows.numel() for rows in self.buffers())
