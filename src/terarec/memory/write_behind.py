# SPDX-License-Identifier: Apache-2.0
"""`WrittenBehind`: a level whose rows are written by a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels.slots import RowBatch
from terarec.memory.level import FileLevel
from terarec.memory.row_store import RowStore


class WrittenBehind:
    """A level whose rows are written by a thread, one batch at a time.

    Changes are visible to all calls except `read_others`. What the level did not take, of the thread or of `erase`,
    the next call does again, since a full disk may have room by then; it raises if that fails, too.
    """

    def __init__(self, level: FileLevel) -> None:
        self.level = level
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="terarec-rows")
        self._writing: Future[None] | None = None
        # The changes that the level did not take, in their order, None for an erasure: what they set is nowhere else.
        # While there are any, no other change reaches the level.
        self._failed: list[tuple[RowBatch, Tensor | None]] = []
        # Guards both, but for the thread, which adds its batch before its call ends.
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory taken."""
        return self.level.memory_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of the level."""
        return self.level.index_bytes

    def wait(self) -> None:
        """Wait for the thread, and do again what failed."""
        with self._lock:
            writing = self._writing
        if writing is not None:
            with suppress(StorageError):  # its batch is among those that failed
                writing.result()
        with self._lock:
            while self._failed:
                batch, values = self._failed[0]
                if values is None:
                    self.level.erase(batch)
                else:
                    self.level.write(batch, values)
                del self._failed[0]

    def read(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Copy rows; see `Level.read`."""
        # The rows may be the ones that are being written.
        self.wait()
        return self.level.read(batch, out)

    def read_others(self, batch: RowBatch, out: Tensor) -> Tensor:
        """Read rows none of which is in the last batch that was written; see `Level.read`."""
        return self.level.read(batch, out)

    def write(self, batch: RowBatch, values: Tensor) -> None:
        """Begin to write rows, which the caller must not change; see `Level.write`."""
        # One batch at a time bounds the memory of rows on their way, and is where an error of the last write is raised.
        self.wait()
        with self._lock:
            self._writing = self._thread.submit(self._write, batch, values)

    def _write(self, batch: RowBatch, values: Tensor) -> None:
        try:
            self.level.write(batch, values)
        except StorageError:
            self._failed.append((batch, values))
            raise

    def erase(self, batch: RowBatch) -> None:
        """Remove rows; see `Level.erase`. It raises no `StorageError`, since a step that ends cannot be undone."""
        try:
            self.wait()
            self.level.erase(batch)
        except StorageError:
            with self._lock:
                self._failed.append((batch, None))

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all rows of a table; see `Level.items`."""
        self.wait()
        return self.level.items(table, chunk_rows)

    def count(self, table: int) -> int:
        """Return the number of rows of a table; see `Level.count`."""
        self.wait()
        return self.level.count(table)

    def clear(self, table: int) -> None:
        """Remove all rows of a table; see `Level.clear`."""
        self.wait()
        self.level.clear(table)

    def metadata(self, table: int) -> Mapping[str, str]:
        """Return what the last commit noted; see `Level.metadata`."""
        return self.level.metadata(table)

    def commit(self, metadata: Mapping[str, str] | None = None, table: int | None = None) -> None:
        """Make written rows durable; see `Level.commit`."""
        self.wait()
        self.level.commit(metadata, table)

    def refresh(self) -> bool:
        """Read the last commit of another process; see `Level.refresh`."""
        self.wait()
        return self.level.refresh()

    def snapshot(self, table: int, directory: Path) -> bool:
        """Write the rows of a table as a row file; see `FileLevel.snapshot`."""
        self.wait()
        return self.level.snapshot(table, directory)

    def take_over(self, table: int, store: RowStore) -> None:
        """Hold the rows of a store; see `FileLevel.take_over`."""
        self.wait()
        self.level.take_over(table, store)

    def stop(self) -> None:
        """Wait for the thread, ignoring its errors, and end it."""
        self._thread.shutdown()

    def close(self) -> None:
        """Release files and memory; see `Level.close`."""
        # Not `wait`, which would raise the error of a write that failed before and leave files open.
        self.stop()
        self.level.close()
