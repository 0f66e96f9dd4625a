# SPDX-License-Identifier: Apache-2.0
"""Vectors of served tables on a disk, in row files or RocksDB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.checkpoint.directory import WEIGHTS
from terarec.errors import FormatError
from terarec.memory.rocksdb import RocksDBStore
from terarec.memory.row_file import PageReader, RowFile
from terarec.memory.row_format import RowColumn, RowFileOptions, read_description
from terarec.memory.row_store import LEAST_ROW_BYTES, MOST_ROW_BYTES, RowStore
from terarec.memory.table_stores import TableStore, TableStores
from terarec.spec import RocksDBSpec, RowFileSpec


class _Vectors(NamedTuple):
    """Vectors in wider rows, such as those of a training with its optimizer state, or in padded ones.

    Attributes:
        width: Length D of a vector.
        offset: Place of the vector in a row, in bytes.
        dtype: Its element type.
    """

    width: int
    offset: int = 0
    dtype: str = "float32"

    def unpack(self, stored: Tensor) -> Tensor:
        """Return the vectors float32[n, D] as bytes."""
        kind: torch.dtype = getattr(torch, self.dtype)
        # Columns of wider rows have gaps, over which a view of another type is not possible.
        part = stored[:, self.offset : self.offset + self.width * kind.itemsize].contiguous()
        return part.view(-1).view(kind).view(stored.shape[0], self.width).float().view(torch.uint8)

    def pack(self, rows: Tensor, row_bytes: int) -> Tensor:
        """Return vectors with zeros behind them, where they are shorter than the least row."""
        padded = torch.zeros(rows.shape[0], row_bytes, dtype=torch.uint8)
        padded[:, : rows.shape[1]] = rows
        return padded

    def form(self, row_bytes: int) -> _Vectors | None:
        """Return this, or None where the rows are the vectors."""
        return None if self == _Vectors(self.width) and row_bytes == 4 * self.width else self


def open_row_files(spec: RowFileSpec, directories: Sequence[Path], tables: Sequence[str], width: int) -> TableStores:
    """Open or create the row files of tables of one width.

    Args:
        spec: Whether they are read-only.
        directories: Directory of each file.
        tables: Names of the tables.
        width: Length D of a vector.

    Raises:
        FormatError: No row file, or one of other vectors.
        StorageError: It is open for writing already, or damaged.
    """
    reader = page_reader()
    open_store = partial(open_row_file, width=width, reader=reader, read_only=spec.read_only)
    return TableStores(_opened(open_store, directories, tables), reader)


def page_reader() -> PageReader:
    """Return what reads the pages of row files with rows of any size."""
    return PageReader(RowFileOptions(), MOST_ROW_BYTES)


def _opened(
    open_store: Callable[[Path, str], TableStore], directories: Sequence[Path], tables: Sequence[str]
) -> list[TableStore]:
    """Open the stores of all tables, or none."""
    with ExitStack() as opened:
        stores = []
        for directory, table in zip(directories, tables, strict=True):
            stores.append(open_store(directory, table))
            if (store := stores[-1].store) is not None:
                opened.callback(store.close)
        opened.pop_all()
    return stores


def open_row_file(directory: Path, table: str, reader: PageReader, *, width: int, read_only: bool) -> TableStore:
    """Open or create the row file of a table; arguments and errors are those of `open_row_files`."""

    def create() -> RowStore:
        columns = (RowColumn(name=WEIGHTS, dtype="float32", shape=(width,)),)
        return RowFile.create(directory, _row_bytes(width), table=table, columns=columns, reader=reader)

    # An empty directory is as good as none: `RowFile.create` takes it.
    is_there = directory.is_dir() and any(directory.iterdir())
    if not is_there:
        if read_only:
            raise FormatError(directory, "no such row file, expected one to open for reading only")
        return TableStore(None, create, form=_Vectors(width).form(_row_bytes(width)))
    vectors = _stored_vectors(directory, width)
    # Rows of a checkpoint have optimizer state next to the vector, which an insertion would have to make up.
    is_writable = not read_only and len(read_description(directory).columns) == 1 and vectors == _Vectors(width)
    store = RowFile.open(directory, read_only=read_only, reader=reader)
    return TableStore(store, create, is_writable=is_writable, form=vectors.form(store.row_bytes))


def open_rocksdb(spec: RocksDBSpec, directories: Sequence[Path], tables: Sequence[str], width: int) -> TableStores:
    """Open or create the RocksDB databases of tables of one width; the arguments are those of `open_row_files`.

    Raises:
        FormatError: A database of others, or rows of another size.
        MissingDependencyError: ``rocksdict`` is not installed.
        StorageError: The database cannot be opened.
    """
    return TableStores(_opened(partial(_database, spec, width), directories, tables))


def _database(spec: RocksDBSpec, width: int, directory: Path, table: str) -> TableStore:
    def create() -> RowStore:
        return RocksDBStore(directory, row_bytes)

    row_bytes = _row_bytes(width)
    form = _Vectors(width).form(row_bytes)
    if not directory.is_dir():
        return TableStore(None, create, is_writable=not spec.read_only, form=form)
    store = RocksDBStore.open(directory)
    if store.row_bytes != row_bytes:
        got = store.row_bytes
        store.close()
        raise FormatError(directory, f"holds rows of {got} bytes, expected {row_bytes} for table {table!r}")
    return TableStore(store, create, is_writable=not spec.read_only, form=form)


def _row_bytes(width: int) -> int:
    return max(LEAST_ROW_BYTES, 4 * width)


def _stored_vectors(directory: Path, width: int) -> _Vectors:
    """Return where the vector is in the rows of a row file."""
    layout, offset = read_description(directory), 0
    for column in layout.columns:
        if column.name == WEIGHTS:
            if column.shape != (width,) or column.dtype not in ("float32", "bfloat16", "float16"):
                got = f"{column.dtype}{list(column.shape)}"
                raise FormatError(directory, f"holds weights {got}, expected floats [{width}]")
            return _Vectors(width, offset, column.dtype)
        offset += column.num_bytes
    raise FormatError(directory, f"holds no column {WEIGHTS!r}, expected the rows of a table")
