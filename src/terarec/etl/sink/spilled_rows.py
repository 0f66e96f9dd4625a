"""Encoded rows as record batches, for the time that they lie on the disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.formats import ColumnBlock, Keys

ROW, PLACE, FLOATS, KEYS, WEIGHT = "row", "place", "floats", "keys", "weight"


def to_batch(rows: NDArray[np.int64], place: NDArray[np.uint64], block: ColumnBlock) -> pa.RecordBatch:
    """`block` with the ids of its rows and their `place` in the order to come; lists of keys are separate columns."""
    floats = np.concatenate([block.label, block.dense], axis=1, dtype=np.float32)
    columns: dict[str, pa.Array] = {ROW: pa.array(rows), PLACE: pa.array(place), FLOATS: _matrix(floats)}
    scalars = [keys for keys in block.keys if not isinstance(keys, tuple)]
    if scalars:
        columns[KEYS] = _matrix(np.stack(scalars, axis=1))
    for index, keys in enumerate(block.keys):
        if isinstance(keys, tuple):
            columns[f"list{index}"] = pa.LargeListArray.from_arrays(pa.array(keys[1]), pa.array(keys[0]))
    if block.weight is not None:
        columns[WEIGHT] = pa.array(block.weight)
    columns |= {f"metadata{index}": array for index, array in enumerate(block.metadata)}
    return pa.record_batch(columns)


def from_table(table: pa.Table, like: ColumnBlock) -> ColumnBlock:
    """The rows of a table of such batches; `like` is a block of their columns, of any rows."""
    num_labels = like.label.shape[1]
    floats = _rows(table, FLOATS)
    scalars = iter(_rows(table, KEYS).T if KEYS in table.column_names else ())
    keys: list[Keys] = []
    for index, column in enumerate(like.keys):
        if isinstance(column, tuple):
            lists = table.column(f"list{index}").combine_chunks()
            keys.append((lists.flatten().to_numpy(), _offsets(lists)))
        else:
            keys.append(np.ascontiguousarray(next(scalars)))
    return ColumnBlock(
        label=floats[:, :num_labels],
        dense=floats[:, num_labels:],
        keys=tuple(keys),
        weight=None if like.weight is None else table.column(WEIGHT).to_numpy(),
        metadata=tuple(table.column(f"metadata{index}").combine_chunks() for index in range(len(like.metadata))),
    )


def _matrix(values: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _rows(table: pa.Table, name: str) -> NDArray[Any]:
    column = table.column(name).combine_chunks()
    values: NDArray[Any] = column.flatten().to_numpy()
    return values.reshape(len(column), column.type.list_size)


def _offsets(lists: pa.Array) -> NDArray[np.int64]:
    offsets: NDArray[np.int64] = lists.offsets.to_numpy()
    from_zero: NDArray[np.int64] = offsets - offsets[0]
    return from_zero
