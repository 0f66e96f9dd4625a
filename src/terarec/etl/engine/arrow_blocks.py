"""Blocks as record batches, for the time that they lie on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column

ROW = "\x1frow"
"""Name of the row ids among the columns, which no source has."""
_KIND = b"kind"


def to_batch(rows: NDArray[np.int64], columns: Mapping[str, Column]) -> pa.RecordBatch:
    """Columns of n rows, and their ids, int64[n]."""
    fields, arrays = [pa.field(ROW, pa.int64())], [pa.array(rows)]
    for name, column in columns.items():
        array = _to_array(column)
        fields.append(pa.field(name, array.type, metadata={_KIND: column.type.encode()}))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def from_table(table: pa.Table) -> Block:
    """The rows of a table of such batches."""
    columns = {
        field.name: _from_array(field, table.column(field.name).combine_chunks())
        for field in table.schema
        if field.name != ROW
    }
    return Block(columns, table.column(ROW).to_numpy())


def _to_array(column: Column) -> pa.Array:
    if column.type == "text":
        values = column.arrow_text()
    else:
        values = pa.array(np.ascontiguousarray(column.values), mask=column.missing)
    return values if column.offsets is None else pa.LargeListArray.from_arrays(pa.array(column.offsets), values)


def _from_array(field: pa.Field, array: pa.Array) -> Column:
    kind = field.metadata[_KIND].decode()
    offsets = None
    if pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy()
        offsets = offsets - offsets[0]
        array = array.flatten()
    if kind == "text":
        return Column(kind, array, None, offsets)
    missing = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    values: NDArray[Any] = (array.fill_null(0) if array.null_count else array).to_numpy()
    return Column(kind, values, missing, offsets)
