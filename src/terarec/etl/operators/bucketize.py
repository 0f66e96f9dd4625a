"""Numbers to ids of intervals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.step_code import StepCode
from terarec.spec import MISSING_ID, Bucketize


class BucketizeCode(StepCode[Bucketize]):
    """Code of `Bucketize` with given boundaries."""

    accepted = ("number", "integer")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Ids."""
        return {
            output: ColumnType("id", found.is_list, found.max_length)
            for output, found in StepCode.output_types(self, types).items()
        }

    def boundaries_of(self, name: str, state: State | None) -> tuple[float, ...]:
        """The boundaries for the input `name`."""
        return self.spec.boundaries

    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        """The missing value's id, and one interval more than boundaries."""
        pairs = zip(self.writes, self.spec.columns, strict=True)
        return {output: len(self.boundaries_of(name, state)) + 2 for output, name in pairs}

    def apply(self, block: Block, state: State | None) -> Block:
        """1 + the number of boundaries that are <= x."""
        made = {}
        for output, name in zip(self.writes, self.spec.columns, strict=True):
            column = block.columns[name]
            numbers = column.numbers()
            boundaries = np.asarray(self.boundaries_of(name, state), dtype=np.float64)
            ids = np.searchsorted(boundaries, numbers, side="right").astype(np.int64, copy=False) + 1
            ids[np.isnan(numbers)] = MISSING_ID
            made[output] = column.like(Column("id", ids))
        return block.with_columns(made)
