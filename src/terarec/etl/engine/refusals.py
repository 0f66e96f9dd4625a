"""Rows with values that are refused: left out of a block as bad lines are left out of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from terarec.etl.columns import Block, RowFaultError
from terarec.etl.source import InputFault, RawBlock, Source

Result = TypeVar("Result")


class Refusals:
    """What is refused in the rows of one block.

    Args:
        source: of the block; its policy for bad input says what follows.
        raw: the block.
        item_bits: bits of a row id that tell the item of an exploded row, 0 where no step explodes.
    """

    def __init__(self, source: Source, raw: RawBlock, item_bits: int) -> None:
        self._source = source
        self._raw = raw
        self._item_bits = item_bits
        self._counts: Counter[str] = Counter()
        self._faults: list[InputFault] = []

    def leave_out(
        self, function: Callable[[Block], Result], block: Block, *, is_exploded: bool = True
    ) -> tuple[Result, Block]:
        """`function` of the rows of `block` that it does not refuse, and these rows.

        Args:
            function: raises `RowFaultError`.
            block: rows of this block, or what steps made of them.
            is_exploded: whether the steps that explode rows, if there are such, are done.

        Raises:
            FormatError: it refuses one, and the policy is "raise"; with file and line or row.
        """
        while True:
            try:
                return function(block), block
            except RowFaultError as fault:
                rows = fault.rows >> self._item_bits if is_exploded else fault.rows
                self._faults += self._source.refused(self._raw, rows, fault)
                self._counts[fault.kind] += len(rows)
                block = block.keep(~np.isin(block.rows, fault.rows))

    def settle(self) -> None:
        """Have all of this counted, once whatever is done to the block how often."""
        self._source.leave_out(self._raw, self._counts, self._faults)
