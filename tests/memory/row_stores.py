# SPDX-License-Identifier: Apache-2.0
"""The kinds of row stores that the behaviour suite runs on: how each is made, and opened again after a crash."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from terarec.memory import RowStore
from terarec.memory.rocksdb import RocksDBStore
from terarec.memory.row_file import RowFile
from terarec.memory.row_format import RowFileOptions
from tests.memory.memory_row_store import MemoryRowStore


@dataclass(frozen=True)
class Kind:
    """A kind of row store.

    Attributes:
        create: Rows of so many bytes in a directory that does not exist.
        reopen: Close a store of that directory without a commit and open it again.
        load: Open what `snapshot` wrote.
    """

    create: Callable[[Path, int], RowStore]
    reopen: Callable[[RowStore, Path], RowStore]
    load: Callable[[Path], RowStore]


def _reopen_memory(store: RowStore, directory: Path) -> RowStore:
    """What a process finds that starts after this one: the last snapshot, which is taken of the last commit."""
    path = directory / f"commit-{store.last_commit}-{id(store)}"
    store.snapshot(path)
    store.close()
    return MemoryRowStore.load(path)


def _create_row_file(directory: Path, row_bytes: int, options: RowFileOptions, segment_bytes: int) -> RowStore:
    return RowFile.create(directory, row_bytes, table="t", segment_bytes=segment_bytes, options=options)


def _reopen_row_file(store: RowStore, directory: Path, options: RowFileOptions) -> RowStore:
    store.close()
    return RowFile.open(directory, options=options)


def _row_file(options: RowFileOptions, segment_bytes: int) -> Kind:
    return Kind(
        create=partial(_create_row_file, options=options, segment_bytes=segment_bytes),
        reopen=partial(_reopen_row_file, options=options),
        load=partial(RowFile.open, options=options),
    )


def _reopen_rocksdb(store: RowStore, directory: Path) -> RowStore:
    store.close()
    return RocksDBStore.open(directory)


KINDS = {
    "memory": Kind(
        create=lambda directory, row_bytes: MemoryRowStore(row_bytes), reopen=_reopen_memory, load=MemoryRowStore.load
    ),
    "row-file": _row_file(RowFileOptions(), 2**20),
    # Segments of two or three pages, so that much is sealed and moved in the background.
    "row-file-small": _row_file(RowFileOptions(io="threads", io_threads=2, open_files=8), 3 * 4096),
    "row-file-direct": _row_file(RowFileOptions(direct=True), 2**16),
}
if importlib.util.find_spec("rocksdict"):
    KINDS["rocksdb"] = Kind(create=RocksDBStore, reopen=_reopen_rocksdb, load=RocksDBStore.open)
