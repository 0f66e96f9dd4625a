# SPDX-License-Identifier: Apache-2.0
"""The split that leaves one out: which rows of each user are its last ones.

It depends on all rows of a user, and so a phase of its own lists the rows of the other splits than the usual one in a
file: ``row id << 2 | split``, int64, rising, with the highest number at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from mmap import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import LEFT_OUT, TEST, TRAIN, VALID, Rows
from terarec.etl.ops.sequences import row_groups
from terarec.io.opening import arrow_file
from terarec.spec import LeaveOneOut

_SPLIT_BITS = 2
_END = np.array([np.iinfo(np.int64).max])


def listed_rows(split: LeaveOneOut, rows: Rows) -> NDArray[np.int64]:
    """Return the part of the list for all rows of some users."""
    groups = row_groups(rows, split.column, split.order)
    begins = np.unique(groups.group_begins)
    ends = np.append(begins[1:], len(groups.rows))[: len(begins)]
    splits = np.full(rows.num_rows, TRAIN, dtype=np.int64)
    last = groups.rows[ends - 1]
    left_out = ends[ends - begins >= split.min_rows]
    if split.train == "last":
        splits[groups.rows] = LEFT_OUT
        splits[last] = TRAIN
        splits[groups.rows[left_out - 3]] = TRAIN
    splits[groups.rows[left_out - 2]] = VALID
    splits[groups.rows[left_out - 1]] = TEST
    listed = splits != _usual(split)
    part: NDArray[np.int64] = rows.ids[listed] << _SPLIT_BITS | splits[listed]
    return part


def write_listed(path: Path, parts: Iterable[NDArray[np.int64]]) -> None:
    """Write the list of all users from parts of it."""
    with path.open("w+b") as file:
        for part in chain(parts, [_END]):
            file.write(part.tobytes())
        file.flush()
        # In the file, since two rows of each user may not fit in memory.
        np.frombuffer(mmap(file.fileno(), 0), np.int64).sort()


def map_list(path: Path | None) -> NDArray[np.int64]:
    """Map a list, or a part of it, into memory; None for the one without rows."""
    if path is None:
        return _END
    with arrow_file(path, is_mapped=True) as file:
        return np.frombuffer(file.read_buffer(), np.int64)


def splits_of(listed: NDArray[np.int64], split: LeaveOneOut, rows: Rows) -> NDArray[np.uint8]:
    """Return the splits of rows, uint8[n], by the list."""
    found = listed[np.searchsorted(listed, rows.ids << _SPLIT_BITS)]
    splits = np.where(found >> _SPLIT_BITS == rows.ids, found & (1 << _SPLIT_BITS) - 1, _usual(split))
    return splits.astype(np.uint8)


def _usual(split: LeaveOneOut) -> int:
    return LEFT_OUT if split.train == "last" else TRAIN
