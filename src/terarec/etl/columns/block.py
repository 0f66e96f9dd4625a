"""A block: some consecutive rows of the sources, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns.column import Column, concatenate_columns

TRAIN, VALID, TEST = 0, 1, 2
"""Values of `Block.split`."""
SPLIT_NAMES = ("train", "valid", "test")
"""Names of the splits in a data set, by the values of `Block.split`."""


@dataclass(frozen=True, slots=True)
class Block:
    """n rows. Blocks are not changed: each step makes a new one, which shares the columns it leaves alone.

    Attributes:
        columns: name -> column of n rows.
        rows: int64[n], row ids, rising; described in docs/workflows.md.
        split: uint8[n], `TRAIN`, `VALID` or `TEST`; None before rows are split, and for records that are served.
    """

    columns: Mapping[str, Column]
    rows: NDArray[np.int64]
    split: NDArray[np.uint8] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return len(self.rows)

    def with_columns(self, columns: Mapping[str, Column]) -> Block:
        """This block with `columns` added, or put in the place of those of their names."""
        return Block({**self.columns, **columns}, self.rows, self.split)

    def only(self, names: Sequence[str]) -> Block:
        """This block with the columns `names` alone, in this order."""
        return Block({name: self.columns[name] for name in names}, self.rows, self.split)

    def with_split(self, split: NDArray[np.uint8]) -> Block:
        """This block with its rows split, uint8[n]."""
        return Block(self.columns, self.rows, split)

    def take(self, positions: NDArray[np.int64]) -> Block:
        """The rows at these positions, int64[k], in this order."""
        columns = {name: column.take(positions) for name, column in self.columns.items()}
        return Block(columns, self.rows[positions], None if self.split is None else self.split[positions])

    def slice(self, start: int, stop: int) -> Block:
        """Rows ``start <= i < stop``, sharing memory."""
        columns = {name: column.slice(start, stop) for name, column in self.columns.items()}
        split = None if self.split is None else self.split[start:stop]
        return Block(columns, self.rows[start:stop], split)

    def keep(self, kept: NDArray[np.bool_]) -> Block:
        """The rows that are `kept`, bool[n]."""
        return self if kept.all() else self.take(np.flatnonzero(kept))

    def training(self) -> Block:
        """The rows of the training part; all where rows are not split."""
        return self if self.split is None else self.keep(self.split == TRAIN)


def concatenate_blocks(blocks: Sequence[Block]) -> Block:
    """The rows of at least one block, one after another; all have the same columns, and splits or none."""
    first = blocks[0]
    columns = {name: concatenate_columns([block.columns[name] for block in blocks]) for name in first.columns}
    splits = [block.split for block in blocks if block.split is not None]
    rows = np.concatenate([block.rows for block in blocks])
    return Block(columns, rows, np.concatenate(splits) if splits else None)
