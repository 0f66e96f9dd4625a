# SPDX-License-Identifier: Apache-2.0
"""Tables in memory, read as files with the same content."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from terarec.errors import FormatError
from terarec.etl.columns import Rows, without_lowest
from terarec.etl.source.arrow_files import BATCH_ROWS, TypedReader, is_all_missing, read_table
from terarec.etl.source.blocks import FieldFaults, RawPart, SourceFile
from terarec.spec import SourceSpec

TABLE_PATH = "the table"
"""Stands for the path of a table in memory in errors and reports."""


def read_records(table: pa.Table, spec: SourceSpec) -> Rows:
    """Read the columns of a table of records.

    Raises:
        FormatError: A column of another type, or an invalid value, with its row from 0.
    """
    faults: list[FieldFaults] = []
    columns, nanoseconds = read_table(table, spec, faults, TABLE_PATH)
    for fault in faults:
        raise FormatError(f"column {fault.column!r}, row {fault.rows[0]}", f"{fault.got[0]}, expected {fault.expected}")
    integers = {column.name: columns[column.name] for column in spec.columns if column.type == "integer"}
    columns |= {name: without_lowest(array) for name, array in integers.items()}
    return Rows(columns, np.arange(table.num_rows, dtype=np.int64), nanoseconds=nanoseconds)


class TableReader(TypedReader):
    """Reads a table in memory. ``content`` of a part is a batch."""

    def __init__(self, spec: SourceSpec, table: pa.Table) -> None:
        super().__init__(spec)
        self._table = table

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the batches of the table, large ones in pieces."""
        before = 0
        self._check_schema(file.path, self._table.schema)
        for batch in self._table.select(self._names).to_batches(max_chunksize=BATCH_ROWS):
            if batch.num_rows and (after is None or before > after.before):
                yield RawPart(file.path, before, batch.num_rows, batch.nbytes, batch)
            before += batch.num_rows

    @override
    def _is_missing_in(self, path: str, name: str) -> bool:
        return all(map(is_all_missing, self._table.column(name).chunks))

    def count_rows(self, file: SourceFile, threads: int = 1) -> int:
        """Return the number of rows."""
        return int(self._table.num_rows)

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the values."""
        return file.bytes


def describe_table(table: pa.Table) -> SourceFile:
    """Return what a source knows of a table in memory, whose content is its version."""
    if not table.num_rows:
        raise FormatError(TABLE_PATH, "has no rows, expected at least one")
    digest = _Digest()
    # In batches of the table, since to join them would copy it.
    with pa.ipc.new_stream(pa.PythonFile(digest, mode="w"), table.schema.remove_metadata()) as stream:
        stream.write_table(table)
    return SourceFile(TABLE_PATH, max(table.nbytes, 1), digest.hash.hexdigest())


class _Digest(io.RawIOBase):
    """A file that keeps a digest of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.hash.update(content)
        return len(content)
