# SPDX-License-Identifier: Apache-2.0
"""The levels of served tables: host memory, of one process or shared, Redis or Valkey, and disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from terarec.kernels.slots import SLOT_BYTES
from terarec.memory.cache import Cache
from terarec.memory.fence import OwnFence
from terarec.memory.guarded import STATE, Guarded
from terarec.memory.redis_rows import RedisRows
from terarec.memory.redis_server import RedisServer
from terarec.memory.shared import SharedStores
from terarec.memory.table_stores import TableStores
from terarec.ps.disk import open_rocksdb, open_row_file, open_row_files, page_reader
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

    Args:
        spec: The tier.
        model: The model of the tables.
        tables: As above.
        server: The connections of a tier in Redis.

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
    return Guarded(
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
    level.await_rows, level.stay = stores.wait, stores.stay
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
