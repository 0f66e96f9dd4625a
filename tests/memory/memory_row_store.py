# SPDX-License-Identifier: Apache-2.0
"""The reference of all row stores: rows in a dictionary."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError, StorageError
from terarec.formats.container import read_tensors, write_tensors
from terarec.io.directories import atomic_dir
from terarec.memory.row_store import KEY_BYTES, SCAN_ROWS, check_chunk_rows, check_keys, check_row_bytes, check_rows

_MEMORY_FILE = "rows.safetensors"


class MemoryRowStore:
    """Rows in a dictionary. A commit copies the dictionary, but no row.

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
        return self._row_bytes

    @property
    def file_bytes(self) -> int:
        return 0

    @property
    def memory_bytes(self) -> int:
        return len(self) * (self._row_bytes + KEY_BYTES)

    @property
    def metadata(self) -> Mapping[str, str]:
        return dict(self._metadata)

    @property
    def last_commit(self) -> int:
        return self._last_commit

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
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
        check_rows(rows, len(check_keys(keys)), self._row_bytes)
        with self._lock:
            self._changes += 1
            for key, row in zip(keys.tolist(), rows, strict=True):
                self._rows[key] = row.tobytes()

    def erase(self, keys: NDArray[np.int64]) -> None:
        with self._lock:
            self._changes += 1
            for key in check_keys(keys).tolist():
                self._rows.pop(key, None)

    def commit(self, metadata: Mapping[str, str] | None = None) -> int:
        with self._lock:
            self._committed = dict(self._rows)
            self._metadata = dict(metadata or {})
            self._last_commit += 1
            return self._last_commit

    def items(self, chunk_rows: int = SCAN_ROWS) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        check_chunk_rows(chunk_rows)
        with self._lock:
            # A list of references, so that the scan needs no lock; a write is found by its number and ends the scan.
            held, changes = iter(list(self._rows.items())), self._changes
        while chunk := list(islice(held, chunk_rows)):
            if self._changes != changes:
                raise StorageError("items", "the store was changed during the scan, expected no writes before its end")
            yield _arrays(dict(chunk), self._row_bytes)

    def snapshot(self, directory: Path) -> None:
        with self._lock:
            keys, rows = _arrays(self._committed, self._row_bytes)
            header = {"commit": str(self._last_commit), "metadata": json.dumps(self._metadata)}
        with atomic_dir(directory) as partial:
            write_tensors(partial / _MEMORY_FILE, {"keys": keys, "rows": rows}, header)

    def close(self) -> None:
        with self._lock:
            self._rows, self._committed = {}, {}


def _arrays(rows: Mapping[int, bytes], row_bytes: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return keys int64[n] and rows uint8[n, row_bytes] of a dictionary."""
    # Copied, since an array over bytes is read-only.
    joined = np.frombuffer(b"".join(rows.values()), dtype=np.uint8).reshape(len(rows), row_bytes)
    return np.fromiter(rows, dtype=np.int64, count=len(rows)), joined.copy()
