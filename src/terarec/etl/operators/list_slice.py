"""Parts of lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, ColumnType, Kind, offsets_of
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction, PlainLists, joined
from terarec.etl.operators.step_code import StepCode
from terarec.spec import ListSlice


class ListSliceCode(StepCode[ListSlice]):
    """Code of `ListSlice`."""

    takes_lists = True

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Lists, of a bounded length where the slice or the input has one."""
        made = {}
        for name, output in self.spec.pairs:
            found = self.input_type(types, name)
            bounds = [bound for bound in (found.max_length, self.spec.max_length) if bound is not None]
            made[output] = ColumnType(found.kind, True, min(bounds, default=None))
        return made

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The same of plain lists."""
        return [
            PlainFunction((name,), (output,), partial(self._plain, types[name].kind))
            for name, output in self.spec.pairs
        ]

    def _plain(self, kind: Kind, lists: PlainLists) -> Sequence[Any]:
        return (joined([items[self.spec.start : self.spec.stop] for items in lists.each()], kind),)

    def apply(self, block: Block, state: State | None) -> Block:
        """items[start:stop]."""
        made = {}
        for name, output in self.spec.pairs:
            column = block.columns[name]
            assert column.offsets is not None
            lengths = np.diff(column.offsets)
            first = _position(self.spec.start, lengths)
            last = lengths if self.spec.stop is None else _position(self.spec.stop, lengths)
            offsets = offsets_of(np.maximum(last - first, 0))
            items = np.repeat(column.offsets[:-1] + first - offsets[:-1], np.diff(offsets)) + np.arange(offsets[-1])
            flat = column.flat().take(items)
            made[output] = Column(flat.type, flat.values, flat.missing, offsets)
        return block.with_columns(made)


def _position(position: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where `position` is in lists of these lengths, as Python has it."""
    if position < 0:
        return np.maximum(lengths + position, 0)
    return np.minimum(lengths, position)
