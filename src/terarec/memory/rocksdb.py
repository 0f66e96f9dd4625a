# SPDX-License-Identifier: Apache-2.0
"""RocksDB as a row store, for comparison with row files; it needs the extra ``rocksdb``."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from terarec.closer import Closer
from terarec.errors import FormatError, MissingDependencyError, StorageError
from terarec.io.directories import atomic_dir, check_replaceable
from terarec.memory.row_store import (
    KEY_BYTES,
    SCAN_ROWS,
    check_chunk_rows,
    check_keys,
    check_row_bytes,
    check_rows,
)

_HEADER = b"terarec.row_store"  # longer than a key
_CONFIG_FILE = "rocksdict-config.json"


class RocksDBStore:
    """Rows in a RocksDB database. Changes wait in memory for the commit, which writes them in one synchronous batch.

    It behaves like a row file, but needs memory for all changes of a commit.

    Args:
        directory: Directory of the database.
        row_bytes: Bytes of a row, to create a database; None to open one.
        read_only: Whether to open one for reading alone, at its last commit: another process may write it.

    Raises:
        ConfigError: Rows of fewer or more bytes than a row store takes, or a directory of others.
        FormatError: A database that no row store made.
        MissingDependencyError: ``rocksdict`` is not installed.
        StorageError: The database cannot be opened.
    """

    def __init__(self, directory: Path, row_bytes: int | None = None, *, read_only: bool = False) -> None:
        if row_bytes is not None:
            check_row_bytes(row_bytes)
            check_replaceable(directory)
            directory.mkdir(parents=True, exist_ok=True)
        self._library = _library()
        self._directory = directory
        self._lock = threading.RLock()
        self._pending: dict[int, bytes | None] = {}
        self._changes = 0
        self._is_closed = False
        self._committed_rows: int | None = None
        self._links = tempfile.TemporaryDirectory(prefix="terarec-") if read_only else None
        self._database = self._open(is_new=row_bytes is not None)
        self._closer = Closer(self, partial(_close, self._database, directory, self._links))
        if row_bytes is not None:
            self._write_header({"row_bytes": row_bytes, "commit": 0, "metadata": {}}, ())
        self._header = self._read_header()

    @classmethod
    def open(cls, directory: Path, *, read_only: bool = False) -> Self:
        """Open a database at its last commit; see the class."""
        return cls(directory, read_only=read_only)

    def _open(self, *, is_new: bool) -> Any:
        options = self._library.Options(raw_mode=True)
        options.create_if_missing(is_new)
        with self._errors("open it"):
            if self._links is None:
                return self._library.Rdict(str(self._directory), options)
            # The library writes a file of its own into the directory that it opens, also to read alone.
            for path in self._directory.iterdir():
                if path.name != _CONFIG_FILE and not path.name.startswith("LO"):  # LOCK and LOG
                    Path(self._links.name, path.name).symlink_to(path.absolute())
            return self._library.Rdict(self._links.name, options, access_type=self._library.AccessType.read_only())

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the library has no class of its own for errors
            raise StorageError(self._directory, f"RocksDB cannot {what} ({error})") from error

    def _read_header(self) -> dict[str, Any]:
        with self._errors("read"):
            text = self._database.get(_HEADER)
        if text is None:
            raise FormatError(self._directory, "got another RocksDB database, expected one of a row store")
        header: dict[str, Any] = json.loads(text)
        return header

    def _check_writable(self) -> None:
        if self._links is not None:
            raise StorageError(self._directory, "is open for reading alone, expected a writable store")

    def _write_header(self, header: dict[str, Any], changes: Sequence[tuple[int, bytes | None]]) -> None:
        batch = self._library.WriteBatch(raw_mode=True)
        for key, row in changes:
            if row is None:
                batch.delete(_encoded(key))
            else:
                batch.put(_encoded(key), row)
        batch.put(_HEADER, json.dumps(header).encode())
        # One batch is written whole or not at all, so a header always fits the rows.
        # Without `sync` a write returns before RocksDB's log is on the disk.
        durable = self._library.WriteOptions()
        durable.sync = True
        with self._errors("write"):
            self._database.write(batch, durable)
        self._header = header

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self._header["row_bytes"])

    @property
    def file_bytes(self) -> int:
        """Bytes of all files of the database."""
        return sum(path.stat().st_size for path in self._directory.iterdir())

    @property
    def memory_bytes(self) -> int:
        """Bytes of tables in memory, of table readers, and of changes that wait for a commit."""
        waiting = len(self._pending) * (self.row_bytes + KEY_BYTES)
        names = ("rocksdb.cur-size-all-mem-tables", "rocksdb.estimate-table-readers-mem", "rocksdb.block-cache-usage")
        return waiting + sum(int(self._database.property_int_value(name) or 0) for name in names)

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the last commit."""
        return dict(self._header["metadata"])

    @property
    def last_commit(self) -> int:
        """Number of the last commit; 0 before the first."""
        return int(self._header["commit"])

    def __len__(self) -> int:
        """Return the number of rows held; after a commit the first call counts them one by one."""
        with self._lock:
            if self._committed_rows is None:
                # The header is among the rows, under a key of another length.
                with self._errors("read"):
                    names = self._database.keys()
                    self._committed_rows = sum(1 for key in names if len(key) == KEY_BYTES)
            values = self._committed_values(list(self._pending))
            gone = sum(1 for old, new in zip(values, self._pending.values(), strict=True) if old and new is None)
            new = sum(1 for old, new in zip(values, self._pending.values(), strict=True) if not old and new is not None)
            return self._committed_rows + new - gone

    def _committed_values(self, keys: list[int]) -> list[bytes | None]:
        with self._errors("read"):
            values: list[bytes | None] = self._database.get([_encoded(key) for key in keys]) if keys else []
            return values

    def read(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy rows to ``out``; see `RowStore.read`."""
        check_rows(out, len(check_keys(keys)), self.row_bytes, "out")
        is_there = np.zeros(len(keys), dtype=np.bool_)
        with self._lock:
            listed = keys.tolist()
            rows = self._committed_values(listed)
            if self._pending:
                # An erased key is pending as None, which takes the place of its row.
                rows = [self._pending.get(key, row) for key, row in zip(listed, rows, strict=True)]
        for index, row in enumerate(rows):
            if row is not None:
                out[index] = np.frombuffer(row, dtype=np.uint8)
                is_there[index] = True
        return is_there

    def write(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Set rows; see `RowStore.write`."""
        check_rows(rows, len(check_keys(keys)), self.row_bytes)
        self._check_writable()
        with self._lock:
            self._changes += 1
            for key, row in zip(keys.tolist(), rows, strict=True):
                self._pending[key] = row.tobytes()

    def erase(self, keys: NDArray[np.int64]) -> None:
        """Remove rows; see `RowStore.erase`."""
        self._check_writable()
        with self._lock:
            self._changes += 1
            self._pending |= dict.fromkeys(check_keys(keys).tolist())

    def commit(self, metadata: Mapping[str, str] | None = None) -> int:
        """Make all changes durable; see `RowStore.commit`."""
        self._check_writable()
        with self._lock:
            header = {**self._header, "commit": self.last_commit + 1, "metadata": dict(metadata or {})}
            self._write_header(header, list(self._pending.items()))
            # Only now: if the write fails, the changes wait for the next commit.
            self._pending = {}
            self._committed_rows = None
            return self.last_commit

    def items(self, chunk_rows: int = SCAN_ROWS) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield all rows; see `RowStore.items`."""
        check_chunk_rows(chunk_rows)
        changes, chunk = self._changes, []
        for item in self._all_items(chunk_rows):
            chunk.append(item)
            if len(chunk) == chunk_rows:
                yield _arrays(chunk, self.row_bytes)
                chunk = []
            if self._changes != changes:
                raise StorageError("items", "the store was changed during the scan, expected no writes before its end")
        if chunk:
            yield _arrays(chunk, self.row_bytes)

    def _all_items(self, at_once: int) -> Iterator[tuple[int, bytes]]:
        with self._errors("read"):
            items = self._database.items()
            some = list(islice(items, at_once))
        while some:
            for encoded, row in some:
                if len(encoded) == KEY_BYTES:
                    key = int.from_bytes(encoded, "little", signed=True)
                    if key not in self._pending:
                        yield key, row
            with self._errors("read"):
                some = list(islice(items, at_once))
        for key, waiting in list(self._pending.items()):
            if waiting is not None:
                yield key, waiting

    def snapshot(self, directory: Path) -> None:
        """Write the last commit as a database of its own, by hard links; see `RowStore.snapshot`."""
        self._check_writable()  # one that is read alone is behind links, to which the others would lead
        with atomic_dir(directory) as partial, self._lock:
            partial.rmdir()  # which RocksDB makes itself
            with self._errors("copy it"):
                self._library.Checkpoint(self._database).create_checkpoint(str(partial))

    def close(self) -> None:
        """Close the database; changes that were not committed are lost."""
        with self._lock:
            self._pending = {}
            if not self._is_closed:
                self._is_closed = True
                self._closer()


def _close(database: Any, directory: Path, links: tempfile.TemporaryDirectory[str] | None) -> None:
    try:
        database.close()
        if links is not None:
            links.cleanup()
    except Exception:  # the library has no class of its own for errors
        if directory.exists():  # else somebody has removed it, with all rows
            raise


def _library() -> Any:
    try:
        import rocksdict
    except ImportError:
        raise MissingDependencyError("rocksdict", "not installed, expected pip install 'terarec[rocksdb]'") from None
    return rocksdict


def _encoded(key: int) -> bytes:
    return key.to_bytes(KEY_BYTES, "little", signed=True)


def _arrays(items: Sequence[tuple[int, bytes]], row_bytes: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    keys = np.array([key for key, _ in items], dtype=np.int64)
    joined = np.frombuffer(b"".join(row for _, row in items), dtype=np.uint8)
    return keys, joined.reshape(len(items), row_bytes).copy()
