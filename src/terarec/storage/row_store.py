"""The row store protocol: rows of bytes by key, durable at commits; and its plain implementation in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError, StorageError
from terarec.formats import read_tensors, write_tensors
from terarec.io import atomic_dir

LEAST_ROW_BYTES = 16
MOST_ROW_BYTES = 4096
KEY_BYTES = 8
SCAN_ROWS = 16_384
"""Rows of a chunk of `RowStore.items` unless given."""
_MEMORY_FILE = "rows.safetensors"


@runtime_checkable
class RowStore(Protocol):
    """Rows of `row_bytes` bytes by int64 key, such as the weights and the optimizer state of a table's row together.

    Any int64 is a key. Methods may be called by several threads: several readers and one writer run at once;
    writers wait for each other. What is written or erased is visible to all readers of this object at once, and
    durable after the next commit: a process that ends before leaves the store as it was at the last one.
    """

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, 16 to 4,096."""

    @property
    def file_bytes(self) -> int:
        """Bytes that the store's files take on the disk."""

    @property
    def live_bytes(self) -> int:
        """Bytes of all rows held and their keys."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that the store takes: its index and its buffers."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the last commit."""

    @property
    def last_commit(self) -> int:
        """Number of the last commit, from 1; 0 before the first."""

    def __len__(self) -> int:
        """Return the number of rows held."""

    def read(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy the rows of ``keys int64[n]``, which may repeat, to ``out uint8[n, row_bytes]``.

        Returns:
            Whether each key has a row, bool[n]. ``out`` stays as it is where it has none.

        Raises:
            StorageError: Arrays of another type or shape, or a file that is damaged or cannot be read.
        """

    def write(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Set the rows of ``keys int64[n]`` to ``rows uint8[n, row_bytes]``; the last one counts of a repeated key.

        Raises:
            StorageError: Arrays of another type or shape, or a disk that is full or cannot be written.
        """

    def erase(self, keys: NDArray[np.int64]) -> None:
        """Remove the rows of ``keys int64[n]``; keys without a row are passed over.

        Raises:
            StorageError: As `write`.
        """

    def commit(self, metadata: Mapping[str, str] | None = None) -> int:
        """Make all that was written and erased durable, with `metadata`, and return the commit's number.

        Raises:
            StorageError: As `write`; the store then stays at the commit before.
        """

    def items(self, chunk_rows: int = SCAN_ROWS) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield ``keys int64[m]`` and ``rows uint8[m, row_bytes]`` of all rows held, each once, in any order.

        Args:
            chunk_rows: Maximum number of rows m of a chunk; no chunk is empty.

        Raises:
            StorageError: The store was changed since the first chunk, or a file is damaged or cannot be read.
        """

    def snapshot(self, directory: Path) -> None:
        """Write the rows of the last commit to a new directory, which is complete or absent.

        Raises:
            ConfigError: The directory exists and is not empty.
            StorageError: The disk is full or cannot be written.
        """

    def close(self) -> None:
        """Release files and memory; changes that were not committed are lost. Closing twice is allowed."""


def check_row_bytes(row_bytes: int) -> int:
    """Return `row_bytes`, or raise `ConfigError` if rows cannot have this size."""
    if not LEAST_ROW_BYTES <= row_bytes <= MOST_ROW_BYTES:
        raise ConfigError("row_bytes", f"got {row_bytes}, expected {LEAST_ROW_BYTES} to {MOST_ROW_BYTES:,}")
    return row_bytes


def check_chunk_rows(chunk_rows: int) -> int:
    """Return `chunk_rows`, or raise `ConfigError` unless it is positive."""
    if chunk_rows < 1:
        raise ConfigError("chunk_rows", f"got {chunk_rows}, expected 1 or more")
    return chunk_rows


def check_keys(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``keys int64[n]`` in one piece, or raise `StorageError` for another array."""
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise StorageError("keys", f"got {keys.dtype}{list(keys.shape)}, expected int64[n]")
    return np.ascontiguousarray(keys)


def check_rows(rows: NDArray[np.uint8], num_keys: int, row_bytes: int, name: str = "rows") -> NDArray[np.uint8]:
    """Return ``rows uint8[n, row_bytes]``, or raise `StorageError` for an array of another type or shape."""
    if rows.shape != (num_keys, row_bytes) or rows.dtype != np.uint8:
        raise StorageError(name, f"got {rows.dtype}{list(rows.shape)}, expected uint8[{num_keys}, {row_bytes}]")
    return rows


class MemoryRowStore:
    """Rows in a dictionary: the reference of all row stores. A commit copies the dictionary, but no row.

    Args:
        row_bytes: Bytes of a row.

    Raises:
        ConfigError: Rows of fewer or more bytes than a row store takes.
    """

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = check_row_bytes(row_bytes)
        self._rows: dict[int, bytes] = {}
        self._committed: dict[int, bytes] = {}
        self._metadata: dict[str, str] = {}
        self._last_commit = 0
        self._changes = 0
        self._lock = threading.RLock()

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return a store with the content of a directory that `snapshot` wrote.

        Raises:
            FormatError: No such directory, or a damaged file.
        """
        tensors, header = read_tensors(directory / _MEMORY_FILE)
        keys, rows = tensors.get("keys"), tensors.get("rows")
        if keys is None or rows is None or rows.ndim != 2 or keys.shape != rows.shape[:1]:
            raise FormatError(directory / _MEMORY_FILE, f"got {sorted(tensors)}, expected keys [n] and rows [n, bytes]")
        store = cls(rows.shape[1])
        store.write(keys, rows)
        store._committed = dict(store._rows)
        store._metadata = json.loads(header["metadata"])
        store._last_commit = int(header["commit"])
        return store

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._row_bytes

    @property
    def file_bytes(self) -> int:
        """Always 0: it has no files."""
        return 0

    @property
    def live_bytes(self) -> int:
        """Bytes of all rows held and their keys."""
        return len(self) * (self._row_bytes + KEY_BYTES)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rows held and their keys, without Python's overhead per row."""
        return self.live_bytes

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of the last commit."""
        return dict(self._metadata)

    @property
    def last_commit(self) -> int:
        """Number of the last commit; 0 before the first."""
        return self._last_commit

    def __len__(self) -> int:
        """Return the number of rows held."""
        return len(self._rows)

    def read(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy rows to ``out``; see `RowStore.read`."""
        check_rows(out, len(check_keys(keys)), self._row_bytes, "out")
        found = np.zeros(len(keys), dtype=np.bool_)
        with self._lock:
            for index, key in enumerate(keys.tolist()):
                row = self._rows.get(key)
                if row is not None:
                    out[index] = np.frombuffer(row, dtype=np.uint8)
                    found[index] = True
        return found

    def write(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Set rows; see `RowStore.write`."""
        check_rows(rows, len(check_keys(keys)), self._row_bytes)
        with self._lock:
            self._changes += 1
            for key, row in zip(keys.tolist(), rows, strict=True):
                self._rows[key] = row.tobytes()

    def erase(self, keys: NDArray[np.int64]) -> None:
        """Remove rows; see `RowStore.erase`."""
        with self._lock:
            self._changes += 1
            for key in check_keys(keys).tolist():
                self._rows.pop(key, None)

    def commit(self, metadata: Mapping[str, str] | None = None) -> int:
        """Keep the present rows for `snapshot`; see `RowStore.commit`."""
        with self._lock:
            self._committed = dict(self._rows)
            self._metadata = dict(metadata or {})
            self._last_commit += 1
            return self._last_commit

    def items(self, chunk_rows: int = SCAN_ROWS) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield all rows; see `RowStore.items`."""
        check_chunk_rows(chunk_rows)
        with self._lock:
            # A list of references, so that the scan needs no lock; a write is found by its number and ends the scan.
            held, changes = iter(list(self._rows.items())), self._changes
        while chunk := list(islice(held, chunk_rows)):
            if self._changes != changes:
                raise StorageError("items", "the store was changed during the scan, expected no writes before its end")
            yield _arrays(dict(chunk), self._row_bytes)

    def snapshot(self, directory: Path) -> None:
        """Write the rows of the last commit as a tensor container; see `RowStore.snapshot`."""
        with self._lock:
            keys, rows = _arrays(self._committed, self._row_bytes)
            header = {"commit": str(self._last_commit), "metadata": json.dumps(self._metadata)}
        with atomic_dir(directory) as partial:
            write_tensors(partial / _MEMORY_FILE, {"keys": keys, "rows": rows}, header)

    def close(self) -> None:
        """Forget all rows."""
        with self._lock:
            self._rows, self._committed = {}, {}


def _arrays(rows: Mapping[int, bytes], row_bytes: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return keys int64[n] and rows uint8[n, row_bytes] of a dictionary."""
    # Copied, since an array over bytes is read-only.
    joined = np.frombuffer(b"".join(rows.values()), dtype=np.uint8).reshape(len(rows), row_bytes)
    return np.fromiter(rows, dtype=np.int64, count=len(rows)), joined.copy()
