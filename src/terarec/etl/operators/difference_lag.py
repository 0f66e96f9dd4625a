"""Differences to an earlier row of the same group."""

from __future__ import annotations

import numpy as np

from terarec.etl.columns import Block, Column
from terarec.etl.operators.contract import ColumnTypes, Stage, State
from terarec.etl.operators.row_groups import row_groups
from terarec.etl.operators.scalar_input import group_inputs, scalar_input
from terarec.etl.operators.step_code import StepCode
from terarec.spec import DifferenceLag


class DifferenceLagCode(StepCode[DifferenceLag]):
    """Code of `DifferenceLag`."""

    stage: Stage = "grouped"
    accepted = ("number", "integer")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """The kinds of the inputs."""
        group_inputs(types, self.spec.group, self.spec.order)
        return {output: scalar_input(types, name, self.accepted) for name, output in self.spec.pairs}

    def apply(self, block: Block, state: State | None) -> Block:
        """X less the x of ``lag`` rows before."""
        groups = row_groups(block, self.spec.group, self.spec.order)
        places = np.arange(len(groups.rows)) - self.spec.lag
        has_one = places >= groups.group_begins
        later, earlier = groups.rows[has_one], groups.rows[places[has_one]]
        made = {}
        for name, output in self.spec.pairs:
            column = block.columns[name]
            absent = np.ones(block.num_rows, dtype=np.bool_)
            absent[later] = column.is_missing()[later] | column.is_missing()[earlier]
            difference = np.zeros_like(column.values)
            difference[later] = column.values[later] - column.values[earlier]
            if column.type == "number":
                made[output] = Column("number", np.where(absent, np.nan, difference))
            else:
                made[output] = Column("integer", np.where(absent, 0, difference), absent if absent.any() else None)
        return block.with_columns(made)
