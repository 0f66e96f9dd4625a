"""Numbers within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.operators.plain_function import PlainFunction, item_function
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import value_of
from terarec.spec import Clip


class ClipCode(NumberStepCode[Clip]):
    """Code of `Clip`."""

    keeps_integers = True

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

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """Numbers by the formula, integers that must stay such one by one."""
        functions = list(super().plain_functions(types, state))
        for name, output in self.spec.pairs:
            if types[name].kind == "integer":
                functions.append(item_function(name, output, self._whole, is_list=types[name].is_list))
        return functions

    def _whole(self, values: list[int | None]) -> list[int | None]:
        low = -(2**63) if self.spec.low is None else int(self.spec.low)
        high = 2**63 if self.spec.high is None else int(self.spec.high)
        return [None if value is None else min(max(value, low), high) for value in values]

    def apply(self, block: Block, state: State | None) -> Block:
        """min(max(x, low), high); integers stay integers."""
        made = {}
        for name, output in self.spec.pairs:
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
