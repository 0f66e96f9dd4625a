"""Sizes that follow from a data set's columns: key type, record and row group."""

from __future__ import annotations

from typing import Any

import numpy as np

from terarec.spec import DatasetSpec

INT32_ROWS = 2**31
"""Most rows that a table may have for its keys to fit int32."""

MAX_GROUP_ROWS = 65_536
MIN_GROUP_ROWS = 1_024
GROUP_BYTES = 16 * 2**20


def key_dtype(spec: DatasetSpec) -> np.dtype[Any]:
    """Type in which all key columns are written: int32, or int64 if one column has more than 2^31 rows or any keys."""
    is_wide = any(column.rows is None or column.rows > INT32_ROWS for column in spec.categorical)
    return np.dtype(np.int64 if is_wide else np.int32)


def record_words(spec: DatasetSpec) -> int:
    """Four-byte words of a raw record: labels, dense, ``hotness`` keys of each categorical column, and the weight."""
    keys = sum(column.hotness for column in spec.categorical)
    return len(spec.labels) + len(spec.dense) + keys + (spec.weight is not None)


def default_group_rows(spec: DatasetSpec) -> int:
    """Rows of a row group: a power of two from 1,024 to 65,536 that keeps the group within 16 MiB of int32 records."""
    rows = MAX_GROUP_ROWS
    while rows > MIN_GROUP_ROWS and rows * record_words(spec) * 4 > GROUP_BYTES:
        rows //= 2
    return rows
