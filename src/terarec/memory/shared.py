# SPDX-License-Identifier: Apache-2.0
"""Rows in memory that the processes of a machine share: `SharedStores` of changing ones, `mapped_rows` of a file."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from terarec.closer import Closer
from terarec.errors import NoSpaceError, StorageError
from terarec.io.files import atomic_file
from terarec.io.locks import file_lock, wait_for_lock
from terarec.io.owned import remove_abandoned
from terarec.io.removal import mark
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import batch_of
from terarec.memory.guarded import STATE
from terarec.memory.row_file import PageReader
from terarec.memory.row_store import SCAN_ROWS
from terarec.memory.table_stores import TableStore, TableStores
from terarec.spec import SharedMemorySpec

MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory."""
_LOOK_SECONDS = 0.1  # between two looks of a reader for a newer commit: some 10 us each
_PAUSE_SECONDS = 0.01


class SharedDirectory:
    """A directory in memory, with row files that one process writes and others read.

    Each process holds a lock in it, which ends with the process, whatever ends it: so a directory without a process can
    be told from one in use. What processes do to the directory itself, they do one after the other.

    Raises:
        StorageError: The system has no such memory, or the directory belongs to another user.
    """

    def __init__(self, spec: SharedMemorySpec) -> None:
        self.path = MEMORY / spec.name
        if not MEMORY.is_dir():
            raise StorageError(MEMORY, "no such directory, expected Linux, where it holds files in memory")
        locks = ExitStack()
        try:
            with _changing(self.path):
                self._make()
                if spec.removes and remove_abandoned(self.path):  # of processes that were killed
                    self._make()
                locks.enter_context(file_lock(self.path / f"{uuid.uuid4().hex}.lock"))
        except PermissionError:
            raise self._foreign() from None
        self._locks = locks
        self.close = Closer(self, partial(_leave, self.path, locks, spec.removes))

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        # Any user may make a directory there, and rows of another one would be served.
        if self.path.is_symlink() or self.path.stat().st_uid != os.geteuid():
            raise self._foreign()

    def _foreign(self) -> StorageError:
        return StorageError(self.path, "belongs to another user, expected another name")

    def lock(self, name: str) -> bool:
        """Hold a lock of the directory until `close`; return whether no other process has it."""
        return self._locks.enter_context(file_lock(self.path / f"{name}.lock"))

    def is_locked(self, name: str) -> bool:
        """Return whether a process holds a lock of the directory."""
        with _changing(self.path), file_lock(self.path / f"{name}.lock") as is_free:
            return not is_free


def _changing(directory: Path) -> AbstractContextManager[bool]:
    """Let no other process join a directory or leave it during the block, which is short."""
    return wait_for_lock(directory.with_name(f"{directory.name}.lock"))


def _leave(directory: Path, locks: ExitStack, removes: bool) -> None:
    with _changing(directory):
        if removes:
            # A lock that nobody holds tells a directory that was left from one of others.
            with suppress(FileNotFoundError):  # somebody has removed it
                (directory / "left.lock").touch()
        locks.close()
        if removes:
            remove_abandoned(directory)


@contextmanager
def kept_directories(tiers: Iterable[object]) -> Iterator[None]:
    """Use the shared memory among some tiers during a block, at whose end it goes however other processes ended.

    Raises:
        StorageError: See `SharedDirectory`.
    """
    with ExitStack() as stack:
        for spec in tiers:
            if isinstance(spec, SharedMemorySpec):
                stack.enter_context(closing(SharedDirectory(spec)))
        yield


class OpenFile(Protocol):
    """Opens or creates the row file of a table."""

    def __call__(self, directory: Path, table: str, reader: PageReader, *, read_only: bool) -> TableStore:
        """Return the row file in a directory; for its writer, there may be none yet."""


class SharedStores(TableStores):
    """Rows of tables in a row file each, in memory that processes share.

    The first process that loads rows of a source is their writer. Others see each of its commits 0.1 s later at most,
    and as a whole. Rows of another source are in another file, so that nobody's rows change their meaning.

    `states` are those of the source of each table; "" for no source.

    Raises:
        FormatError: Files of other rows.
        StorageError: The memory cannot be used.
    """

    def __init__(
        self,
        spec: SharedMemorySpec,
        model: str,
        tables: Sequence[str],
        states: Sequence[str],
        open_file: OpenFile,
        reader: PageReader,
    ) -> None:
        self._spec, self._open_file, self._pages = spec, open_file, reader
        self._states, self._table_names = tuple(states), tuple(tables)
        self._names = [f"{model}.{table}.{_digest(state)}" for table, state in zip(tables, states, strict=True)]
        self._directory = SharedDirectory(spec)
        self._looking = threading.Lock()
        self._looked = 0.0
        # Commits of others that were moved on to, and those of them that `refresh` has told of.
        self._moves = self._told = 0
        super().__init__([TableStore(None, is_writable=False) for _ in tables], reader)
        try:
            with _changing(self._directory.path):
                # Before any is opened: of two processes that start, one writes all tables.
                writes = [spec.load_share > 0 and self._directory.lock(name) for name in self._names]
            self.tables = tuple(
                self._open(number) if is_writer else self.tables[number] for number, is_writer in enumerate(writes)
            )
            self._look()
        except BaseException:
            self.close()
            raise

    def _open(self, number: int, *, is_writer: bool = True) -> TableStore:
        path = self._directory.path / self._names[number]
        path.mkdir(exist_ok=True)
        mark(path)
        return self._open_file(path / "rows", self._table_names[number], self._pages, read_only=not is_writer)

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows of the commit that `refresh` has moved on to; see `Level.read`."""
        moves = self._moves
        try:
            return super().read(batch, out)
        except StorageError:
            # The writer may have removed what a newer commit does without, to which another thread may have moved on.
            if not self._look() and moves == self._moves:
                raise
            return super().read(batch, out)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Set rows; see `Level.write`."""
        if sum(file.file_bytes for file in self._files()) + values.numel() > self._spec.max_bytes:
            raise NoSpaceError(self._directory.path, f"the rows take more than {self._spec.max_bytes:,} bytes")
        super().write(batch, values)

    def clear(self, table: int) -> None:
        """Remove all rows of a table with the next commit, until which other processes see them."""
        for keys in [keys for keys, _ in self.items(table, SCAN_ROWS)]:
            self.erase(batch_of(keys, table))

    def refresh(self) -> bool:
        """Read the last commits of the writer; return whether there was one since the last call."""
        self._look()
        told, self._told = self._told, self._moves
        return told != self._told

    def is_due(self) -> bool:
        """Return whether it is time for a `refresh`, which is the caller's to do: others get False for a while."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS or self._looking.locked():
            return False
        self._looked = now
        return True

    def _look(self) -> bool:
        """Move on to the last commits; return whether there was a new one."""
        with self._looking:
            self._looked = time.monotonic()
            has_moved = super().refresh()
            for number, table in enumerate(self.tables):
                if table.store is None and not table.is_writable and self._is_there(number):
                    # In place: a lookup that is under way reads either.
                    opened = self._open(number, is_writer=False)
                    table.form, table.store = opened.form, opened.store
                    has_moved = True
            self._moves += has_moved
            return has_moved

    def _is_there(self, number: int) -> bool:
        return (self._directory.path / self._names[number] / "rows").is_dir()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the rows of all sources are there; `check` is called again and again, and may raise an error.

        Raises:
            StorageError: The process that loads them ended before, or there is none.
        """
        for number, (name, state) in enumerate(zip(self._names, self._states, strict=True)):
            # A load in part has no state. Any is of all rows of the source, which may have been changed since.
            while state and not self.tables[number].is_writable and STATE not in self.metadata(number):
                check()
                is_loaded = self._directory.is_locked(name)
                self._look()  # after that: its last act was a commit
                if not is_loaded and STATE not in self.metadata(number):
                    raise StorageError(
                        f"shared memory {self._spec.name!r}",
                        f"no process loads table {self._table_names[number]!r}, expected one with a load_share above 0",
                    )
                time.sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """Close the files, and leave the directory."""
        super().close()
        self._directory.close()


def _digest(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def mapped_rows(rows: Tensor, path: Path) -> Tensor:
    """Return rows that are read from a file; what is written to them stays in this process.

    Args:
        rows: Rows [n, D] in host memory, which are written to the file if there is none.
        path: The file. Processes that have mapped it keep it when it is removed.
    """
    if not path.is_file():
        size, available = rows.numel() * rows.element_size(), shutil.disk_usage(path.parent).free
        if size > available:  # said here, as NumPy reports a write that was cut without its reason
            raise NoSpaceError(path.parent, f"{size:,} bytes requested, {available:,} available")
        with atomic_file(path, flushes=False) as partial:
            rows.contiguous().view(torch.uint8).numpy().tofile(partial)
    return torch.from_file(str(path), shared=False, size=rows.numel(), dtype=rows.dtype).view(rows.shape)
