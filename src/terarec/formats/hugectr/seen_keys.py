"""Which keys of a bounded range occur: what a keyset file holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terarec.formats.block import Keys


class SeenKeys:
    """Marks keys ``0 <= key < rows``; a byte for each of them, however many samples there are."""

    def __init__(self, rows: int) -> None:
        self._seen = np.zeros(rows, dtype=np.bool_)

    def add(self, columns: Sequence[Keys]) -> None:
        """Mark the keys of some slots."""
        for column in columns:
            self._seen[column[0] if isinstance(column, tuple) else column] = True

    def merge(self, other: SeenKeys) -> None:
        """Mark what `other` has marked."""
        self._seen |= other._seen

    def sorted(self) -> NDArray[np.int64]:
        """The marked keys, rising."""
        return np.flatnonzero(self._seen)
