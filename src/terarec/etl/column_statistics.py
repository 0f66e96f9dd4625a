"""What encoders learn from a column, gathered block by block in memory that rows do not fill."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_COMPACT_ROWS = 1 << 20
_SAMPLE_ROWS = 1 << 20


class ValueCounts:
    """How often each value occurs. Memory grows with the distinct values alone.

    Args:
        value_type: of the values, string or int64.
    """

    def __init__(self, value_type: pa.DataType) -> None:
        self._counted = _table(pa.array([], type=value_type), pa.array([], type=pa.int64()))
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def add(self, values: pa.Array) -> None:
        """Count `values`; nulls are left out."""
        counts = values.drop_null().value_counts()
        self._pending.append(_table(counts.field("values"), counts.field("counts")))
        self._pending_rows += len(counts)
        if self._pending_rows > max(_COMPACT_ROWS, self._counted.num_rows):
            self._compact()

    def table(self) -> pa.Table:
        """Columns ``value`` and ``count`` (int64), a row for every distinct value, in no particular order."""
        self._compact()
        return self._counted

    def _compact(self) -> None:
        merged = pa.concat_tables([self._counted, *self._pending])
        self._counted = merged.group_by("value").aggregate([("count", "sum")]).rename_columns(["value", "count"])
        self._pending, self._pending_rows = [], 0


def _table(values: pa.Array, counts: pa.Array) -> pa.Table:
    return pa.table({"value": values, "count": counts.cast(pa.int64())})


class Moments:
    """Mean, deviation and minimum of the numbers of a column; NaN is missing.

    Attributes:
        count: numbers seen.
        missing: missing values seen.
        minimum: the smallest number, infinity before the first.
        mean: of the numbers, 0 before the first.
    """

    def __init__(self) -> None:
        self.count = 0
        self.missing = 0
        self.minimum = np.inf
        self.mean = 0.0
        self._squares = 0.0  # sum of squared distances from the mean

    def add(self, numbers: NDArray[np.float64]) -> None:
        """Take in float64[n]."""
        present = numbers[~np.isnan(numbers)]
        self.missing += len(numbers) - len(present)
        if not len(present):
            return
        # Chan, Golub & LeVeque's update: stable where sums of squares are not.
        count = self.count + len(present)
        mean = float(present.mean())
        gap = mean - self.mean
        self._squares += float(((present - mean) ** 2).sum()) + gap * gap * self.count * len(present) / count
        self.mean += gap * len(present) / count
        self.minimum = min(self.minimum, float(present.min()))
        self.count = count

    @property
    def deviation(self) -> float:
        """Standard deviation over the numbers seen; 1 for a column that does not vary."""
        deviation = float(np.sqrt(self._squares / self.count)) if self.count else 0.0
        return deviation if deviation > 0.0 else 1.0


class Quantiles:
    """Bounds that cut a column's numbers into intervals of about equal counts; NaN is missing.

    Exact up to 2^20 numbers, on an even sample of as many beyond.

    Args:
        seed: of the sample.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        self._numbers = np.empty(0)
        self._tickets = np.empty(0)

    def add(self, numbers: NDArray[np.float64]) -> None:
        """Take in float64[n]. Every number draws a ticket; the lowest tickets stay."""
        present = numbers[~np.isnan(numbers)]
        self._numbers = np.concatenate([self._numbers, present])
        self._tickets = np.concatenate([self._tickets, self._generator.random(len(present))])
        if len(self._numbers) > _SAMPLE_ROWS:
            kept = np.argpartition(self._tickets, _SAMPLE_ROWS)[:_SAMPLE_ROWS]
            self._numbers, self._tickets = self._numbers[kept], self._tickets[kept]

    def bounds(self, intervals: int) -> tuple[float, ...]:
        """At most ``intervals - 1`` rising bounds; an interval holds its lower bound and not its upper.

        A value that fills several intervals gets one of its own: where nine of ten numbers are 0, the first bound is
        the smallest number above 0.
        """
        values, counts = np.unique(self._numbers, return_counts=True)
        below = np.cumsum(counts)
        shares = np.arange(1, intervals) / intervals * len(self._numbers)
        last_inside = np.searchsorted(below, shares)  # position of the value that reaches each share
        firsts = np.unique(last_inside[last_inside + 1 < len(values)] + 1)
        return tuple(values[firsts].tolist())
