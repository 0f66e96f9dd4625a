# SPDX-License-Identifier: Apache-2.0
"""The levels of served tables: host memory, of one process or shared, Redis or Valkey, and disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.checkpoint.directory import WEIGHTS
from terarec.errors import FormatError
from terarec.kernels.slots import SLOT_BYTES
from terarec.memory.cache import Cache
from terarec.memory.fence import OwnFence
from terarec.memory.guarded import STATE, Guarded
from terarec.memory.redis_rows import RedisRows
from terarec.memory.redis_server import RedisServer
from terarec.memory.rocksdb import RocksDBStore
from terarec.memory.row_file import PageReader, RowFile
from terarec.memory.row_format import RowColumn, RowFileOptions, read_description
from terarec.memory.row_store import LEAST_ROW_BYTES, MOST_ROW_BYTES, RowStore
from terarec.memory.shared import SharedStores
from terarec.memory.table_stores import TableStore, TableStores
from terarec.ps.loading import source_identity
from terarec.spec import (
    HostMemorySpec,
    RedisSpec,
    RocksDBSpec,
    RowFileSpec,
    ServedModelSpec,
    ServedTableSpec,
    SharedMemorySpec,
)
from terarec.spec.parameter_server import TierSpec


def open_level(
    spec: TierSpec, model: ServedModelSpec, tables: Sequence[ServedTableSpec], server: RedisServer | None = None
) -> Guarded:
    """Open the level of tables of one width.

    Raises:
        FormatError: Files of other rows.
        MissingDependencyError: A library that the tier needs is not installed.
        StorageError: It cannot be opened.
    """
    # HugeCTR names no version, so version 0 has its names.
    versioned = f"{model.name}@{model.version}" if model.version else model.name
    names, width = [table.name for table in tables], tables[0].width
    if isinstance(spec, HostMemorySpec):
        return host_level(spec, names, width)
    if isinstance(spec, RedisSpec):
        assert server is not None
        return redis_level(server, [f"hps_et.{versioned}.{name}" for name in names], width)
    if isinstance(spec, SharedMemorySpec):
        states = ["" if table.source is None else source_identity(Path(table.source)) for table in tables]
        return shared_level(spec, versioned, names, states, width)
    return disk_level(spec, [Path(spec.path) / versioned / name for name in names], names, width)


def host_level(
    spec: HostMemorySpec, tables: Sequence[str], width: int, clock: Callable[[], float] = monotonic
) -> Guarded:
    """Return rows float32[D] of tables in host memory."""
    rows = Cache(
        4 * width,
        [None] * len(tables),
        None,
        name=f"tables {', '.join(map(repr, tables[:3]))} in host memory",
        serves=True,
        num_partitions=spec.num_partitions,
        overflow=spec.overflow,
    )
    return Guarded(
        rows,
        spec.kind,
        len(tables),
        keeps_found=spec.keeps_found,
        share=spec.load_share,
        has_all=spec.load_share == 1.0 and spec.overflow.max_rows is None,
        losses=lambda table: (rows.evicted(table), 0),
        clock=clock,
    )


def redis_level(
    server: RedisServer, tags: Sequence[str], width: int, clock: Callable[[], float] = monotonic
) -> Guarded:
    """Return rows float32[D] of tables on a server, under the names `tags`."""
    rows = RedisRows(server, tags, 4 * width)
    spec = server.spec
    level = Guarded(
        rows,
        spec.kind,
        len(tags),
        keeps_found=spec.keeps_found,
        share=spec.load_share,
        # With a share of 0 others wrote the rows, all of them.
        has_all=spec.load_share in (0.0, 1.0) and spec.overflow.max_rows is None,
        fences=rows.fences,
        losses=rows.losses,
        clock=clock,
    )
    level.join, level.retain = rows.join, rows.retain
    return level


def shared_level(
    spec: SharedMemorySpec,
    model: str,
    tables: Sequence[str],
    states: Sequence[str],
    width: int,
) -> Guarded:
    """Return rows float32[D] of tables in memory that processes share."""
    stores = SharedStores(spec, model, tables, states, partial(open_row_file, width=width), page_reader())
    is_writable = [table.is_writable for table in stores.tables]
    fences = [OwnFence(stores.metadata(table).get(STATE, "")) for table in range(len(tables))]
    level = Guarded(
        stores,
        spec.kind,
        len(tables),
        is_writable=is_writable,
        share=spec.load_share,
        has_all=spec.load_share in (0.0, 1.0),
        fences=fences,
    )
    level.await_rows, level.is_due = stores.wait, stores.is_due
    for table, fence in enumerate(fences):
        if is_writable[table]:
            fence.at_end = partial(level.commit, table)  # others see a change once it is committed
    return level


def disk_level(
    spec: RowFileSpec | RocksDBSpec,
    directories: Sequence[Path],
    tables: Sequence[str],
    width: int,
) -> Guarded:
    """Return rows float32[D] of tables on a disk, each in a directory of its own; errors are those of `open_level`."""
    if isinstance(spec, RocksDBSpec):
        stores = open_rocksdb(spec, directories, tables, width)
    else:
        stores = open_row_files(spec, directories, tables, width)
    rows: Cache | TableStores = stores
    if isinstance(spec, RowFileSpec) and spec.cache_bytes:
        slots = spec.cache_bytes // (4 * width + SLOT_BYTES)
        rows = Cache(4 * width, [slots] * len(tables), stores, name=spec.kind, keeps_read=True, serves=True)
    return Guarded(
        rows,
        spec.kind,
        len(tables),
        is_writable=[table.is_writable for table in stores.tables],
        share=spec.load_share,
        has_all=spec.load_share in (0.0, 1.0),
    )


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
        if spec.read_only:
            raise FormatError(directory, "no such database, expected one to open for reading only")
        return TableStore(None, create, form=form)
    store = RocksDBStore.open(directory, read_only=spec.read_only)
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
