# SPDX-License-Identifier: Apache-2.0
"""The row store protocol: rows of bytes by key, durable at commits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, StorageError

LEAST_ROW_BYTES = 16
MOST_ROW_BYTES = 4096
KEY_BYTES = 8
SCAN_ROWS = 16_384
"""Rows of a chunk of `RowStore.items` unless given."""


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
