# SPDX-License-Identifier: Apache-2.0
"""Counts of changes, by which rows that were read below are known to be as new as those of the memory in front."""

from __future__ import annotations

from collections.abc import Sequence


class ChangeCounts:
    """Counts of the changes of some parts of rows. The caller holds a lock, which it also holds while it keeps rows.

    A change begins before the slowest memory has new rows, and ends after the fastest has them. So rows that were read
    below before a change has ended are never kept after it has begun, over newer ones.

    Args:
        num_parts: Number of parts.
    """

    def __init__(self, num_parts: int) -> None:
        self._counts = [0] * num_parts
        self._open = [0] * num_parts  # changes that have begun and not ended

    def begin(self, part: int) -> None:
        """Note that rows of a part are about to change."""
        # In the other order than `seen` reads them, which holds no lock: a change that has begun is never overlooked.
        self._open[part] += 1
        self._counts[part] += 1

    def end(self, part: int) -> None:
        """Note the end of a change."""
        self._open[part] -= 1

    def note(self, part: int) -> None:
        """Note a change that begins and ends under one hold of the lock."""
        self._counts[part] += 1

    def seen(self) -> Sequence[int]:
        """Return the counts before rows are read below, to compare with later; -1 while a change is under way.

        The lock need not be held.
        """
        counts = list(self._counts)
        if any(self._open):
            return [-1 if is_open else count for count, is_open in zip(counts, self._open, strict=True)]
        return counts

    def may_keep(self, part: int, seen: Sequence[int]) -> bool:
        """Return whether no row of a part has changed since `seen` was returned."""
        return seen[part] == self._counts[part]
