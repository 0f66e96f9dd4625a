# SPDX-License-Identifier: Apache-2.0
"""`TierFiles`: the working files of a file tier, a directory for each table."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from terarec.closer import wait_closed
from terarec.errors import ConfigError, StorageError
from terarec.io.locks import file_lock
from terarec.io.removal import remove_tree, work_directory
from terarec.memory.row_file import SEGMENT_BYTES, PageReader, RowFile
from terarec.memory.row_format import RowFileOptions, RowFormat, read_description
from terarec.memory.row_store import MOST_ROW_BYTES, RowStore
from terarec.memory.table_stores import TableStore, TableStores
from terarec.memory.write_behind import WrittenBehind

_SUFFIX = ".rows"
_PROBE = "direct"
# Compaction moves whole segments: with one for all rows of a table, files took 2.4 times the live bytes.
_SEGMENTS = 8
_LEAST_SEGMENT_BYTES = 4 << 20
_CLOSING_SECONDS = 60.0


class TierFiles:
    """The files of some tables: working memory, which is removed when it is closed or at the next start.

    Attributes:
        writers: Writers to the stores, stopped before the stores are closed.

    Args:
        directory: Directory of the files; None for no file tier.
        tables: Names of the tables.
        rows: Maximum number of rows of each table, None where that is not known; empty if nothing is known.
    """

    def __init__(self, directory: str | None, tables: Sequence[str], rows: Sequence[int | None] = ()) -> None:
        self._directory = None if directory is None else Path(directory)
        self._tables = tuple(tables)
        self._rows = tuple(rows) or (None,) * len(self._tables)
        self._locks = ExitStack()
        self._generation = self._adopted = 0
        self._open: list[tuple[RowStore, Path]] = []
        self._is_made = False
        self._options = RowFileOptions()
        self._reader: PageReader | None = None
        self.writers: list[WrittenBehind] = []

    def level(self, of: RowFormat, options: RowFileOptions | None = None) -> TableStores | None:
        """Return empty stores for rows of a format; former ones stay until `drop_former`.

        Raises:
            ConfigError: Files of others are in the place of those of a table.
            StorageError: Another process uses the files of a table, or rows of more bytes than a file takes.
        """
        if self._directory is None:
            return None
        if of.num_bytes > MOST_ROW_BYTES:
            raise StorageError(
                f"tiers file: tables {', '.join(self._tables)}",
                f"got rows of {of.num_bytes:,} bytes, optimizer state included, expected at most {MOST_ROW_BYTES:,}",
            )
        if not self._generation:
            self._lock()
        # Nothing here outlives the process, so that files may go before the commit that does without them.
        self._options = replace(options or RowFileOptions(), is_working=True)
        if self._options.direct:
            _check_direct(self._directory)
        # Under a number of its own: former rows are read while these are written (`TieredRows._renew`).
        self._generation += 1
        self._reader = PageReader(self._options, of.num_bytes)
        stores = []
        for table, rows in zip(self._tables, self._rows, strict=True):
            path = self._directory / f"{table}{_SUFFIX}" / str(self._generation)
            stores.append((_new_store(path, of, table, rows, self._options, self._reader), path))
        self._open += stores
        return TableStores([TableStore(store) for store, _ in stores], self._reader)

    def adopt(self, table: int, source: Path, of: RowFormat) -> RowStore | None:
        """Return a store with the rows of a row file, in place of that of a table in the last `level`.

        Args:
            table: Number of the table.
            source: Directory of a row file that no process writes; its segments are linked where possible.
            of: Format of the rows.

        Returns:
            The store; None if there is no file tier, or the file has rows of another format.
        """
        if self._directory is None or not self._open:
            return None
        layout = read_description(source)
        if layout.row_bytes != of.num_bytes or layout.columns != of.columns():
            return None
        self._adopted += 1
        name = self._tables[table]
        path = self._directory / f"{name}{_SUFFIX}" / f"{self._generation}-{self._adopted}"
        store = RowFile.clone(source, path, options=self._options, reader=self._reader)
        # Those of the last `level` are at the end, one for each table.
        place = len(self._open) - len(self._tables) + table
        # The former store goes after `clone`, which may fail.
        former, self._open[place] = self._open[place], (store, path)
        self._remove([former])
        return store

    def drop_former(self) -> None:
        """Remove all files but those of the last `level`, and forget the writers but the last, which have ended."""
        keep = len(self._tables)
        del self.writers[:-1]
        self._remove(self._open[:-keep])
        self._open = self._open[-keep:]

    def close(self) -> None:
        """Close and remove all files."""
        # First: a thread that still writes would find closed stores.
        for writer in self.writers:
            writer.stop()
        stores, self._open = self._open, []
        self._remove(stores)
        if self._directory is not None and self._generation:
            for table in self._tables:
                remove_tree(self._directory / f"{table}{_SUFFIX}", ignore_errors=True)
        self._generation = 0
        # Last: the next owner of the directory would have its new files removed.
        self._locks.close()
        if self._directory is not None and self._is_made:
            with suppress(OSError):  # which holds files of others
                self._directory.rmdir()

    def _lock(self) -> None:
        assert self._directory is not None
        try:
            self._is_made = not self._directory.exists()
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"tiers file: {self._directory}", f"{error.strerror}, expected a directory") from error
        for table in self._tables:
            path = self._directory / f"{table}{_SUFFIX}"
            if not self._try_lock(table):
                # An unreachable model of this process may not be collected yet: the first pass frees the
                # graph of its last step, the second what that held.
                gc.collect()
                gc.collect()
                wait_closed(_CLOSING_SECONDS)
                if not self._try_lock(table):
                    self._locks.close()
                    raise StorageError(
                        path, "used by another process or model, expected a directory of its own for each"
                    )
            try:
                work_directory(path)
            except ConfigError:
                for one in self._tables[: self._tables.index(table)]:
                    remove_tree(self._directory / f"{one}{_SUFFIX}", ignore_errors=True)
                self._locks.close()
                raise

    def _try_lock(self, table: str) -> bool:
        assert self._directory is not None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)  # which a former model, or `own_directory`, removed
            return self._locks.enter_context(file_lock(self._directory / f"{table}.lock"))
        except FileNotFoundError:
            return False

    def _remove(self, stores: Sequence[tuple[RowStore, Path]]) -> None:
        for store, path in stores:
            store.close()
            remove_tree(path, ignore_errors=True)


def _new_store(
    path: Path, of: RowFormat, table: str, rows: int | None, options: RowFileOptions, reader: PageReader
) -> RowStore:
    segment_bytes = SEGMENT_BYTES
    if rows is not None:
        segment_bytes = min(max(rows * of.num_bytes // _SEGMENTS, _LEAST_SEGMENT_BYTES), SEGMENT_BYTES)
    return RowFile.create(
        path,
        of.num_bytes,
        table=table,
        columns=of.columns(),
        segment_bytes=segment_bytes,
        options=options,
        reader=reader,
    )


def _check_direct(directory: Path) -> None:
    """Raise `StorageError` if the file system has no access past the page cache."""
    path = directory / f"{_PROBE}-{os.getpid()}"
    # File systems without direct access reject it when a file is opened. macOS has no such flag, but an option of open
    # files.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(path, flags))
    except OSError as error:
        raise StorageError(
            f"tiers direct: {directory}",
            f"{error.strerror}, expected a file system with direct access (O_DIRECT), or direct=False",
        ) from error
    finally:
        path.unlink(missing_ok=True)
