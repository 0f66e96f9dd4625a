"""`SparseRows`: keys with their vectors, in the form in which they enter and leave files."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK_ROWS = 1 << 16
"""Rows that readers and writers hold at a time: 32 MiB of vectors of width 128."""


class SparseRows(NamedTuple):
    """Some rows of an embedding.

    Attributes:
        keys: int64[n].
        vectors: float32[n, D].
        slots: uint64[n], the slot of each key, for embeddings whose slots are placed as wholes ("localized").
    """

    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]
    slots: NDArray[np.uint64] | None = None
