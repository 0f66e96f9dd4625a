"""Numbers to mean 0 and deviation 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.learnt_numbers import Figures, LearntNumbers, SummedStatistic
from terarec.etl.operators.number_step import NumberStepCode
from terarec.etl.statistics.moments import Moments
from terarec.spec import Normalize


class NormalizeCode(NumberStepCode[Normalize]):
    """Code of `Normalize`."""

    stage: Stage = "fitted"

    def figures(self, name: str, state: State | None) -> tuple[float, ...]:
        """Mean and deviation."""
        assert isinstance(state, LearntNumbers)
        return state.columns[name]["mean"], state.columns[name]["deviation"]

    def formula(self, numbers: NDArray[Any], *figures: Any) -> NDArray[Any]:
        """(x - mean) / deviation."""
        mean, deviation = figures
        return np.asarray((numbers - mean) / deviation)

    def inverse(self, column: str, encoded: NDArray[np.float64], state: State | None) -> NDArray[np.float64]:
        """The numbers of the input `column` from what came out."""
        mean, deviation = self.figures(column, state)
        return encoded * deviation + mean

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SummedStatistic[Moments]:
        """Gathers means and deviations."""
        return SummedStatistic(self.spec.kind, self.spec.columns, Moments, _figures)

    def load_state(self, directory: Path, name: str) -> LearntNumbers:
        """Read what `LearntNumbers.save` wrote."""
        return LearntNumbers.load(directory, name, self.spec, ("mean", "deviation"))


def _figures(moments: Moments) -> Figures:
    return {"mean": moments.mean, "deviation": moments.deviation}
