"""Numbers to ids of intervals that hold about equally many."""

from __future__ import annotations

from pathlib import Path

from terarec.etl.operators.bucketize import BucketizeCode
from terarec.etl.operators.contract import ColumnTypes, SpillOptions, Stage, State
from terarec.etl.operators.learnt_numbers import Figures, LearntNumbers, SampleStatistic
from terarec.etl.statistics.number_sample import NumberSample


class QuantileBucketizeCode(BucketizeCode):
    """Code of `Bucketize` without given boundaries."""

    stage: Stage = "fitted"

    def boundaries_of(self, name: str, state: State | None) -> tuple[float, ...]:
        """The boundaries for the input `name`."""
        assert isinstance(state, LearntNumbers)
        boundaries: tuple[float, ...] = state.columns[name]["boundaries"]
        return boundaries

    def statistic(self, types: ColumnTypes, memory: SpillOptions) -> SampleStatistic:
        """Gathers samples."""
        return SampleStatistic(self.spec.kind, self.spec.columns, self._figures)

    def _figures(self, sample: NumberSample) -> Figures:
        assert self.spec.intervals is not None
        return {"boundaries": sample.boundaries(self.spec.intervals)}

    def load_state(self, directory: Path, name: str) -> LearntNumbers:
        """Read what `LearntNumbers.save` wrote."""
        return LearntNumbers.load(directory, name, self.spec, ("boundaries",))
