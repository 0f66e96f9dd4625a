"""Lists of what happened to the same group before."""

from __future__ import annotations

import numpy as np

from terarec.etl.columns import Block, Column, ColumnType, offsets_of
from terarec.etl.operators.contract import ColumnTypes, Stage, State
from terarec.etl.operators.row_groups import row_groups
from terarec.etl.operators.scalar_input import group_inputs, scalar_input
from terarec.etl.operators.step_code import StepCode
from terarec.spec import History


class HistoryCode(StepCode[History]):
    """Code of `History`."""

    stage: Stage = "grouped"

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Lists."""
        group_inputs(types, self.spec.group, self.spec.order)
        return {
            output: ColumnType(scalar_input(types, name, self.accepted).kind, True, self.spec.max_length)
            for name, output in self.spec.pairs
        }

    def apply(self, block: Block, state: State | None) -> Block:
        """The values of at most ``max_length`` rows just before those of a row's order, which are no part of it."""
        groups = row_groups(block, self.spec.group, self.spec.order)
        begins = np.maximum(groups.group_begins, groups.tie_begins - self.spec.max_length)
        lengths, firsts = np.zeros(block.num_rows, dtype=np.int64), np.zeros(block.num_rows, dtype=np.int64)
        lengths[groups.rows], firsts[groups.rows] = groups.tie_begins - begins, begins
        offsets = offsets_of(lengths)
        items = groups.rows[np.repeat(firsts - offsets[:-1], lengths) + np.arange(offsets[-1])]
        made = {}
        for name, output in self.spec.pairs:
            earlier = block.columns[name].take(items)
            made[output] = Column(earlier.type, earlier.values, earlier.missing, offsets)
        return block.with_columns(made)
