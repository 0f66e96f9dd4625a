# SPDX-License-Identifier: Apache-2.0
"""Row files: a row store on a disk, larger than memory and safe to the last commit; see docs/formats.md."""

from __future__ import annotations

import errno
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from terarec.closer import Closer, stream
from terarec.errors import DamagedFileError, NoSpaceError, StorageError
from terarec.io.directories import atomic_dir
from terarec.io.locks import file_lock
from terarec.io.opening import allow_open_files
from terarec.kernels.cpu import _rowfile
from terarec.memory.row_format import (
    RowColumn,
    RowFileLayout,
    RowFileOptions,
    page_bytes_of,
    read_description,
    write_description,
)
from terarec.memory.row_store import (
    KEY_BYTES,
    SCAN_ROWS,
    check_chunk_rows,
    check_keys,
    check_row_bytes,
    check_rows,
)

_LOCK_FILE = "lock"
MANIFEST_FILE = "manifest"
SEGMENT_SUFFIX = ".rows"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SEGMENT_BYTES = 64 * 2**20
"""Bytes of a segment unless given: opening reads one footer, and compaction moves one segment, at a time."""


class PageReader:
    """Rings of io_uring, or threads, that read pages. Row files may share one, and are then read together.

    Each thread that reads has buffers for 128 runs of ``options.run_bytes``, for any number of files.

    Attributes:
        uses_uring: Whether reads take io_uring.

    Args:
        options: How files are read.
        row_bytes: Maximum bytes of a row.

    Raises:
        StorageError: io_uring is required, and the system does not let the process use it.
    """

    def __init__(self, options: RowFileOptions, row_bytes: int) -> None:
        # A run has at least one page, and a page of large rows is larger than a run.
        most_bytes = max(options.run_bytes, page_bytes_of(row_bytes))
        with _errors(""):
            self.native = _rowfile.PageFetcher(options.io, options.io_threads, options.direct, most_bytes)
        self.uses_uring = self.native.uses_uring()
        # Its end joins the threads that read, so a finalizer must not hold the last reference.
        self._closer = Closer(self, [self.native].clear, at_exit=False)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers."""
        return self.native.memory_bytes()


class RowFile:
    """A row store in a directory: pages appended to segments, an index of at most 16 bytes a row in memory.

    One process, and one object in it, may have a directory open for writing; any number may have it open for reading,
    at the last commit that they have seen. Use `create` and `open`.
    """

    def __init__(
        self, directory: Path, layout: RowFileLayout, native: _rowfile.RowFile, reader: PageReader, lock: ExitStack
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._native = native
        self._reader = reader
        self._closer = Closer(self, partial(_close, native, lock))

    @classmethod
    def create(
        cls,
        directory: Path,
        row_bytes: int,
        *,
        table: str = "",
        columns: tuple[RowColumn, ...] = (),
        segment_bytes: int = SEGMENT_BYTES,
        options: RowFileOptions | None = None,
        reader: PageReader | None = None,
    ) -> Self:
        """Create an empty row file and open it for writing.

        Args:
            directory: Directory to create; it must not exist, or be empty.
            row_bytes: Bytes of a row, 16 to 4,096.
            table: Name of the table.
            columns: Parts of a row.
            segment_bytes: Bytes of a segment; 40 bits of an index entry bound the segments to 2^40 rows together.
            options: How it is read and written.
            reader: Reader of its pages, made with the same options; None for one of its own.

        Raises:
            ConfigError: `directory` holds files, or sizes are out of range.
            StorageError: The disk is full or cannot be written.
        """
        page_bytes = page_bytes_of(check_row_bytes(row_bytes))
        layout = RowFileLayout(
            table=table,
            row_bytes=row_bytes,
            columns=columns,
            page_bytes=page_bytes,
            segment_pages=max(1, segment_bytes // page_bytes),
        )
        with atomic_dir(directory) as partial, _errors(table):
            write_description(partial, layout)
            # With an empty manifest, so that a directory that has got its name can always be opened.
            _rowfile.create(str(partial))
        return cls.open(directory, options=options, reader=reader)

    @classmethod
    def clone(
        cls,
        source: Path,
        directory: Path,
        *,
        options: RowFileOptions | None = None,
        reader: PageReader | None = None,
    ) -> Self:
        """Create a row file with the rows of the last commit of another, and open it for writing.

        Segments are hard links where the file system allows, else copies.

        Args:
            source: Directory that no process has open for writing.
            directory: Directory to create; it must not exist, or be empty.
            options: How it is read and written.
            reader: See `create`.

        Raises:
            ConfigError: `directory` holds files.
            FormatError: `source` is not a row file, or one of another version.
            StorageError: `source` is damaged, or the disk is full or cannot be written.
        """
        layout = read_description(source)
        with atomic_dir(directory) as partial, _errors(layout.table):
            write_description(partial, layout)
            _rowfile.clone(str(source), str(partial), _native_layout(layout))
        return cls.open(directory, options=options, reader=reader)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        read_only: bool = False,
        options: RowFileOptions | None = None,
        reader: PageReader | None = None,
    ) -> Self:
        """Open a row file at its last commit; later data are discarded.

        Args:
            directory: Directory that `create` or `snapshot` made.
            read_only: Whether to open it for reading alone; a writer neither waits nor is waited for.
            options: How it is read and written.
            reader: See `create`.

        Raises:
            FormatError: No row file, or one of another version.
            StorageError: It is open for writing already, or damaged; `DamagedFileError` names the file.
        """
        layout, options = read_description(directory), options or RowFileOptions()
        allow_open_files(2 * options.open_files)
        reader = reader or PageReader(options, layout.row_bytes)
        # The lock is released if opening fails, and is kept until `close` otherwise (`pop_all`).
        with ExitStack() as lock:
            if not (read_only or lock.enter_context(file_lock(directory / _LOCK_FILE))):
                raise StorageError(directory, "is open for writing already, expected one writer at a time")
            with _errors(layout.table):
                native = _rowfile.RowFile(
                    str(directory),
                    _native_layout(layout),
                    reader.native,
                    read_only=read_only,
                    direct=options.direct,
                    queue_bytes=options.queue_bytes,
                    open_files=options.open_files,
                    space_ratio=float(options.space_ratio),
                    is_working=options.is_working,
                )
            return cls(directory, layout, native, reader, lock.pop_all())

    @property
    def directory(self) -> Path:
        """Directory of the files."""
        return self._directory

    @property
    def layout(self) -> RowFileLayout:
        """Description of the file."""
        return self._layout

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._layout.row_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of all segments and the manifest, including segments that the next commit will remove."""
        with self._errors():
            return self._native.file_bytes()

    @property
    def live_bytes(self) -> int:
        """Bytes of all rows held and their keys."""
        return len(self) * (self.row_bytes + KEY_BYTES)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index and of all buffers, its reader's included; the system's page cache is not counted."""
        return self.own_memory_bytes + self._reader.memory_bytes

    @property
    def own_memory_bytes(self) -> int:
        """Bytes of the index and of buffers of writers."""
        with self._errors():
            return self._native.memory_bytes()

    @property
    def index_bytes(self) -> int:
        """Bytes of the index alone."""
        with self._errors():
            return self._native.index_bytes()

    @property
    def written_bytes(self) -> int:
        """Bytes that went to segments since the file was opened, by writers and by compaction."""
        return self._native.written_bytes()

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        with self._errors():
            return self._native.num_segments()

    @property
    def uses_uring(self) -> bool:
        """Whether reads take io_uring."""
        return self._reader.uses_uring

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the last commit."""
        metadata: dict[str, str] = json.loads(self._native.metadata())
        return metadata

    @property
    def last_commit(self) -> int:
        """Number of the last commit; 0 before the first."""
        return self._native.last_commit()

    def __len__(self) -> int:
        """Return the number of rows held."""
        with self._errors():
            return self._native.size()

    def read(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy rows to ``out``; see `RowStore.read`. Pages are read in the order of the files, many at a time.

        Raises:
            DamagedFileError: A page is not what was written; its rows in ``out`` are unspecified.
        """
        return read_files([self], keys, [len(keys)], out)

    def write(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Set rows; see `RowStore.write`. They go to the disk in the background.

        Raises:
            NoSpaceError: The disk is full. The store goes on where it was once there is room.
        """
        keys = check_keys(keys)
        check_rows(rows, len(keys), self.row_bytes)
        with self._errors():
            self._native.write(keys, rows if rows.strides[1] == 1 else np.ascontiguousarray(rows))

    def erase(self, keys: NDArray[np.int64]) -> None:
        """Remove rows; see `RowStore.erase`."""
        keys = check_keys(keys)
        with self._errors():
            self._native.erase(keys)

    def commit(self, metadata: Mapping[str, str] | None = None) -> int:
        """Make all changes durable; see `RowStore.commit`. Files that only the commit before needed are removed."""
        text = json.dumps(dict(metadata or {}))
        with self._errors():
            return self._native.commit(text)

    @stream
    def items(self, chunk_rows: int = SCAN_ROWS) -> Generator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield all rows, reading the files from front to back; see `RowStore.items`. Compaction is paused."""
        check_chunk_rows(chunk_rows)
        with self._errors():
            scan = _rowfile.Scan(self._native)
        try:
            while True:
                # New arrays for each chunk: the caller may keep those of the last one.
                keys = np.empty(chunk_rows, dtype=np.int64)
                rows = np.empty((chunk_rows, self.row_bytes), dtype=np.uint8)
                with self._errors():
                    count = scan.next(keys, rows)
                if count == 0:
                    return
                yield keys[:count], rows[:count]
        finally:
            del scan  # an error's traceback would keep it, and compaction waiting

    def snapshot(self, directory: Path) -> None:
        """Write the last commit as a row file of its own; see `RowStore.snapshot`.

        Segments that no longer change are hard links where the file system allows, else copies.
        """
        with atomic_dir(directory) as partial, self._errors():
            write_description(partial, self._layout)
            self._native.snapshot(str(partial))

    def seal(self) -> None:
        """End the segments that take rows: after the next commit, `snapshot` links all segments and copies none.

        Raises:
            StorageError: As `write`.
        """
        with self._errors():
            self._native.seal()

    def compact(self) -> None:
        """Move the live rows of all segments that are at least a sixteenth free; the next commit removes their files.

        Raises:
            StorageError: A scan is under way, or as `write`.
        """
        with self._errors():
            self._native.compact()

    def refresh(self) -> bool:
        """Read the writer's newest commit, if opened for reading only; return whether there was a new one."""
        with self._errors():
            return self._native.refresh()

    def close(self) -> None:
        """Close all files; changes that were not committed are lost."""
        self._closer()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with _errors(self._layout.table):
            yield


def read_files(
    files: Sequence[RowFile], keys: NDArray[np.int64], ends: Sequence[int], out: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    """Copy rows of several files to ``out``; see `RowStore.read`. Their pages are read together.

    Args:
        files: Files with rows of one size and the same reader.
        keys: int64[n]: those of file i begin at ``ends[i - 1]`` and end before ``ends[i]``.
        ends: As above, rising; the last is n.
        out: uint8[n, row_bytes].

    Returns:
        Which rows there are, bool[n].

    Raises:
        DamagedFileError: A page is not what was written; rows in ``out`` are unspecified.
    """
    keys = check_keys(keys)
    check_rows(out, len(keys), files[0].row_bytes, "out")
    is_there = np.empty(len(keys), dtype=np.bool_)
    # Rows may lie apart, as parts of wider ones, but the core writes the bytes of a row in one piece.
    target = out if out.strides[1] == 1 else np.ascontiguousarray(out)
    natives = [file._native for file in files]
    try:
        _rowfile.read(natives, keys, list(ends), target, is_there)
    except _rowfile.Error as error:
        message, path, page, *code = error.args
        # The core names a path; the file of that directory knows its table.
        tables = [file.layout.table for file in files if len(files) == 1 or file.directory == Path(path).parent]
        raise _storage_error(tables[0] if tables else "", message, path, page, *code) from None
    if target is not out:
        out[:] = target
    return is_there


def _close(native: _rowfile.RowFile, lock: ExitStack) -> None:
    native.close()
    # The lock last: the next writer must not open files that this one is still closing.
    lock.close()


def _native_layout(layout: RowFileLayout) -> _rowfile.Layout:
    return _rowfile.Layout(layout.row_bytes, layout.page_bytes, layout.segment_pages)


@contextmanager
def _errors(table: str) -> Iterator[None]:
    """Turn errors of the core into `StorageError` and `DamagedFileError`."""
    try:
        yield
    except _rowfile.Error as error:
        raise _storage_error(table, *error.args) from None


def _storage_error(table: str, message: str, file: str, page: int, code: int = 0) -> StorageError:
    where = f"table {table!r}" if table else ""
    if not file:
        return (NoSpaceError if code in _NO_SPACE else StorageError)(where, message)
    return DamagedFileError(where, message, file=Path(file), page=None if page < 0 else page, table=table)
