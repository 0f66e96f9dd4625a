# SPDX-License-Identifier: Apache-2.0
"""`BagLayout`: which rows of an arena each feature looks up, and how its bags are pooled."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.contract import ANY_ROWS, MAX, MEAN, NONE, SQRTN, SUM, Extents
from terarec.spec import Pooling

_CODES = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN, "max": MAX, "none": NONE}


@dataclass(frozen=True, kw_only=True)
class BagLayout:
    """S features over T tables that share one arena float32[V, D].

    Attributes:
        table_names: The T tables.
        table_base: Arena row of each table's first row.
        table_rows: Rows of each table; see `found_rows`.
        feature_names: The S features.
        feature_table: Index of each feature's table; several features may share one.
        pooling: Pooling of each feature; "none" for all of them or for none.
        width: Length D of a vector.
    """

    table_names: tuple[str, ...]
    table_base: tuple[int, ...]
    table_rows: tuple[int, ...]
    feature_names: tuple[str, ...]
    feature_table: tuple[int, ...]
    pooling: tuple[Pooling, ...]
    width: int

    def __post_init__(self) -> None:
        tables = len(self.table_names)
        if len(self.table_base) != tables or len(self.table_rows) != tables:
            raise ConfigError(
                "BagLayout",
                f"got {tables} tables, {len(self.table_base)} bases and {len(self.table_rows)} row counts, "
                "expected as many of each",
            )
        if any(number < 0 for number in (*self.table_base, *self.table_rows)):
            raise ConfigError(
                "BagLayout", f"got table_base {self.table_base} and table_rows {self.table_rows}, expected none below 0"
            )
        features = len(self.feature_names)
        if features == 0 or len(self.feature_table) != features or len(self.pooling) != features:
            raise ConfigError(
                "BagLayout",
                f"got {features} features with {len(self.feature_table)} tables and {len(self.pooling)} "
                "poolings, expected at least one feature and as many of each",
            )
        if any(not 0 <= table < tables for table in self.feature_table):
            raise ConfigError("BagLayout.feature_table", f"got {self.feature_table}, expected 0 <= index < {tables}")
        if any(pooling not in _CODES for pooling in self.pooling):
            raise ConfigError(
                "BagLayout.pooling", f"got {self.pooling}, expected one of {', '.join(map(repr, _CODES))} for each"
            )
        if len({pooling == "none" for pooling in self.pooling}) > 1:
            raise ConfigError("BagLayout.pooling", f"got {self.pooling}, expected 'none' for all features or for none")
        if self.width < 1:
            raise ConfigError("BagLayout.width", f"got {self.width}, expected at least 1")
        # Computed before a compiler comes, which could not trace it.
        _ = self.extents, self.pooling_codes, self.array

    @functools.cached_property
    def is_pooled(self) -> bool:
        """Whether the features' bags are pooled."""
        return self.pooling[0] != "none"

    @functools.cached_property
    def pooling_codes(self) -> tuple[int, ...]:
        """The pooling of each feature as the layout array has it."""
        return tuple(_CODES[pooling] for pooling in self.pooling)

    @functools.cached_property
    def takes_key_weights(self) -> bool:
        """Whether weights may multiply the keys' vectors: "max" and "none" have no use for them."""
        return not {"max", "none"} & set(self.pooling)

    @functools.cached_property
    def num_rows(self) -> int:
        """Arena rows that the tables need: V is at least this."""
        # The largest end, not a sum: tables may share rows, as those of an arena that grows do.
        ends = zip(self.table_base, self.table_rows, strict=True)
        return max(0 if rows == ANY_ROWS else base + rows for base, rows in ends)

    @functools.cached_property
    def extents(self) -> Extents:
        """The extents that tensors must fit, as one object for kernels."""
        return Extents(len(self.feature_names), self.width, self.num_rows, self.is_pooled, self.takes_key_weights)

    @functools.cached_property
    def array(self) -> Tensor:
        """The layout array int64[S, 4] that kernels take, see `terarec.kernels.contract`."""
        tables = zip(self.feature_table, self.pooling, strict=True)
        return torch.tensor(
            [(self.table_base[table], self.table_rows[table], _CODES[pooling], table) for table, pooling in tables],
            dtype=torch.int64,
        )

    @functools.cached_property
    def by_key(self) -> BagLayout:
        """This layout without pooling."""
        pooling: tuple[Pooling, ...] = tuple("none" for _ in self.pooling)
        return replace(self, pooling=pooling)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first arena row and the pooling code of each feature, int64[S] each, on a device."""
        first_rows = tuple(self.table_base[table] for table in self.feature_table)
        return numbers_on(first_rows, device), numbers_on(self.pooling_codes, device)


@functools.lru_cache(maxsize=256)
def numbers_on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64[n] on a device. They are kept, since a copy in each step would make the device wait."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def result_shape(keys: Tensor, offsets: Tensor, num_features: int, width: int, is_pooled: bool) -> tuple[int, int]:
    """Return (B, S * D), the shape of a lookup's output; (N, D) without pooling.

    Args:
        keys: int64[N].
        offsets: int64[S * B + 1].
        num_features: S.
        width: Length D of a vector.
        is_pooled: Whether the features' bags are pooled.
    """
    if is_pooled:
        return (offsets.shape[0] - 1) // num_features, num_features * width
    return keys.shape[0], width


def found_rows(weights: Tensor) -> int:
    """Return the rows of a table for keys that the caller has found in ``weights [V, D]``: V; on a device `ANY_ROWS`.

    There the host would wait for a check of these keys, and for a copy of a layout that holds for one step alone.
    """
    return weights.shape[0] if weights.is_cpu else ANY_ROWS


@functools.lru_cache(maxsize=256)  # a device keeps a copy of each
def placed(layout: BagLayout, num_rows: int) -> BagLayout:
    """Return `layout` for keys that are rows of weights ``[num_rows, D]``."""
    num_tables = len(layout.table_names)
    return replace(layout, table_base=(0,) * num_tables, table_rows=(num_rows,) * num_tables)


@functools.lru_cache(maxsize=256)
def single_layout(rows: int, width: int, pooling: Pooling) -> BagLayout:
    """Return the layout of a feature "input" that looks up the only table, "weight"."""
    return BagLayout(
        table_names=("weight",),
        table_base=(0,),
        table_rows=(rows,),
        feature_names=("input",),
        feature_table=(0,),
        pooling=(pooling,),
        width=width,
    )
