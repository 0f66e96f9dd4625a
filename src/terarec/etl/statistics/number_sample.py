"""An even sample of a column's numbers that is the same in every engine, and the quantiles of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLE_SIZE = 1 << 20
"""Numbers that a column's quantiles are taken from; exact up to as many."""


@dataclass(frozen=True, slots=True)
class NumberSample:
    """The numbers with the lowest tickets, a ticket being the hash of the number's row id.

    Attributes:
        tickets: int64[k].
        numbers: float64[k].
    """

    tickets: NDArray[np.int64]
    numbers: NDArray[np.float64]

    def lowest(self) -> NumberSample:
        """At most `SAMPLE_SIZE` of the numbers; of equal tickets (items of one list) the first."""
        if len(self.tickets) <= SAMPLE_SIZE:
            return self
        kept = np.argsort(self.tickets, kind="stable")[:SAMPLE_SIZE]
        return NumberSample(self.tickets[kept], self.numbers[kept])

    def median(self) -> float:
        """The lower median: the least number that at least half of the numbers do not exceed; 0 for no numbers."""
        middle = (len(self.numbers) - 1) // 2
        return float(np.partition(self.numbers, middle)[middle]) if len(self.numbers) else 0.0

    def boundaries(self, intervals: int) -> tuple[float, ...]:
        """At most ``intervals - 1`` rising boundaries that cut the numbers into intervals of about equal counts.

        With n numbers, q_k the least one that at least k n / intervals do not exceed, boundary k is the least number
        above q_k; where there is none, or the same one again, there is no boundary. So a value that fills several
        intervals gets one of its own: where nine of ten numbers are 0, the first boundary is the least number above 0.
        """
        values, counts = np.unique(self.numbers, return_counts=True)
        reached = np.cumsum(counts) * intervals
        last_inside = np.searchsorted(reached, np.arange(1, intervals) * len(self.numbers))
        firsts = np.unique(last_inside[last_inside + 1 < len(values)] + 1)
        return tuple(values[firsts].tolist())


class GrowingSample:
    """Takes parts of a column in turn and keeps a `NumberSample` of all of them."""

    def __init__(self) -> None:
        self._parts: list[NumberSample] = []
        self._size = 0

    def add(self, part: NumberSample) -> None:
        """Take in what a block holds."""
        self._parts.append(part)
        self._size += len(part.numbers)
        if self._size > 2 * SAMPLE_SIZE:
            self._compact()

    def sample(self) -> NumberSample:
        """The sample so far."""
        self._compact()
        return self._parts[0]

    def _compact(self) -> None:
        tickets = np.concatenate([np.empty(0, dtype=np.int64), *(part.tickets for part in self._parts)])
        numbers = np.concatenate([np.empty(0), *(part.numbers for part in self._parts)])
        self._parts = [NumberSample(tickets, numbers).lowest()]
        self._size = len(self._parts[0].numbers)
