"""Steps that are a formula on numbers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.step_code import SpecT, StepCode


class NumberStepCode(StepCode[SpecT]):
    """Base of steps that make of each number another one, in float64.

    When a record is served, columns that go through the same formulas go as one matrix.
    """

    accepted: ClassVar[tuple[str, ...]] = ("number", "integer")

    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        """Numbers."""
        return {
            output: ColumnType("number", found.is_list, found.max_length)
            for output, found in StepCode.output_types(self, types).items()
        }

    @abstractmethod
    def figures(self, name: str, state: State | None) -> tuple[float, ...]:
        """The figures of the formula for the input `name`."""

    @abstractmethod
    def formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """What comes out of ``numbers float64[..., n]``, NaN being missing; figures are numbers or arrays [..., 1]."""

    def apply(self, block: Block, state: State | None) -> Block:
        """The formula, column by column."""
        made = {}
        for output, name in zip(self.spec.outputs or self.spec.columns, self.spec.columns, strict=True):
            column = block.columns[name]
            made[output] = column.like(Column("number", self.formula(column.numbers(), *self.figures(name, state))))
        return block.with_columns(made)
