"""XXH64 of values, as signed integers: what Spark's ``xxhash64`` gives.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.kernels.cpu import _encoding
from terarec.kernels.encoding_types import HASH_SEED, RefusedValueError


def xxh64_int64(values: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Hashes int64[n] of the eight little-endian bytes of each of ``values int64[n]``; ``0 <= seed < 2^64``."""
    hashes = np.empty(len(values), dtype=np.int64)
    _encoding.xxh64_int64(values, seed, hashes)
    return hashes


def xxh64_text(text: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Hashes int64[n] of n texts: text i is ``text[offsets[i]:offsets[i + 1]]``."""
    hashes = np.empty(len(offsets) - 1, dtype=np.int64)
    _encoding.xxh64_text(text, offsets, seed, hashes)
    return hashes


def xxh64_list(values: list[Any], seed: int = HASH_SEED) -> NDArray[np.int64]:
    """Hashes int64[n] of Python texts and integers; that of None is 0.

    Raises:
        RefusedValueError: a value of another type, a lone surrogate, or an integer of more than 64 bits.
    """
    hashes = np.empty(len(values), dtype=np.int64)
    refused_row = _encoding.xxh64_list(values, seed, hashes)
    if refused_row >= 0:
        raise RefusedValueError(refused_row)
    return hashes
