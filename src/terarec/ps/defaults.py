"""Vectors of keys that no tier has."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from terarec.kernels.rows import initialise_keys
from terarec.spec import DynamicTableSpec, TableSpec
from terarec.storage.arena import first_scale


class DefaultRows(Protocol):
    """The vectors of keys that no tier has."""

    def __call__(self, keys: Tensor, /) -> Tensor:
        """Return float32[n, D] for ``keys int64[n]``."""


def constant_rows(width: int, value: float | tuple[float, ...] = 0.0) -> DefaultRows:
    """Return default rows of one vector: of one number for all columns, or `width` of them."""
    vector = torch.tensor(value, dtype=torch.float32).expand(width)
    return lambda keys: vector.expand(keys.numel(), width)


def default_rows(table: TableSpec | DynamicTableSpec, seed: int | None) -> DefaultRows:
    """Return the default rows of a trained table.

    Args:
        table: The table. The default vector of a dynamic one is its own; that of a static one is zeros.
        seed: Seed of the first weights that the rows of a static table have unless training changed them, for a
            checkpoint that leaves such rows out; None for one that has all rows.
    """
    if isinstance(table, DynamicTableSpec):
        return constant_rows(table.width, table.default)
    if seed is None:
        return constant_rows(table.width)
    static, of_rows = table, seed

    def first_rows(keys: Tensor) -> Tensor:
        rows = torch.zeros(keys.numel(), static.width)
        places = ((keys >= 0) & (keys < static.rows)).nonzero()[:, 0]
        initialise_keys(
            rows,
            places,
            keys[places],
            table=static.name,
            seed=of_rows,
            initializer=static.initializer,
            scale=first_scale(static),
        )
        return rows

    return first_rows
