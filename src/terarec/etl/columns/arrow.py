"""Columns <-> Arrow arrays."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from terarec.etl.columns.column import Column, Kind, offsets_of

ARROW_TYPES: dict[Kind, pa.DataType] = {
    "text": pa.large_string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "hex32": pa.uint32(),
    "id": pa.int64(),
}
"""The Arrow type of the values of each kind."""


def to_arrow(column: Column) -> pa.Array:
    """`column` as an Arrow array of its kind's type, or a large_list of it; missing values are null."""
    if column.type == "text":
        text = column.values
        missing = column.is_missing()
        values = pc.if_else(pa.array(~missing), text, None) if int(missing.sum()) > text.null_count else text
    elif column.type == "number":
        values = pa.array(column.values, type=pa.float64(), from_pandas=True)
    else:
        values = pa.array(column.values, type=ARROW_TYPES[column.type], mask=column.missing)
    if column.offsets is None:
        return values
    return pa.LargeListArray.from_arrays(pa.array(column.offsets), values)


def from_arrow(array: Any, kind: Kind) -> Column:
    """The column of an Arrow array (or chunked array) whose values cast to the type of `kind` without loss.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: values of another type.
    """
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        flat = from_arrow(array.flatten(), kind)
        return Column(kind, flat.values, flat.missing, offsets_of(lengths))
    values = array.cast(ARROW_TYPES[kind])
    if kind == "text":
        return Column(kind, values)
    if kind == "number":
        return Column(kind, values.fill_null(float("nan")).to_numpy(zero_copy_only=False))
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return Column(kind, values.fill_null(0).to_numpy(zero_copy_only=False), missing)
