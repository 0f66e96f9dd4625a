"""Numbers within bounds."""

from __future__ import annotations

import numpy as np

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import value_of
from terarec.spec import Clip


class ClipCode(StepCode[Clip]):
    """Code of `Clip`."""

    accepted = ("number", "integer")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """The types of the inputs."""
        for name in self.spec.columns:
            for bound in (self.spec.low, self.spec.high):
                if bound is not None and types[name].kind == "integer":
                    try:
                        value_of("integer", bound)
                    except ConfigError as error:
                        raise ConfigError(f"column {name!r}: {error}") from None
        return StepCode.output_types(self, types)

    def apply(self, block: Block, state: State | None) -> Block:
        """min(max(x, low), high)."""
        made = {}
        for output, name in zip(self.writes, self.spec.columns, strict=True):
            column = block.columns[name]
            values = column.values
            if self.spec.low is not None:
                values = np.maximum(values, value_of(column.type, self.spec.low))
            if self.spec.high is not None:
                values = np.minimum(values, value_of(column.type, self.spec.high))
            if column.missing is not None:
                values = np.where(column.missing, 0, values)
            made[output] = column.like(Column(column.type, values, column.missing))
        return block.with_columns(made)
