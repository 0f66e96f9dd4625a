"""Arrow's layout of texts as Python strings."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray


def split_texts(text: NDArray[np.uint8], offsets: NDArray[np.int64]) -> list[str]:
    """Texts i, ``text[offsets[i]:offsets[i + 1]]``."""
    whole = text.tobytes()
    return [whole[begin:end].decode() for begin, end in itertools.pairwise(offsets.tolist())]
