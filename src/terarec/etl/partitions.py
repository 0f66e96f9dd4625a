# SPDX-License-Identifier: Apache-2.0
"""Rows, and sums of rows by value, in partitions on the disk: for more of them than memory holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError, NoSpaceError
from terarec.etl.columns import ARROW_TYPES, ColumnType
from terarec.etl.values import PARTITIONS, encoding_bytes, lookup_kind, partition_of
from terarec.io.files import flush
from terarec.io.opening import arrow_file, open_file
from terarec.io.removal import remove_tree, work_directory
from terarec.reports.text import byte_text

_LOG = logging.getLogger("terarec.etl")
_BUFFERED_ROWS = 1 << 17
"""Rows gathered before they are scattered, so that each of hundreds of files gets hundreds of them at once."""


class Partitions:
    """Files of record batches. A file is open only while it is written or read, so that their number is not bounded."""

    def __init__(self, directory: Path, count: int) -> None:
        self.count = count
        self._directory = directory
        self._waiting: list[tuple[pa.RecordBatch, NDArray[np.int64]]] = []
        self._waiting_rows = 0

    @classmethod
    def make(cls, directory: Path, count: int) -> Self:
        """Return empty files in `directory`, whose content is removed."""
        return cls(work_directory(directory), count)

    @classmethod
    def reopen(cls, directory: Path, sizes: Sequence[int], *, discarded: int) -> Self:
        """Return the files of an interrupted run, without rows that were appended after `sizes` were taken."""
        opened = cls(directory, len(sizes))
        for index, size in enumerate(sizes):
            path = opened._path(index)
            # Its rows are in closed shards. A kill may have come before the file was removed.
            if index < discarded:
                opened.discard(index)
                continue
            file_bytes = path.stat().st_size if path.exists() else 0
            if file_bytes < size:
                raise FormatError(
                    path, f"got {file_bytes:,} bytes, expected {size:,}; remove the directory to start over"
                )
            # Rows behind the commit are read from the sources again.
            if file_bytes > size:
                os.truncate(path, size)
        return opened

    def scatter(self, batch: pa.RecordBatch, partition: NDArray[np.int64]) -> None:
        """Append every row of `batch` to the file that ``partition int64[n]`` names; rows keep their order.

        They are buffered in memory; `flush` and all reads write them.
        """
        self._waiting.append((batch, partition))
        self._waiting_rows += batch.num_rows
        if self._waiting_rows >= _BUFFERED_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows."""
        if not self._waiting_rows:
            return
        batch = pa.Table.from_batches([batch for batch, _ in self._waiting]).combine_chunks().to_batches()[0]
        partition = np.concatenate([partition for _, partition in self._waiting])
        self._waiting, self._waiting_rows = [], 0
        # NumPy sorts 16 bits by counting: 10 ns a row, where 64 bits take 47 (Zen 4). There are hundreds of files.
        sorted_batch = batch.take(pa.array(np.argsort(partition.astype(np.uint16), kind="stable")))
        start = 0
        for index, end in enumerate(np.cumsum(np.bincount(partition, minlength=self.count)).tolist()):
            if end > start:
                self.append(index, sorted_batch.slice(start, end - start))
            start = end

    def append(self, index: int, batch: pa.RecordBatch) -> None:
        """Append `batch` to file `index`."""
        # Serialise first, because Python's own write reports a full disk by its error number.
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, batch.schema) as stream:
            stream.write_batch(batch)
        with open_file(self._path(index), "ab") as file:
            file.write(buffer.getvalue())

    def sizes(self) -> list[int]:
        """Return the bytes of each file, after `flush`."""
        self.flush()
        paths = map(self._path, range(self.count))
        return [path.stat().st_size if path.exists() else 0 for path in paths]

    def sync(self) -> None:
        """Flush all written rows to the disk. Other threads may append and flush at the same time."""
        for index in range(self.count):
            if self._path(index).exists():
                flush(self._path(index))
        # A new file survives a crash only once its directory entry does.
        flush(self._directory)

    def read(self, index: int) -> pa.Table | None:
        """Return all rows of file `index` in the order of `scatter`; None if there are none."""
        self.flush()
        path, batches = self._path(index), list[pa.RecordBatch]()
        if path.exists():
            with arrow_file(path) as file:
                while file.tell() < file.size():
                    batches += _read_stream(file)
        return pa.Table.from_batches(batches) if batches else None

    def batches(self, index: int) -> Iterator[pa.RecordBatch]:
        """Yield the batches of file `index` in the order of `append`, after `flush`.

        Many files are read side by side: one is open only while a batch is read.
        """
        self.flush()
        path, position = self._path(index), 0
        size = path.stat().st_size if path.exists() else 0
        while position < size:
            with arrow_file(path) as file:
                file.seek(position)
                batches, position = _read_stream(file), file.tell()
            yield from batches

    def discard(self, index: int) -> None:
        """Remove file `index`."""
        self._path(index).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all files."""
        remove_tree(self._directory, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self._directory / f"{index:05d}.arrows"


def _read_stream(file: pa.NativeFile) -> list[pa.RecordBatch]:
    """Return the batches of one `Partitions.append`, up to whose end the file is read."""
    with pa.ipc.open_stream(file) as stream:
        return list(stream)


Aggregate: TypeAlias = Literal["sum", "min", "max"]
_COMPACT_ROWS = 1 << 20
_COPIES = 3
"""Of the sums, while they are made: those before, the rows to be added, and the new ones."""


class GroupSums:
    """Aggregates rows by their keys.

    Every sum is taken row after row, in the order of the rows: neither blocks of another size nor the bound of memory
    change a bit. So the disk gets the sums once, when they pass the bound, and the later rows as they are where floats
    are summed among them, for adding up sums of their own would round otherwise.

    Args:
        column: Column that is grouped by, for messages.
        schema: Schema of the rows; the first column, "value", is the value that they are grouped by.
        aggregates: Aggregate of each column; other columns are keys, where null is a key, too.
        directory: Directory for what memory does not hold.
        memory_bytes: Approximate size before sums go to the disk; None for no bound.
    """

    def __init__(
        self,
        column: str,
        schema: pa.Schema,
        aggregates: Mapping[str, Aggregate],
        directory: Path,
        memory_bytes: int | None,
    ) -> None:
        self._column = column
        self._aggregates = dict(aggregates)
        self._keys = [name for name in schema.names if name not in aggregates]
        self._summed: pa.Table = schema.empty_table().select([*self._keys, *aggregates])
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._spilled: Partitions | None = None
        sums = [schema.field(name).type for name, function in aggregates.items() if function == "sum"]
        self._rows_matter = any(map(pa.types.is_floating, sums))

    def add(self, rows: pa.Table) -> None:
        """Add rows, in their order; missing numbers are null, not NaN."""
        self._pending.append(rows.select(self._summed.column_names))
        self._pending_rows += rows.num_rows
        self._pending_bytes += rows.nbytes
        # Waiting for as many rows as there are sums keeps the cost of a row constant: all sums are read each time.
        is_much = self._memory_bytes is not None and self._pending_bytes > self._memory_bytes // _COPIES
        if is_much or self._pending_rows > max(_COMPACT_ROWS, self._summed.num_rows):
            self._compact()

    def result(self, finish: Callable[[pa.Table], pa.Table], memory_bytes: int | None) -> pa.Table:
        """Return a row for each key, by rising keys (null last).

        Args:
            finish: Function from the sums of some groups to rows of the result, which begin with the keys.
            memory_bytes: Bound of the result together with the table of its ids; None for no bound.

        Raises:
            StorageError: The result is over `memory_bytes`; names the column, its size, and what helps.
            OSError: The disk is full.
        """
        parts: list[pa.Table] = []
        groups = needed = 0
        for summed in self._parts():
            groups += summed.num_rows
            if memory_bytes is None or needed <= memory_bytes:
                parts.append(finish(summed))
                # After each part, so that a result that is too large ends before memory does.
                needed = encoding_bytes(pa.concat_tables(parts))
        if memory_bytes is not None and needed > memory_bytes:
            needed = needed * groups // sum(part.num_rows for part in parts)
            raise NoSpaceError(
                f"column {self._column!r}",
                f"the statistics of its {groups:,} groups need about {byte_text(needed)} of "
                f"memory, where {byte_text(memory_bytes)} are left; HashBucket, Categorify with a greater min_count or "
                "a max_size, or more memory would help",
            )
        return pa.concat_tables(parts).sort_by([(key, "ascending") for key in self._keys]).combine_chunks()

    def sums(self) -> pa.Table:
        """Return a row of sums for each key, and free the rows."""
        return pa.concat_tables(self._parts())

    def _parts(self) -> Iterator[pa.Table]:
        """Yield the sums of all groups, one partition at a time."""
        if self._spilled is None:
            yield self._aggregated(pa.concat_tables([self._summed, *self._pending]))
            return
        self._compact()
        for number in range(PARTITIONS):
            # Without a bound: a partition holds one of 64 parts of the groups.
            sums = GroupSums(self._column, self._summed.schema, self._aggregates, self._directory, None)
            for batch in self._spilled.batches(number):
                sums.add(pa.Table.from_batches([batch]))
            self._spilled.discard(number)
            yield from sums._parts()

    def _compact(self) -> None:
        """Add pending rows to the sums, in memory or on the disk."""
        rows = pa.concat_tables([self._summed, *self._pending])
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        if self._spilled is None or not self._rows_matter:
            rows = self._aggregated(rows)
        if self._spilled is None and self._memory_bytes is not None and rows.nbytes > self._memory_bytes // _COPIES:
            _LOG.warning(
                "column %r: the sums of its groups exceed the memory bound of %s and are spilled to partitions on disk",
                self._column,
                byte_text(self._memory_bytes),
            )
            self._spilled = Partitions.make(self._directory, PARTITIONS)
        if self._spilled is None:
            self._summed = rows
            return
        self._summed = self._summed.schema.empty_table()
        for batch in rows.combine_chunks().to_batches():
            self._spilled.scatter(batch, partition_of(batch.column("value")))
        self._spilled.flush()  # the memory bound holds for what would wait, too

    def _aggregated(self, rows: pa.Table) -> pa.Table:
        # One thread adds in the order of the rows, what was summed before being the first of its key.
        grouped = rows.group_by(self._keys, use_threads=False).aggregate(list(self._aggregates.items()))
        names = [*self._keys, *(f"{name}_{function}" for name, function in self._aggregates.items())]
        return grouped.select(names).rename_columns(self._summed.column_names).cast(self._summed.schema)


def sums_by_value(
    columns: Mapping[str, ColumnType],
    numbers: Mapping[str, pa.DataType],
    aggregates: Mapping[str, Aggregate],
    directory: Path,
    memory_bytes: int | None,
) -> dict[str, GroupSums]:
    """Open the sums by value of several columns, which share a bound of memory.

    Args:
        columns: Columns that are grouped by, and their types.
        numbers: Further columns of the rows and their types: those of `aggregates`, and keys.
        aggregates: Aggregate of each column, as for `GroupSums`.
        directory: Directory for what memory does not hold.
        memory_bytes: Approximate size of all sums together before some go to the disk; None for no bound.
    """
    bound = None if memory_bytes is None else memory_bytes // len(columns)
    sums = {}
    for number, (name, column) in enumerate(columns.items()):
        schema = pa.schema([("value", ARROW_TYPES[lookup_kind(column.kind)]), *numbers.items()])
        sums[name] = GroupSums(name, schema, aggregates, directory / f"sums-{number:03d}", bound)
    return sums
