# SPDX-License-Identifier: Apache-2.0
"""The arguments and errors of embedding kernels of every implementation: plain tensors and numbers, without names.

A layout array is int64[S, 4] in host memory with a row for each feature: the first arena row of its table, the rows of
its table, its pooling, one of `SUM`, `MEAN`, `NONE`, `SQRTN` (the sum divided by the root of the number of keys) and
`MAX`, and the number of its table in the layout. `NONE` holds for all features of a layout or for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from terarec.errors import ConfigError, KeyOutOfRangeError

SUM, MEAN, NONE, SQRTN, MAX = 0, 1, 2, 3, 4

ANY_ROWS = 2**62
"""Rows of a table of which the caller has found the keys itself: where the host would wait for a device to check them,
it does not."""

ROW_TAIL_BYTES = 8
"""Bytes after the codes of a quantized row: its scale and its offset, float32, little-endian."""


class KernelGradient(NamedTuple):
    """The gradient of one lookup.

    Attributes:
        keys: int64[N].
        offsets: int64[S * B + 1].
        grad: float32[B, S * D], or float32[N, D] for a layout without pooling.
        layout: The layout array.
        key_weights: float32[N] that multiplied the keys' vectors, or None.
        places: int64[N], the row of weights and state that holds each key's row, where arena rows do not lie in their
            order; None where they do. Grouping, sums and random bits depend on arena rows alone. Either all
            gradients of an update have places, or none has; not for rules that update all rows.
    """

    keys: Tensor
    offsets: Tensor
    grad: Tensor
    layout: Tensor
    key_weights: Tensor | None = None
    places: Tensor | None = None


class Extents(NamedTuple):
    """The extents that the tensors of a lookup must fit.

    Attributes:
        num_features: S.
        width: D.
        num_rows: The least V.
        is_pooled: Whether the features' bags are pooled.
        takes_key_weights: Whether weights may multiply the keys' vectors.
    """

    num_features: int
    width: int
    num_rows: int
    is_pooled: bool
    takes_key_weights: bool


class BadKeyError(KeyOutOfRangeError):
    """A key outside its table, by the number of its feature; `ops` turns it into one that has the names.

    Attributes:
        feature: Number of the feature in its layout.
        position: Position of the key among all keys of its lookup.
        key: The key.
        rows: Rows of the feature's table.
        gradient: Number of the `KernelGradient` that holds the key, for a row update.
    """

    def __init__(self, feature: int, position: int, key: int, rows: int, gradient: int = 0) -> None:
        super().__init__(f"feature {feature}", f"got key {key} at position {position}, expected 0 <= key < {rows}")
        self.feature = feature
        self.position = position
        self.key = key
        self.rows = rows
        self.gradient = gradient


def bad_offsets(index: int, value: int, num_keys: int) -> ConfigError:
    """Return the error for ``offsets[index] == value``, which decreases, exceeds the keys, or does not cover them."""
    return ConfigError(f"offsets[{index}]", f"got {value}, expected offsets rising from 0 to the {num_keys} keys")


def full_update_ranges(gradients: Sequence[KernelGradient], table_lr: Tensor | None) -> list[tuple[int, int, float]]:
    """Return the first arena row, rows and learning rate factor of each table that is looked up and trained.

    Args:
        gradients: Gradients of one or more lookups in one arena.
        table_lr: float32[T] in host memory, factors by table of the layouts; 0: not updated. None for ones.

    Returns:
        Ranges in the order of their rows, without empty tables; one range for tables that share rows.
    """
    # An empty table begins where the next one does, and must not stand for it.
    lines = (line for gradient in gradients for line in gradient.layout[:, [0, 1, 3]].tolist())
    tables = {tuple(line) for line in lines if line[1]}
    # Tables that share rows have one factor, which `ops.row_update` checks.
    by_base = {base: (rows, 1.0 if table_lr is None else float(table_lr[table])) for base, rows, table in tables}
    return [(base, rows, factor) for base, (rows, factor) in sorted(by_base.items()) if factor]
