"""Missing values become the median."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType, Kind
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.fill_missing import FillMissingCode
from terarec.etl.operators.learnt_numbers import Figures, LearntNumbers, SampleStatistic
from terarec.etl.statistics.number_sample import NumberSample


class MedianFillCode(FillMissingCode):
    """Code of `FillMissing` with the median."""

    stage: Stage = "fitted"

    def input_type(self, types: ColumnTypes, name: str) -> ColumnType:
        """The type of the input `name`, numbers or integers."""
        found = super().input_type(types, name)
        if found.kind not in ("number", "integer"):
            raise ConfigError(f"column {name!r} holds {found}, expected number or integer to have a median")
        return found

    def fill_of(self, name: str, kind: Kind, state: State | None) -> Any:
        """The median of the input `name`; that of integers is one of them."""
        assert isinstance(state, LearntNumbers)
        median = state.columns[name]["median"]
        return np.int64(median) if kind == "integer" else median

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SampleStatistic:
        """Gathers samples."""
        return SampleStatistic(self.spec.kind, self.spec.columns, _figures)

    def load_state(self, directory: Path, name: str) -> LearntNumbers:
        """Read what `LearntNumbers.save` wrote."""
        return LearntNumbers.load(directory, name, self.spec, ("median",))


def _figures(sample: NumberSample) -> Figures:
    return {"median": sample.median()}
