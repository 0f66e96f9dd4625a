"""Blocks as record batches, for the time that they lie on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import Block, Column, Kind, from_arrow, to_arrow

ROW = "\x1frow"
"""Name of the row ids among the columns, which no source has."""
_KIND = b"kind"


def to_batch(rows: NDArray[np.int64], columns: Mapping[str, Column]) -> pa.RecordBatch:
    """Columns of n rows, and their ids, int64[n]."""
    fields, arrays = [pa.field(ROW, pa.int64())], [pa.array(rows)]
    for name, column in columns.items():
        array = to_arrow(column)
        fields.append(pa.field(name, array.type, metadata={_KIND: column.type.encode()}))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def from_table(table: pa.Table) -> Block:
    """The rows of a table of such batches."""
    columns = {
        field.name: from_arrow(table.column(field.name), cast(Kind, field.metadata[_KIND].decode()))
        for field in table.schema
        if field.name != ROW
    }
    return Block(columns, table.column(ROW).to_numpy())
