# SPDX-License-Identifier: Apache-2.0
"""Tables as one file, written atomically: Parquet, CSV or JSON lines, by the suffix of its name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
from pyarrow import csv

from terarec.errors import FormatError
from terarec.io.files import atomic_file
from terarec.io.opening import arrow_file
from terarec.spec.checks import FieldError

TABLE_SUFFIXES = (".parquet", ".csv", ".jsonl")
"""Ends of the names of the files that can be written and read."""


def read_table_file(path: Path, *, texts: Sequence[str] = ()) -> pa.Table:
    """Read a table whose rows fit in memory.

    Args:
        path: Path of the file; its suffix selects the format.
        texts: Columns whose values are texts in CSV, such as "007"; others are numbers where all values are.

    Raises:
        ConfigError: Another suffix.
        DataNotFoundError: No such file.
        FormatError: A damaged file.
    """
    if path.suffix not in TABLE_SUFFIXES:
        raise FieldError("", "file", f"got {path}, expected a name that ends in {', '.join(TABLE_SUFFIXES)}")
    try:
        with arrow_file(path) as file:
            if path.suffix == ".parquet":
                # In this thread, as states are read.
                return pq.ParquetFile(file, pre_buffer=False).read(use_threads=False)
            if path.suffix == ".jsonl":
                return pyarrow.json.read_json(file)
            # Arrow guesses types from the values; a column of ids such as 007 would lose its zeros.
            types = dict.fromkeys(texts, pa.string())
            return csv.read_csv(file, convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=True))
    except pa.ArrowInvalid as error:
        raise FormatError(path, str(error).splitlines()[0]) from None


class TableFile(Protocol):
    """Receiver of rows."""

    def write_table(self, table: pa.Table) -> None:
        """Append rows."""
        ...


def check_suffix(path: Path) -> None:
    """Raise `ConfigError` unless the suffix of a name is that of a format."""
    if path.suffix not in TABLE_SUFFIXES:
        raise FieldError("", "out", f"got {path}, expected a name that ends in {', '.join(TABLE_SUFFIXES)}")


@contextmanager
def table_file(path: Path, schema: pa.Schema, *, replace: bool = False) -> Iterator[TableFile]:
    """Yield a file for rows of `schema`; it appears when the block succeeds.

    Args:
        path: Path of the file; its suffix selects the format.
        schema: Schema of the rows.
        replace: Whether an existing file is replaced.

    Raises:
        ConfigError: Another suffix; an existing file that may not be replaced; lists for a CSV file.
        StorageError: The disk is full.
    """
    check_suffix(path)
    lists = [field.name for field in schema if pa.types.is_nested(field.type)] if path.suffix == ".csv" else []
    if lists:
        raise FieldError(
            "", "out", f"got {path} for column {lists[0]!r}, which holds lists, expected .parquet or .jsonl"
        )
    with atomic_file(path, replace=replace) as partial:
        if path.suffix == ".parquet":
            with pq.ParquetWriter(partial, schema) as parquet:
                yield parquet
        elif path.suffix == ".csv":
            with csv.CSVWriter(str(partial), schema) as text:
                yield text
        else:
            with partial.open("w", encoding="utf-8") as lines:
                yield _JsonLines(lines)


class _JsonLines:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write_table(self, table: pa.Table) -> None:
        columns = [_json_values(column) for column in table.columns]
        rows = (dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True))
        self._stream.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def _json_values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column; a float32 as the shortest number that reads back as the same float32."""
    if pa.types.is_float32(column.type):
        # `float(value)` would print the digits of the nearest float64.
        return [float(text) for text in column.to_numpy().astype(str)]
    values: list[Any] = column.to_pylist()
    return values
