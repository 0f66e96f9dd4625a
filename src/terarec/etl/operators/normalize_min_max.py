"""Numbers to the range from 0 to 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.learnt_numbers import Figures, LearntNumbers, SummedStatistic
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.statistics.number_range import NumberRange
from terarec.spec import NormalizeMinMax


class NormalizeMinMaxCode(NumberStepCode[NormalizeMinMax]):
    """Code of `NormalizeMinMax`."""

    stage: Stage = "fitted"

    def figures(self, name: str, state: State | None) -> tuple[float, ...]:
        """Minimum and maximum."""
        assert isinstance(state, LearntNumbers)
        return state.columns[name]["minimum"], state.columns[name]["maximum"]

    def formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """(x - minimum) / (maximum - minimum), 0 where both are equal."""
        minimum, maximum = figures
        width = np.asarray(maximum - minimum)
        return np.asarray((width > 0.0) * (numbers - minimum) / np.where(width > 0.0, width, 1.0))

    def inverse(self, column: str, encoded: NDArray[np.float64], state: State | None) -> NDArray[np.float64]:
        """The numbers of the input `column` from what came out."""
        minimum, maximum = self.figures(column, state)
        return encoded * (maximum - minimum) + minimum

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SummedStatistic[NumberRange]:
        """Gathers ranges."""
        return SummedStatistic(self.spec.kind, self.spec.columns, NumberRange, _figures)

    def load_state(self, directory: Path, name: str) -> LearntNumbers:
        """Read what `LearntNumbers.save` wrote."""
        return LearntNumbers.load(directory, name, self.spec, ("minimum", "maximum"))


def _figures(found: NumberRange) -> Figures:
    if not found:
        return {"minimum": 0.0, "maximum": 0.0}
    return {"minimum": found.minimum, "maximum": found.maximum}
