"""A row for every item of a list."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import REFUSED_SHOWN, Block, ColumnType, RowFaultError
from terarec.etl.operators.contract import ColumnTypes, Stage, State
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import accepted_list
from terarec.spec import Explode

ITEM_BITS = 16
"""Bits of a row id that hold the position of the item."""
MAX_ITEMS = 1 << ITEM_BITS


class ExplodeCode(StepCode[Explode]):
    """Code of `Explode`."""

    stage: Stage = "rows"
    takes_lists = True
    refuses = True

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """One value a row."""
        return {name: ColumnType(self.input_type(types, name).kind) for name in self.spec.columns}

    def apply(self, block: Block, state: State | None) -> Block:
        """The rows of every item, other columns repeated.

        Raises:
            FormatError: the lists of a row differ in length, or one has more than 65,536 items.
        """
        first = self.spec.columns[0]
        offsets = block.columns[first].offsets
        assert offsets is not None
        lengths = np.diff(offsets)
        for name in self.spec.columns[1:]:
            found = block.columns[name].offsets
            assert found is not None
            if not np.array_equal(found, offsets):
                wrong = np.diff(found) != lengths
                raise _refused(block, name, np.diff(found), wrong, accepted_length(first))
        if (long := lengths > MAX_ITEMS).any():
            raise _refused(block, first, lengths, long, accepted_list(MAX_ITEMS))
        positions = np.repeat(np.arange(len(lengths)), lengths)
        others = [name for name in block.columns if name not in self.spec.columns]
        repeated = block.only(others).take(positions)
        items = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        flat = {name: block.columns[name].flat() for name in self.spec.columns}
        return Block({**repeated.columns, **flat}, (repeated.rows << ITEM_BITS) | items, repeated.split)


def accepted_length(first: str) -> str:
    """How long a list is beside that of the column `first`."""
    return f"as many items as in column {first!r}"


def _refused(
    block: Block, name: str, lengths: NDArray[np.int64], wrong: NDArray[np.bool_], accepted: str
) -> RowFaultError:
    """The error that the lists of these `lengths` in rows that are `wrong` are not what is `accepted`."""
    got = [f"got a list of {length}" for length in lengths[wrong][:REFUSED_SHOWN].tolist()]
    return RowFaultError(name, block.rows[wrong], got, accepted)
