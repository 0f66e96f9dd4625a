"""Encoded rows for the tests of sinks."""

import numpy as np
from numpy.typing import NDArray

from terarec.formats import ColumnBlock
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn

SPEC = DatasetSpec(
    name="rows",
    storage="parquet",
    labels=(LabelColumn(name="y"),),
    dense=(DenseColumn(name="d0"), DenseColumn(name="d1")),
    categorical=(
        CategoricalColumn(name="c0", rows=100),
        CategoricalColumn(name="tags", rows=50, hotness=3),
        CategoricalColumn(name="c1", rows=7),
    ),
)


def block_of(ids: NDArray[np.int64]) -> ColumnBlock:
    """Rows that can be told from their ids."""
    lengths = ids % 4
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return ColumnBlock(
        label=(ids % 2).astype(np.float32)[:, None],
        dense=np.stack([ids, -ids], axis=1).astype(np.float32),
        keys=(
            (ids % 100).astype(np.int32),
            (np.repeat(ids % 50, lengths).astype(np.int32), offsets),
            (ids % 7).astype(np.int32),
        ),
    )
