"""Steps that are a formula on numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, ColumnType
from terarec.etl.operators.contract import ColumnTypes, State
from terarec.etl.operators.plain_function import PlainFunction, as_numbers, item_function
from terarec.etl.operators.step_code import SpecT, StepCode


class NumberStepCode(StepCode[SpecT]):
    """Base of steps that make of each number another one, in float64.

    Columns of one length go through the formula as one matrix: threads that did it column by column would wait for the
    GIL after each of NumPy's short calls. When records are served, integers go as float64, too, where only their number
    matters: the formulas that keep integers keep the order of two numbers, and their bounds are float64.
    """

    accepted: ClassVar[tuple[str, ...]] = ("number", "integer")
    keeps_integers: ClassVar[bool] = False
    """Whether integers stay such; a subclass then has a plain function for them."""

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

    def plain_formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """The formula; raises `RefusedValueError` for a number that it does not take."""
        return self.formula(numbers, *figures)

    def plain_functions(self, types: ColumnTypes, state: State | None) -> Sequence[PlainFunction]:
        """The formula, of all columns at once; of lists one by one."""
        numbers = [pair for pair in self.spec.pairs if types[pair[0]].kind in ("number", "integer")]
        single = [pair for pair in numbers if not types[pair[0]].is_list]
        functions = [
            self._of_lists(name, output, state)
            for name, output in numbers
            if types[name].is_list and not (self.keeps_integers and types[name].kind == "integer")
        ]
        if single:
            names, outputs = zip(*single, strict=True)
            call = partial(self._of_matrix, self._figure_columns(names, state))
            functions.append(PlainFunction(names, outputs, call, takes="matrix", gives="matrix"))
        return functions

    def _of_matrix(self, figures: Sequence[NDArray[np.float64]], numbers: NDArray[np.float64]) -> NDArray[Any]:
        return self.plain_formula(numbers, *figures)

    def _of_lists(self, name: str, output: str, state: State | None) -> PlainFunction:
        figures = self.figures(name, state)

        def call(items: Any) -> NDArray[Any]:
            return self.plain_formula(as_numbers(items), *figures)

        return item_function(name, output, call, is_list=True)

    def apply(self, block: Block, state: State | None) -> Block:
        """The formula."""
        outputs = dict(self.spec.pairs)
        lengths: dict[int, list[str]] = {}
        for name in self.spec.columns:
            lengths.setdefault(len(block.columns[name].values), []).append(name)
        made = {}
        for length, names in lengths.items():
            columns = [block.columns[name] for name in names]
            numbers = np.empty((len(names), length))
            for row, column in zip(numbers, columns, strict=True):
                column.write_numbers(row)
            results = self.formula(numbers, *self._figure_columns(names, state))
            for name, column, values in zip(names, columns, results, strict=True):
                made[outputs[name]] = column.like(Column("number", values))
        return block.with_columns(made)

    def _figure_columns(self, names: Sequence[str], state: State | None) -> tuple[NDArray[np.float64], ...]:
        """The figures of the formula for the inputs `names`, float64[len(names), 1] each."""
        figures = zip(*(self.figures(name, state) for name in names), strict=True)
        return tuple(np.array(figure, dtype=np.float64)[:, None] for figure in figures)
