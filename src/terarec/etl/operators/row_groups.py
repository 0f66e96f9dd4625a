"""Rows in the order of their group and time, for steps that look back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, to_arrow


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The k of n rows that have a group and a place in it, sorted by group, then by order, then by row id.

    Attributes:
        rows: int64[k], the positions of the sorted rows in the block.
        group_begins: int64[k], where in `rows` the group of each begins.
        tie_begins: int64[k], where the rows of its group and order begin.
    """

    rows: NDArray[np.int64]
    group_begins: NDArray[np.int64]
    tie_begins: NDArray[np.int64]


def row_groups(block: Block, group: str, order: str) -> RowGroups:
    """Sort the rows of a block of whole groups; rows that lack `group` or `order` are left out."""
    groups, orders = block.columns[group], block.columns[order]
    placed = np.flatnonzero(~(groups.is_missing() | orders.is_missing()))
    codes, ranks = _codes(groups)[placed], orders.values[placed]
    sequence = np.lexsort((block.rows[placed], ranks, codes))
    codes, ranks = codes[sequence], ranks[sequence]
    starts_group = np.ones(len(placed), dtype=np.bool_)
    starts_group[1:] = codes[1:] != codes[:-1]
    starts_tie = starts_group.copy()
    starts_tie[1:] |= ranks[1:] != ranks[:-1]
    return RowGroups(placed[sequence], _begins(starts_group), _begins(starts_tie))


def _codes(groups: Column) -> NDArray[np.generic]:
    """A number for each of the n values, equal where they are equal."""
    if groups.type != "text":
        values: NDArray[np.generic] = groups.values
        return values
    codes: NDArray[np.int32] = to_arrow(groups).dictionary_encode().indices.fill_null(-1).to_numpy()
    return codes


def _begins(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.maximum.accumulate(np.where(starts, np.arange(len(starts)), 0))
