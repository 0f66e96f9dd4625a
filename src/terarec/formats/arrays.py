# SPDX-License-Identifier: Apache-2.0
"""Types of Arrow arrays, and arrays of any layout as plain ones, which all functions of Arrow take."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from terarec.ragged import offsets_of


def is_list(kind: pa.DataType) -> bool:
    """Return whether `kind` is any of Arrow's list types but views."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return whether values are integers, floats or decimals."""
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind))


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of dictionaries and of lists."""
    while pa.types.is_dictionary(kind) or is_list(kind):
        kind = kind.value_type
    return kind


def plain_array(array: pa.Array) -> pa.Array:
    """Return an array without dictionaries, runs and views, and so its lists; a plain one unchanged.

    Polars writes its categories as dictionaries of views, which functions of Arrow do not decode.
    """
    kind = array.type
    if _is_plain(kind):
        return array
    if pa.types.is_dictionary(kind):
        return plain_array(array.dictionary).take(array.indices)
    if pa.types.is_run_end_encoded(kind):
        return plain_array(pc.run_end_decode(array))
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    # By hand also where Arrow has a cast: that of PyArrow 26 gives offsets that do not rise where a view is null.
    # `flatten` leaves out items under null lists.
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    missing = array.is_null() if array.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(offsets_of(lengths)), plain_array(array.flatten()), mask=missing)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of `plain_array` of an array."""
    return kind if _is_plain(kind) else plain_array(pa.nulls(0, kind)).type


def items_type(kind: pa.DataType) -> tuple[pa.DataType, bool]:
    """Return the type of plain values, or of the items of lists, which may be lists; and whether these are lists."""
    plain = plain_type(kind)
    return (plain.value_type, True) if is_list(plain) else (plain, False)


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return `plain_array` of each chunk."""
    if _is_plain(column.type):
        return column
    return pa.chunked_array(list(map(plain_array, column.chunks)), type=plain_type(column.type))


def _is_plain(kind: pa.DataType) -> bool:
    types = pa.types
    if is_list(kind):
        return _is_plain(kind.value_type)
    is_encoded = types.is_dictionary(kind) or types.is_run_end_encoded(kind)
    return not (is_encoded or types.is_string_view(kind) or types.is_list_view(kind) or types.is_large_list_view(kind))
