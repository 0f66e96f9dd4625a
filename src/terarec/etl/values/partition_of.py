"""Which of so many files on the disk holds a value, where memory does not hold all values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import text_buffers
from terarec.kernels.cpu.hashes import xxh64_int64, xxh64_text

PARTITIONS = 64
"""Of the values by their hash: memory holds one of them at a time."""
_SEED = 7
"""Another one than that of ids in hash buckets, so that these are even inside a partition."""


def partition_of(values: pa.Array) -> NDArray[np.int64]:
    """The partition of each of n values (large_string, int64 or uint32), int64[n]; all nulls share one."""
    if pa.types.is_large_string(values.type):
        hashes = xxh64_text(*text_buffers(values.fill_null("")), _SEED)
    else:
        hashes = xxh64_int64(values.fill_null(0).to_numpy().astype(np.int64, copy=False), _SEED)
    return hashes & (PARTITIONS - 1)
