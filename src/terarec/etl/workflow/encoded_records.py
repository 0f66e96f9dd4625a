"""What becomes of raw records at serving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terarec.formats import Keys


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedRecords:
    """B records as a model takes them.

    Attributes:
        dense: float32[B, F], the data set's dense columns, row after row in memory: models round by the layout.
        keys: per categorical column int64[B], or (keys int64[N], offsets int64[B + 1]) where hotness > 1.
    """

    dense: NDArray[np.float32]
    keys: tuple[Keys, ...]
