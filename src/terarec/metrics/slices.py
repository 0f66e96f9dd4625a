"""The parts into which a column's values split the samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from terarec.metrics.columns import Integers
from terarec.metrics.results import MetricValues, SliceResults, SliceValues


class Slices:
    """One part for each of the most frequent values of a column, and one for all others.

    Attributes:
        part: Part of each sample, int64[N].
        parts: Number of parts.

    Args:
        codes: Code of each sample's value, int64[N]; -1 for a missing value, which counts as a value.
        values: Value of each code.
        most: Values that get a part of their own, at most.
    """

    def __init__(self, codes: Integers, values: pa.Array, most: int) -> None:
        missing = len(values)
        codes = np.where(codes < 0, missing, codes)
        counts = np.bincount(codes, minlength=missing + 1)
        by_value = np.append(pc.array_sort_indices(values).to_numpy().astype(np.int64), missing)
        by_count = by_value[np.argsort(-counts[by_value], kind="stable")]
        present = by_count[counts[by_count] > 0]
        chosen, self._others = present[:most], max(0, len(present) - most)
        part_of = np.full(missing + 1, len(chosen))
        part_of[chosen] = np.arange(len(chosen))
        self._values = [None if code == missing else values[int(code)].as_py() for code in chosen]
        self.part = part_of[codes]
        self.parts = len(chosen) + bool(self._others)

    def results(self, found: Sequence[MetricValues]) -> SliceResults:
        """The metrics of each part, with its value."""
        values = tuple(
            SliceValues(value=value, found=of_value)
            for value, of_value in zip(self._values, found[: len(self._values)], strict=True)
        )
        return SliceResults(values=values, other=found[-1] if self._others else None, other_values=self._others)
