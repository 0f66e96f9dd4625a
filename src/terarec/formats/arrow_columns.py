"""Columns of Arrow tables as arrays, and Arrow's errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from terarec.errors import FormatError


def column_array(table: pa.Table, name: str, where: str) -> pa.Array:
    """The column `name` in one piece.

    Raises:
        FormatError: it holds nulls; the message starts with `where`.
    """
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies even one chunk
    listed = pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type)
    nulls = array.null_count or (array.flatten().null_count if listed else 0)
    if nulls:
        raise FormatError(f"{where}, column {name!r}: {nulls} {'null' if nulls == 1 else 'nulls'}, expected none")
    return array


@contextmanager
def arrow_errors(where: str) -> Iterator[None]:
    """Turn PyArrow's errors about a damaged file into `FormatError`, whose message starts with `where`."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{where}: cannot be read as Parquet ({reason}), expected a whole Parquet file") from error
