# SPDX-License-Identifier: Apache-2.0
"""Count the ids in Parquet files, for the sides that write Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from peer_sides.criteo_job import CATEGORIES, Counts


def id_counts(files: Sequence[Path], *, special: tuple[int, int], columns: Mapping[str, str] | None = None) -> Counts:
    """Return the counts of the categories.

    Args:
        files: Files of the training rows.
        special: Ids of missing and of rare values; the ids of kept values follow.
        columns: Names of categories in the files, if they differ.
    """
    names = {name: name if columns is None else columns[name] for name in CATEGORIES}
    held = pq.ParquetDataset(files).read(columns=list(names.values()))
    counts = {}
    for name, column in names.items():
        found = np.bincount(held[column].to_numpy(), minlength=1 + max(special))
        kept = found[1 + max(special) :]
        counts[name] = [int(found[special[0]]), int(found[special[1]]), *map(int, kept[kept > 0])]
    return counts
