"""The rows that are kept."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import Block, Column
from terarec.etl.operators.contract import ColumnTypes, Stage, State
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import value_of
from terarec.spec import KeepRows


class KeepRowsCode(StepCode[KeepRows]):
    """Code of `KeepRows`."""

    stage: Stage = "rows"

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """None."""
        found = types[self.spec.column]
        accepted = ("text", "integer", "hex32") if self.spec.values else ("number", "integer")
        if found.is_list or found.kind not in accepted:
            raise ConfigError(f"column {self.spec.column!r} holds {found}, expected {' or '.join(accepted)}")
        for value in self.spec.values:
            value_of(found.kind, value)
        return {}

    def apply(self, block: Block, state: State | None) -> Block:
        """The rows whose value is wanted."""
        column = block.columns[self.spec.column]
        return block.keep(self._kept(column) & ~column.is_missing())

    def _kept(self, column: Column) -> NDArray[np.bool_]:
        if not self.spec.values:
            numbers = column.numbers()
            low = -np.inf if self.spec.at_least is None else self.spec.at_least
            high = np.inf if self.spec.at_most is None else self.spec.at_most
            return (numbers >= low) & (numbers <= high)
        if column.type == "text":
            wanted = pa.array(self.spec.values, type=pa.large_string())
            return np.asarray(pc.is_in(column.values, value_set=wanted).to_numpy(zero_copy_only=False))
        return np.isin(column.values, [value_of(column.type, value) for value in self.spec.values])
