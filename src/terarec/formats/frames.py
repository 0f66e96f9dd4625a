# SPDX-License-Identifier: Apache-2.0
"""Tables in memory, of pandas, Polars, PyArrow and others, through Arrow's C interface."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import pyarrow as pa

from terarec.errors import ConfigError


@runtime_checkable
class ArrowStream(Protocol):
    """Data in pieces, such as a DataFrame of pandas or Polars, or a table or reader of PyArrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return a capsule with a stream of arrays."""
        ...


@runtime_checkable
class ArrowArray(Protocol):
    """Data in one piece, such as a record batch of PyArrow."""

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Return capsules with a schema and an array."""
        ...


Frame: TypeAlias = ArrowStream | ArrowArray
"""Rows with named columns. A reader of batches is read once, into memory."""


def is_frame(data: object, where: str) -> TypeGuard[Frame]:
    """Return whether `data` is a table in memory.

    Args:
        data: What may be one.
        where: Place for errors, such as the name of the argument.

    Raises:
        ConfigError: A query of Polars that was not run.
    """
    _check_not_lazy(data, where)
    return isinstance(data, ArrowStream | ArrowArray)


def _check_not_lazy(data: object, where: str) -> None:
    polars = sys.modules.get("polars")
    if polars is not None and isinstance(data, polars.LazyFrame):  # which has no interface of Arrow
        raise ConfigError(where, "got a LazyFrame of Polars, which is a query, expected its result: call collect()")


def as_table(data: Frame, where: str) -> pa.Table:
    """Return the rows of a table in memory as an Arrow table, which shares its memory where it can.

    The index of a DataFrame of pandas is left out. Names of columns that are no texts become texts.

    Raises:
        ConfigError: Data without columns, a column of values of several types, or two columns of one name.
    """
    _check_not_lazy(data, where)
    got = f"{type(data).__module__.partition('.')[0]}.{type(data).__qualname__}"
    try:
        # A record batch has both methods, a reader of other libraries the stream alone.
        if isinstance(data, ArrowStream):
            table = pa.RecordBatchReader.from_stream(data).read_all()
        else:
            table = pa.Table.from_batches([pa.record_batch(data)])
    # Whatever a library raises for a column that Arrow cannot hold.
    except (pa.ArrowException, ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            where, f"got a {got} that is no table of Arrow ({reason}), expected columns of one type each"
        ) from None
    index = _pandas_index(table.schema) if _is_of_pandas(data) else frozenset()
    table = table.select([place for place, name in enumerate(table.column_names) if name not in index])
    repeated = [name for name, count in Counter(table.column_names).items() if count > 1]
    if repeated:
        raise ConfigError(
            where, f"got a {got} with {repeated[0]!r} as the name of several columns, expected one of each"
        )
    # Arrow joins no empty piece of a column with nulls, as other libraries have, with other pieces.
    return pa.Table.from_batches([batch for batch in table.to_batches() if batch.num_rows], table.schema)


def _is_of_pandas(data: Frame) -> bool:
    # Tables of others that pandas has written describe its index, too, which is one of their columns.
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


def _pandas_index(schema: pa.Schema) -> frozenset[str]:
    """Return the columns that hold the index of a DataFrame of pandas."""
    try:
        described: Any = json.loads((schema.metadata or {})[b"pandas"])["index_columns"]
    except (KeyError, ValueError, TypeError):
        return frozenset()
    # An index of consecutive numbers is described by a dict, and is no column.
    return frozenset(name for name in described if isinstance(name, str))
