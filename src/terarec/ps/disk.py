# SPDX-License-Identifier: Apache-2.0
"""`VectorStores`: vectors of served tables on a disk, in row files or RocksDB."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.checkpoint.directory import WEIGHTS
from terarec.errors import FormatError, StorageError
from terarec.kernels.cpu.host import empty_floats
from terarec.kernels.slots import RowBatch
from terarec.memory.level import by_table, clear_rows, table_spans
from terarec.memory.rocksdb import RocksDBStore
from terarec.memory.row_file import PageReader, RowFile, read_files
from terarec.memory.row_format import RowColumn, RowFileOptions, read_description
from terarec.memory.row_store import LEAST_ROW_BYTES, MOST_ROW_BYTES, RowStore
from terarec.spec import RocksDBSpec, RowFileSpec


class VectorStore:
    """The vectors of a table in a row store, whose rows may hold more, such as a training's optimizer state.

    Attributes:
        store: The row store; None for one that does not exist yet.

    Args:
        name: Kind of the store, for errors.
        store: As above.
        width: Length D of a vector.
        create: Creates the store when the first row is written; None to serve it read-only.
        column: Offset in bytes and element type of the vector in a row.
    """

    def __init__(
        self,
        name: str,
        store: RowStore | None,
        width: int,
        create: Callable[[], RowStore] | None,
        column: tuple[int, str] = (0, "float32"),
    ) -> None:
        self.store = store
        self._name = name
        self._width = width
        self._create = create
        self._column = column
        self._lock = threading.Lock()

    @property
    def is_writable(self) -> bool:
        """Whether vectors can be written and erased."""
        return self._create is not None

    @property
    def holds_vectors(self) -> bool:
        """Whether there is a store, whose rows are the looked-up floats."""
        return self.store is not None and self._column == (0, "float32") and self.store.row_bytes == 4 * self._width

    def read(self, keys: NDArray[np.int64], out: Tensor) -> Tensor:
        """Copy vectors to ``out uint8[n, 4 * D]``; return which there are, bool[n]."""
        if self.store is None:
            return torch.zeros(len(keys), dtype=torch.bool)
        if self.holds_vectors:
            return torch.from_numpy(self.store.read(keys, out.numpy()))
        # Of floats, since large results come from memory that the core keeps, on pages that were touched before.
        row_bytes = self.store.row_bytes
        held = empty_floats(len(keys), -(-row_bytes // 4)).view(torch.uint8)[:, :row_bytes]
        found = torch.from_numpy(self.store.read(keys, held.numpy()))
        out.copy_(self._vectors(held))
        return found

    def write(self, keys: NDArray[np.int64], values: Tensor) -> None:
        """Set the vectors of distinct keys to ``values uint8[n, 4 * D]``."""
        store = self.writable()
        if not self.holds_vectors:
            # Zeros behind a vector that is shorter than the least row.
            padded = torch.zeros(len(keys), store.row_bytes, dtype=torch.uint8)
            padded[:, : values.shape[1]] = values
            values = padded
        store.write(keys, values.numpy())

    def items(self, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys int64[n] and vectors uint8[n, 4 * D]."""
        for keys, rows in () if self.store is None else self.store.items(chunk_rows):
            yield torch.from_numpy(keys), self._vectors(torch.from_numpy(rows))

    def writable(self) -> RowStore:
        """Return the store, which is created if there is none.

        Raises:
            StorageError: It is read-only.
        """
        if self._create is None:
            raise StorageError(self._name, "is open for reading only, expected no insertion")
        # Two insertions at the same time must not create the store twice.
        with self._lock:
            if self.store is None:
                self.store = self._create()
            return self.store

    def _vectors(self, rows: Tensor) -> Tensor:
        """Return the vectors uint8[n, 4 * D] in ``rows uint8[n, row_bytes]``."""
        offset, dtype = self._column
        kind: torch.dtype = getattr(torch, dtype)
        # Columns of wider rows have gaps, over which a view of another type is not possible.
        part = rows[:, offset : offset + self._width * kind.itemsize].contiguous()
        floats = part.view(-1).view(kind).view(rows.shape[0], self._width).float()
        return floats.view(torch.uint8)


class VectorStores:
    """Vectors of tables of one width as bytes, each table in a store. Implements `terarec.memory.level.FileLevel`.

    Attributes:
        stores: By the number of the table.

    Args:
        stores: As above.
        reader: What reads the pages of all row files.
    """

    def __init__(self, stores: Sequence[VectorStore], reader: PageReader | None = None) -> None:
        self.stores = tuple(stores)
        self._reader = reader

    @property
    def is_writable(self) -> tuple[bool, ...]:
        """Whether rows of each table can be written and erased."""
        return tuple(held.is_writable for held in self.stores)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the stores' indexes and buffers."""
        return sum(held.store.memory_bytes for held in self.stores if held.store is not None)

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes of row files."""
        return sum(held.store.index_bytes for held in self.stores if isinstance(held.store, RowFile))

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy vectors; see `Level.read`. Pages of several row files are read together."""
        spans = table_spans(batch, len(self.stores))
        keys = batch.keys.numpy()
        files = [self.stores[span.table].store for span in spans if self.stores[span.table].holds_vectors]
        together = [file for file in files if isinstance(file, RowFile)]
        if self._reader is not None and 1 < len(together) == len(spans):
            return torch.from_numpy(read_files(together, keys, [span.end for span in spans], out.numpy()))
        found = torch.zeros(len(keys), dtype=torch.bool)
        for span in spans:
            found[span.places] = self.stores[span.table].read(keys[span.places], out[span.places])
        return found

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set vectors; see `Level.write`."""
        for table, places in by_table(batch):
            self.stores[table].write(batch.keys[places].numpy(), values[places])

    def erase(self, batch: RowBatch) -> None:
        """Remove vectors; see `Level.erase`."""
        for table, places in by_table(batch):
            if self.stores[table].store is not None:
                self.stores[table].writable().erase(batch.keys[places].numpy())

    def clear(self, table: int) -> None:
        """Remove all vectors of a table; see `Level.clear`."""
        if self.stores[table].store is not None:
            clear_rows(self, table)

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all vectors of a table; see `Level.items`."""
        return self.stores[table].items(chunk_rows)

    def count(self, table: int) -> int:
        """Return the number of vectors of a table."""
        store = self.stores[table].store
        return 0 if store is None else len(store)

    def metadata(self, table: int) -> Mapping[str, str]:
        """Return what the last commit noted; see `Level.metadata`."""
        store = self.stores[table].store
        return {} if store is None else store.metadata

    def commit(self, metadata: Mapping[str, str] | None = None, table: int | None = None) -> None:
        """Make written vectors durable; see `Level.commit`."""
        for held in self.stores if table is None else [self.stores[table]]:
            if held.is_writable and (held.store is not None or table is not None):
                store = held.writable()
                # A commit without metadata would drop those of the last one.
                store.commit(store.metadata if metadata is None else metadata)

    def refresh(self) -> bool:
        """Read the last commits of another process, in read-only row files; other stores have a single writer."""
        files = [held.store for held in self.stores if isinstance(held.store, RowFile) and not held.is_writable]
        moved = [file.refresh() for file in files]
        return any(moved)

    def snapshot(self, table: int, directory: Path) -> bool:
        """Return False: files of a server are no working memory of a training."""
        return False

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `FileLevel.take_over`."""
        self.stores[table].store = store

    def close(self) -> None:
        """Close the stores; changes that were not committed are lost."""
        for held in self.stores:
            if held.store is not None:
                held.store.close()


def open_row_files(spec: RowFileSpec, directories: Sequence[Path], tables: Sequence[str], width: int) -> VectorStores:
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
    reader = PageReader(RowFileOptions(), MOST_ROW_BYTES)
    with ExitStack() as opened:
        stores = []
        for directory, table in zip(directories, tables, strict=True):
            stores.append(_row_file(spec, directory, table, width, reader))
            if (store := stores[-1].store) is not None:
                opened.callback(store.close)
        opened.pop_all()
    return VectorStores(stores, reader)


def _row_file(spec: RowFileSpec, directory: Path, table: str, width: int, reader: PageReader) -> VectorStore:
    def create() -> RowStore:
        columns = (RowColumn(name=WEIGHTS, dtype="float32", shape=(width,)),)
        return RowFile.create(directory, _row_bytes(width), table=table, columns=columns, reader=reader)

    # An empty directory is as good as none: `RowFile.create` takes it.
    is_there = directory.is_dir() and any(directory.iterdir())
    if not is_there:
        if spec.read_only:
            raise FormatError(directory, "no such row file, expected one to open for reading only")
        return VectorStore(spec.kind, None, width, create)
    column = _vector_column(directory, width)
    # Rows of a checkpoint have optimizer state next to the vector, which an insertion would have to make up.
    is_writable = not spec.read_only and len(read_description(directory).columns) == 1 and column == (0, "float32")
    store = RowFile.open(directory, read_only=spec.read_only, reader=reader)
    return VectorStore(spec.kind, store, width, create if is_writable else None, column)


def open_rocksdb(spec: RocksDBSpec, directories: Sequence[Path], tables: Sequence[str], width: int) -> VectorStores:
    """Open or create the RocksDB databases of tables of one width; the arguments are those of `open_row_files`.

    Raises:
        FormatError: A database of others, or rows of another size.
        MissingDependencyError: ``rocksdict`` is not installed.
        StorageError: The database cannot be opened.
    """
    with ExitStack() as opened:
        stores = []
        for directory, table in zip(directories, tables, strict=True):
            stores.append(_database(spec, directory, table, width))
            if (store := stores[-1].store) is not None:
                opened.callback(store.close)
        opened.pop_all()
    return VectorStores(stores)


def _database(spec: RocksDBSpec, directory: Path, table: str, width: int) -> VectorStore:
    def create() -> RowStore:
        return RocksDBStore(directory, _row_bytes(width))

    if not directory.is_dir():
        return VectorStore(spec.kind, None, width, None if spec.read_only else create)
    store = RocksDBStore.open(directory)
    if store.row_bytes != _row_bytes(width):
        got = store.row_bytes
        store.close()
        raise FormatError(directory, f"holds rows of {got} bytes, expected {_row_bytes(width)} for table {table!r}")
    return VectorStore(spec.kind, store, width, None if spec.read_only else create)


def _row_bytes(width: int) -> int:
    return max(LEAST_ROW_BYTES, 4 * width)


def _vector_column(directory: Path, width: int) -> tuple[int, str]:
    """Return the offset and the element type of the vector in the rows of a row file."""
    layout, offset = read_description(directory), 0
    for column in layout.columns:
        if column.name == WEIGHTS:
            if column.shape != (width,) or column.dtype not in ("float32", "bfloat16", "float16"):
                got = f"{column.dtype}{list(column.shape)}"
                raise FormatError(directory, f"holds weights {got}, expected floats [{width}]")
            return offset, column.dtype
        offset += column.num_bytes
    raise FormatError(directory, f"holds no column {WEIGHTS!r}, expected the rows of a table")
