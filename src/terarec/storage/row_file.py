"""Row files: a row store on a disk, larger than memory and safe to the last commit; see docs/formats.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, DamagedFileError, FormatError, StorageError
from terarec.io import atomic_dir, file_lock, read_versioned_json, write_versioned_json
from terarec.kernels.cpu import _rowfile
from terarec.spec import FieldError
from terarec.storage.row_store import (
    KEY_BYTES,
    SCAN_ROWS,
    check_chunk_rows,
    check_keys,
    check_row_bytes,
    check_rows,
)

DESCRIPTION_FILE = "row_file.json"
FORMAT = "terarec.row_file"
VERSION = 1
LOCK_FILE = "lock"
MANIFEST_FILE = "manifest"
SEGMENT_SUFFIX = ".rows"
SEGMENT_BYTES = 64 * 2**20
"""Bytes of a segment unless given: opening reads one footer, and compaction moves one segment, at a time."""
_BLOCK_BYTES = 4096
_PAGE_HEADER_BYTES = 32
_MOST_PAGE_BYTES = 64 * 1024
_LEAST_PAGE_USE = 0.85
_LEAST_SPACE_RATIO = 1.4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumn:
    """A part of a row: columns follow each other from the row's first byte on.

    Attributes:
        name: What it is, such as "weights" or "state.exp_avg".
        dtype: NumPy's name of its element type, such as "float32"; "bfloat16" has 2 bytes.
        shape: Its shape in one row; empty for one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the column in a row.

        Raises:
            ConfigError: NumPy has no such element type.
        """
        try:
            item_bytes = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        except TypeError:
            raise FieldError(
                "", "columns", f"got dtype {self.dtype!r} of {self.name!r}, expected one of NumPy"
            ) from None
        return item_bytes * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFileLayout:
    """Description of a row file: all that a reader needs to know of its rows.

    Attributes:
        table: Name of the table, for errors and tools.
        row_bytes: Bytes of a row.
        columns: Parts of a row; bytes that they leave at its end are not used. Empty: nothing is known of them.
        page_bytes: Bytes of a page, the unit of reading and of checksums: 4,096 times a power of two.
        segment_pages: Most pages of a segment.

    Raises:
        ConfigError: Rows, columns, pages or segments of impossible sizes.
    """

    table: str
    row_bytes: int
    columns: tuple[RowColumn, ...]
    page_bytes: int
    segment_pages: int

    def __post_init__(self) -> None:
        check_row_bytes(self.row_bytes)
        if (used := sum(column.num_bytes for column in self.columns)) > self.row_bytes:
            raise FieldError("", "columns", f"got {used} bytes, expected {self.row_bytes} or less, those of a row")
        sizes = [_BLOCK_BYTES << shift for shift in range(5)]
        if self.page_bytes not in sizes or self.page_bytes < self.row_bytes + KEY_BYTES + _PAGE_HEADER_BYTES:
            raise FieldError("", "page_bytes", f"got {self.page_bytes}, expected one of {sizes} that holds a row")
        if not 1 <= self.segment_pages < 2**32:
            raise FieldError("", "segment_pages", f"got {self.segment_pages}, expected 1 to {2**32 - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFileOptions:
    """Options of reading and writing a row file, which are not stored.

    Attributes:
        io: "io_uring", "threads" that call pread, or "auto" for the first where the kernel lets the process use it.
        io_threads: Threads that read, where io_uring does not.
        direct: Whether pages bypass the system's page cache (O_DIRECT).
        queue_bytes: Bytes of filled pages that wait for the disk at most.
        run_bytes: Bytes of pages side by side that are read at once at most; each thread that reads has buffers for 128
            such runs.
        open_files: Most files that stay open.
        space_ratio: Compaction in the background keeps files below this multiple of live bytes, and 1 MiB; 0 for
            none in the background.
        is_working: Whether the files are working memory, of which nothing is to outlive the process: those that
            compaction has emptied are removed at once, though the last commit lists them.

    Raises:
        ConfigError: A value out of range.
    """

    io: Literal["auto", "io_uring", "threads"] = "auto"
    io_threads: int = 16
    direct: bool = False
    queue_bytes: int = 16 * 2**20
    run_bytes: int = 32 * 2**10
    open_files: int = 512
    space_ratio: float = 1.5
    is_working: bool = False

    def __post_init__(self) -> None:
        if self.io not in ("auto", "io_uring", "threads"):
            raise FieldError("", "io", f"got {self.io!r}, expected 'auto', 'io_uring' or 'threads'")
        for name, least in (("io_threads", 1), ("queue_bytes", 1), ("run_bytes", 4096), ("open_files", 8)):
            if (value := getattr(self, name)) < least:
                raise FieldError("", name, f"got {value}, expected {least} or more")
        if self.space_ratio != 0 and not self.space_ratio >= _LEAST_SPACE_RATIO:
            raise FieldError("", "space_ratio", f"got {self.space_ratio}, expected 0, or {_LEAST_SPACE_RATIO} or more")


class RowFile:
    """A row store in a directory: pages appended to segments, an index of at most 16 bytes a row in memory.

    One process, and one object in it, may have a directory open for writing; any number may have it open for reading,
    at the last commit that they have seen. Use `create` and `open`.
    """

    def __init__(self, directory: Path, layout: RowFileLayout, native: _rowfile.RowFile, held: ExitStack) -> None:
        self._directory = directory
        self._layout = layout
        self._native = native
        self._held = held

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
    ) -> Self:
        """Create an empty row file and open it for writing.

        Args:
            directory: Directory to create; it must not exist, or be empty.
            row_bytes: Bytes of a row, 16 to 4,096.
            table: Name of the table.
            columns: Parts of a row.
            segment_bytes: Bytes of a segment; 40 bits of an index entry bound the segments to 2^40 rows together.
            options: How it is read and written.

        Raises:
            ConfigError: `directory` holds files, or sizes are out of range.
            StorageError: The disk is full or cannot be written.
        """
        page_bytes = _page_bytes(check_row_bytes(row_bytes))
        layout = RowFileLayout(
            table=table,
            row_bytes=row_bytes,
            columns=columns,
            page_bytes=page_bytes,
            segment_pages=max(1, segment_bytes // page_bytes),
        )
        with atomic_dir(directory) as partial, _errors(table):
            content = asdict(layout)
            write_versioned_json(partial / DESCRIPTION_FILE, FORMAT, VERSION, content)
            _rowfile.create(str(partial))
        return cls.open(directory, options=options)

    @classmethod
    def clone(cls, source: Path, directory: Path, *, options: RowFileOptions | None = None) -> Self:
        """Create a row file with the rows of the last commit of another, and open it for writing.

        Segments are hard links where the file system allows, else copies.

        Args:
            source: Directory that no process has open for writing.
            directory: Directory to create; it must not exist, or be empty.
            options: How it is read and written.

        Raises:
            ConfigError: `directory` holds files.
            FormatError: `source` is no row file, or one of a newer version.
            StorageError: `source` is damaged, or the disk is full or cannot be written.
        """
        layout = read_description(source)
        with atomic_dir(directory) as partial, _errors(layout.table):
            write_versioned_json(partial / DESCRIPTION_FILE, FORMAT, VERSION, asdict(layout))
            _rowfile.clone(str(source), str(partial), _native_layout(layout))
        return cls.open(directory, options=options)

    @classmethod
    def open(cls, directory: Path, *, read_only: bool = False, options: RowFileOptions | None = None) -> Self:
        """Open a row file at its last commit; what came after it is discarded.

        Args:
            directory: Directory that `create` or `snapshot` made.
            read_only: Whether to open it beside a writer, which is not waited for and does not wait.
            options: How it is read and written.

        Raises:
            FormatError: No row file, or one of a newer version.
            StorageError: It is open for writing already, or damaged; `DamagedFileError` names the file.
        """
        layout, options = read_description(directory), options or RowFileOptions()
        with ExitStack() as held:
            if not read_only:
                busy = StorageError(directory, "is open for writing already, expected one writer at a time")
                held.enter_context(file_lock(directory / LOCK_FILE, busy))
            with _errors(layout.table):
                native = _rowfile.RowFile(
                    str(directory),
                    _native_layout(layout),
                    read_only=read_only,
                    direct=options.direct,
                    io=options.io,
                    io_threads=options.io_threads,
                    queue_bytes=options.queue_bytes,
                    run_bytes=options.run_bytes,
                    open_files=options.open_files,
                    space_ratio=float(options.space_ratio),
                    is_working=options.is_working,
                )
            return cls(directory, layout, native, held.pop_all())

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
        """Bytes of all segments and the manifest, those that the next commit will remove included."""
        with self._errors():
            return self._native.file_bytes()

    @property
    def live_bytes(self) -> int:
        """Bytes of all rows held and their keys."""
        return len(self) * (self.row_bytes + KEY_BYTES)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index and of all buffers; the system's page cache is not counted."""
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
        return self._native.uses_uring()

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the last commit."""
        found: dict[str, str] = json.loads(self._native.metadata())
        return found

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
        keys = check_keys(keys)
        check_rows(out, len(keys), self.row_bytes, "out")
        found = np.empty(len(keys), dtype=np.bool_)
        target = out if out.strides[1] == 1 else np.ascontiguousarray(out)
        with self._errors():
            self._native.read(keys, target, found)
        if target is not out:
            out[:] = target
        return found

    def write(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Set rows; see `RowStore.write`. They go to the disk in the background."""
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

    def items(self, chunk_rows: int = SCAN_ROWS) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield all rows, reading the files from front to back; see `RowStore.items`. Compaction rests meanwhile."""
        check_chunk_rows(chunk_rows)
        with self._errors():
            scan = _rowfile.Scan(self._native)
        try:
            while True:
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
            write_versioned_json(partial / DESCRIPTION_FILE, FORMAT, VERSION, asdict(self._layout))
            self._native.snapshot(str(partial))

    def seal(self) -> None:
        """End the segments that take rows: after the next commit, `snapshot` links all segments and copies none.

        Raises:
            StorageError: As `write`.
        """
        with self._errors():
            self._native.seal()

    def compact(self) -> None:
        """Move the live rows of all segments of which a sixteenth or more is free; their files go at the next commit.

        Raises:
            StorageError: A scan is under way, or as `write`.
        """
        with self._errors():
            self._native.compact()

    def refresh(self) -> bool:
        """Move on to the writer's newest commit, if opened for reading only; return whether there was one.

        Raises:
            StorageError: It was opened for writing, or is damaged.
        """
        with self._errors():
            return self._native.refresh()

    def close(self) -> None:
        """Close all files; what was not committed is lost."""
        self._native.close()
        self._held.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with _errors(self._layout.table):
            yield


def read_description(directory: Path) -> RowFileLayout:
    """Return the layout of a row file.

    Raises:
        FormatError: No row file, a newer version, or a description that makes no sense.
    """
    path = directory / DESCRIPTION_FILE
    content = read_versioned_json(path, FORMAT, VERSION)
    try:
        columns = tuple(
            RowColumn(name=str(column["name"]), dtype=str(column["dtype"]), shape=tuple(map(int, column["shape"])))
            for column in content["columns"]
        )
        sizes = {name: int(content[name]) for name in ("row_bytes", "page_bytes", "segment_pages")}
        return RowFileLayout(table=str(content["table"]), columns=columns, **sizes)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise FormatError(path, f"{error}, expected the layout of a row file") from error


def _native_layout(layout: RowFileLayout) -> _rowfile.Layout:
    return _rowfile.Layout(layout.row_bytes, layout.page_bytes, layout.segment_pages)


def _page_bytes(row_bytes: int) -> int:
    """Return the smallest page of which rows use 85 %, for a row read takes a page; else the largest."""
    page_bytes = _BLOCK_BYTES
    while page_bytes < _MOST_PAGE_BYTES:
        slot_bytes = row_bytes + KEY_BYTES
        if (page_bytes - _PAGE_HEADER_BYTES) // slot_bytes * slot_bytes >= _LEAST_PAGE_USE * page_bytes:
            break
        page_bytes *= 2
    return page_bytes


@contextmanager
def _errors(table: str) -> Iterator[None]:
    """Turn errors of the core into `StorageError` and `DamagedFileError`."""
    try:
        yield
    except _rowfile.Error as error:
        raise _storage_error(table, *error.args) from None


def _storage_error(table: str, message: str, file: str, page: int) -> StorageError:
    where = f"table {table!r}" if table else ""
    if not file:
        return StorageError(where, message)
    return DamagedFileError(where, message, file=Path(file), page=None if page < 0 else page, table=table)
