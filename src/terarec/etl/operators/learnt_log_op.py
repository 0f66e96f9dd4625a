"""Logarithms with a shift that is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import Block
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.learnt_numbers import Figures, LearntNumbers, SummedStatistic
from terarec.etl.operators.log_op import LogOpCode
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.statistics.number_range import NumberRange


class LearntLogOpCode(LogOpCode):
    """Code of `LogOp` without a given shift."""

    stage: Stage = "fitted"
    refuses = False

    def shift_of(self, name: str, state: State | None) -> float:
        """The shift of the input `name`."""
        assert isinstance(state, LearntNumbers)
        return float(state.columns[name]["shift"])

    def formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """ln(max(x, 1 - shift) + shift)."""
        (shift,) = figures
        shifted = np.asarray(np.maximum(numbers, 1.0 - shift))
        shifted += shift
        return np.asarray(np.log(shifted, out=shifted))

    def plain_formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """The formula, which takes any number."""
        return self.formula(numbers, *figures)

    def apply(self, block: Block, state: State | None) -> Block:
        """The formula, which takes any number."""
        return NumberStepCode.apply(self, block, state)

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SummedStatistic[NumberRange]:
        """Gathers minima."""
        return SummedStatistic(self.spec.kind, self.spec.columns, NumberRange, _figures)

    def load_state(self, directory: Path, name: str) -> LearntNumbers:
        """Read what `LearntNumbers.save` wrote."""
        return LearntNumbers.load(directory, name, self.spec, ("shift",))


def _figures(found: NumberRange) -> Figures:
    return {"shift": 1.0 - found.minimum if found else 1.0}
