"""Columns of Arrow tables as arrays, and Arrow's errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError


def check_rows(table: pa.Table, expected: int, where: str) -> None:
    """Check that as many rows were read as the file's footer, which no checksum covers, says.

    Raises:
        FormatError: They are more or fewer; the message starts with `where`.
    """
    if table.num_rows != expected:
        raise FormatError(f"{where}: holds {table.num_rows} rows, expected {expected} as the file's footer says")


def column_array(table: pa.Table, name: str, where: str) -> pa.Array:
    """The column `name` in one piece.

    Raises:
        FormatError: it holds nulls; the message starts with `where`.
    """
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies even one chunk
    nulls = array.null_count or (array.flatten().null_count if is_list(array.type) else 0)
    if nulls:
        raise FormatError(f"{where}, column {name!r}: {nulls} {'null' if nulls == 1 else 'nulls'}, expected none")
    return array


def is_list(kind: pa.DataType) -> bool:
    """Whether `kind` is any of Arrow's types of lists."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def list_values(array: pa.Array) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The elements of lists, and where each list begins and ends among them, int64[n + 1]."""
    if pa.types.is_fixed_size_list(array.type):
        return array.flatten().to_numpy(), array.type.list_size * np.arange(len(array) + 1, dtype=np.int64)
    offsets = array.offsets.to_numpy().astype(np.int64)
    return array.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]


@contextmanager
def arrow_errors(where: str) -> Iterator[None]:
    """Turn PyArrow's errors about a damaged file into `FormatError`, whose message starts with `where`."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last from names of columns
        reason = str(error).splitlines()[0]
        raise FormatError(f"{where}: cannot be read as Parquet ({reason}), expected a whole Parquet file") from error
