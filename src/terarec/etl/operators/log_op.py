"""Logarithms of numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.step_code import StepCode
from terarec.etl.operators.values import refused
from terarec.spec import LogOp


class LogOpCode(StepCode[LogOp]):
    """Code of `LogOp` with a given shift."""

    accepted = ("number", "integer")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Numbers."""
        return {
            output: ColumnType("number", found.is_list, found.max_length)
            for output, found in StepCode.output_types(self, types).items()
        }

    def shift_of(self, name: str, state: State | None) -> float:
        """The shift of the input `name`."""
        assert self.spec.shift is not None
        return self.spec.shift

    def apply(self, block: Block, state: State | None) -> Block:
        """ln(x + shift).

        Raises:
            FormatError: x + shift is not above 0.
        """
        made = {}
        for output, name in zip(self.writes, self.spec.columns, strict=True):
            column = block.columns[name]
            shifted = column.numbers() + self.shift_of(name, state)
            low = shifted <= 0.0
            if low.any():
                accepted = (
                    f"more than {-self.shift_of(name, state)!r} to take the logarithm of (Clip raises lower ones)"
                )
                raise refused(block, name, int(np.argmax(low)), accepted)
            made[output] = column.like(Column("number", np.log(shifted)))
        return block.with_columns(made)

    def inverse(self, column: str, encoded: NDArray[np.float64], state: State | None) -> NDArray[np.float64]:
        """exp(y) - shift: the numbers of the input `column` from what came out."""
        return np.exp(encoded) - self.shift_of(column, state)
