"""Rows gathered column by column until a row group is full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.formats.block import ColumnBlock
from terarec.formats.layout import key_dtype
from terarec.spec import DatasetSpec


class GroupBuffer:
    """Column-major room for the rows of one row group; filling it copies, so callers may reuse their arrays.

    Args:
        spec: the data set's columns.
        capacity: rows of a full group.
    """

    def __init__(self, spec: DatasetSpec, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self._label = np.empty((len(spec.labels), capacity), dtype=np.float32)
        self._dense = np.empty((len(spec.dense), capacity), dtype=np.float32)
        dtype = key_dtype(spec)
        self._values = [np.empty(capacity * column.hotness, dtype=dtype) for column in spec.categorical]
        self._offsets = [
            np.zeros(capacity + 1, dtype=np.int32) if column.hotness > 1 else None for column in spec.categorical
        ]
        self._weight = None if spec.weight is None else np.empty(capacity, dtype=np.float32)
        self._metadata: list[list[pa.Array]] = [[] for _ in spec.metadata]

    @property
    def full(self) -> bool:
        """Whether no row fits in any more."""
        return self.num_rows == self.capacity

    def fill(self, rows: ColumnBlock, start: int) -> int:
        """Copy rows from row `start` on, as many as fit; returns how many."""
        count = min(self.capacity - self.num_rows, rows.num_rows - start)
        here = slice(self.num_rows, self.num_rows + count)
        there = slice(start, start + count)
        self._label[:, here] = rows.label[there].T
        self._dense[:, here] = rows.dense[there].T
        for values, offsets, column in zip(self._values, self._offsets, rows.keys, strict=True):
            if isinstance(column, tuple):
                assert offsets is not None
                new_values, new_offsets = column
                first, last = int(new_offsets[start]), int(new_offsets[start + count])
                base = int(offsets[self.num_rows])
                values[base : base + last - first] = new_values[first:last]
                offsets[here.start + 1 : here.stop + 1] = new_offsets[start + 1 : start + count + 1] - (first - base)
            else:
                values[here] = column[there]
        if self._weight is not None:
            self._weight[here] = rows.weight[there]  # type: ignore[index]
        for pieces, array in zip(self._metadata, rows.metadata, strict=True):
            pieces.append(array[there])
        self.num_rows += count
        return count

    def float_columns(self) -> list[NDArray[np.float32]]:
        """Label and dense columns, float32[n] each, as views that the next `fill` overwrites."""
        return [column[: self.num_rows] for block in (self._label, self._dense) for column in block]

    def key_columns(self) -> list[NDArray[Any] | tuple[NDArray[Any], NDArray[np.int32]]]:
        """Key columns: keys[n], or (values, offsets int32[n + 1]); views that the next `fill` overwrites."""
        columns: list[NDArray[Any] | tuple[NDArray[Any], NDArray[np.int32]]] = []
        for values, offsets in zip(self._values, self._offsets, strict=True):
            if offsets is None:
                columns.append(values[: self.num_rows])
            else:
                columns.append((values[: offsets[self.num_rows]], offsets[: self.num_rows + 1]))
        return columns

    def sample_columns(self) -> list[pa.Array]:
        """The weight column as a view that the next `fill` overwrites, if there is one, and metadata columns."""
        weight = [] if self._weight is None else [pa.array(self._weight[: self.num_rows])]
        return weight + [pa.concat_arrays(pieces) for pieces in self._metadata]

    def clear(self) -> None:
        """Forget the rows."""
        self.num_rows = 0
        for pieces in self._metadata:
            pieces.clear()
