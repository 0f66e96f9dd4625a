"""Numbers within bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import value_of
from terarec.spec import Clip


class ClipCode(NumberStepCode[Clip]):
    """Code of `Clip`."""

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """The types of the inputs."""
        made = StepCode.output_types(self, types)
        for name in self.spec.columns:
            for bound in (self.spec.low, self.spec.high):
                if bound is not None and types[name].kind == "integer":
                    try:
                        value_of("integer", bound)
                    except ConfigError as error:
                        raise ConfigError(f"column {name!r}: {error}") from None
        return made

    def figures(self, name: str, state: State | None) -> tuple[float, ...]:
        """The bounds."""
        low = -np.inf if self.spec.low is None else self.spec.low
        return low, np.inf if self.spec.high is None else self.spec.high

    def formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """min(max(x, low), high)."""
        low, high = figures
        return np.asarray(np.minimum(np.maximum(numbers, low), high))

    def apply(self, block: Block, state: State | None) -> Block:
        """min(max(x, low), high); integers stay integers."""
        made = {}
        for output, name in zip(self.writes, self.spec.columns, strict=True):
            column = block.columns[name]
            if column.type == "number":
                values = self.formula(column.values, *self.figures(name, state))
            else:
                values = self._integers(column)
            made[output] = column.like(Column(column.type, values, column.missing))
        return block.with_columns(made)

    def _integers(self, column: Column) -> NDArray[np.int64]:
        values = column.values
        if self.spec.low is not None:
            values = np.maximum(values, int(self.spec.low))
        if self.spec.high is not None:
            values = np.minimum(values, int(self.spec.high))
        return np.asarray(values if column.missing is None else np.where(column.missing, 0, values))
