"""A row for every item of a list."""

from __future__ import annotations

import numpy as np

from terarec.errors import FormatError
from terarec.etl.columns import Block, ColumnType
from terarec.etl.operators.contract import ColumnTypes, Stage, State
from terarec.etl.operators.step_code import StepCode
from terarec.spec import Explode

ITEM_BITS = 16
"""Bits of a row id that hold the position of the item."""


class ExplodeCode(StepCode[Explode]):
    """Code of `Explode`."""

    stage: Stage = "rows"
    takes_lists = True

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
                row = int(np.argmax(np.diff(found) != lengths))
                raise FormatError(
                    f"column {name!r}, row {block.rows[row]}: got a list of {np.diff(found)[row]}, expected "
                    f"{lengths[row]} items as in column {first!r}"
                )
        if len(lengths) and lengths.max() > 1 << ITEM_BITS:
            row = int(np.argmax(lengths))
            raise FormatError(
                f"column {first!r}, row {block.rows[row]}: got a list of {lengths[row]}, expected at most "
                f"{1 << ITEM_BITS} items"
            )
        positions = np.repeat(np.arange(len(lengths)), lengths)
        others = [name for name in block.columns if name not in self.spec.columns]
        repeated = block.only(others).take(positions)
        items = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        flat = {name: block.columns[name].flat() for name in self.spec.columns}
        return Block({**repeated.columns, **flat}, (repeated.rows << ITEM_BITS) | items, repeated.split)
