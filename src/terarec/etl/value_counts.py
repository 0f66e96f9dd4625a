"""Counts and sums by value: in memory up to a bound, in partitions on the disk beyond."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import StorageError
from terarec.etl.columns import ARROW_TYPES, ColumnType, lookup_values, numpy_values, text_buffers, texts_of, validity
from terarec.etl.partitions import Partitions
from terarec.etl.values import ValueKind, lookup_kind
from terarec.io import AtomicFile
from terarec.kernels.cpu.encoding import Hex32Counts, Int64Counts, TextCounts, xxh64_int64, xxh64_text

PARTITIONS = 64
"""Number of partitions by hash; memory holds one of them at a time."""
_SEED = 7
"""Not the seed of ids in hash buckets, so that these are even inside a partition."""


def partition_of(values: pa.Array) -> NDArray[np.int64]:
    """Return the partition of each of n values (large_string, int64 or uint32), int64[n]; all nulls share one."""
    if pa.types.is_large_string(values.type):
        hashes = xxh64_text(*text_buffers(values.fill_null("")), _SEED)
    else:
        hashes = xxh64_int64(values.fill_null(0).to_numpy().astype(np.int64, copy=False), _SEED)
    return hashes & (PARTITIONS - 1)


class CountTable:
    """Occurrences of each value of one kind. Several threads may use it.

    Args:
        kind: Kind of the values.
    """

    def __init__(self, kind: ValueKind) -> None:
        self._table: TextCounts | Int64Counts | Hex32Counts
        if kind == "text":
            self._table = TextCounts()
        else:
            self._table = Int64Counts() if kind == "integer" else Hex32Counts()

    def add(self, array: pa.Array) -> None:
        """Count the m values of `array` that are not missing."""
        table, values = self._table, lookup_values(array)
        if isinstance(table, TextCounts):
            table.add(*text_buffers(values), validity(values))
        else:
            table.add(numpy_values(values), validity(values))

    def add_counts(self, values: pa.Array, counts: NDArray[np.int64]) -> None:
        """Count each of `values`, no nulls, ``counts int64[n]`` times."""
        if isinstance(self._table, TextCounts):
            self._table.add(*text_buffers(values), None, counts)
        else:
            self._table.add(values.to_numpy(), None, counts)

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory."""
        return self._table.memory_bytes

    def drain(self) -> pa.Table:
        """Return columns value and count, a row for each value, and empty the table."""
        return _counted(*self._table.drain())

    def at_least(self, min_count: int) -> pa.Table:
        """Return those that occurred `min_count` times, by falling count, ties by rising value (text: bytes)."""
        return _counted(*self._table.at_least(min_count))


def _counted(*parts: NDArray[Any]) -> pa.Table:
    """Return columns value and count of (values, counts), or of (bytes, offsets, counts) of texts."""
    if len(parts) == 2:
        return pa.table({"value": parts[0], "count": parts[1]})
    text, offsets, counts = parts
    return pa.table({"value": texts_of(text, offsets), "count": counts})


_CHUNK_VALUES = 1 << 20


class SpilledCounts:
    """Counts on the disk.

    Args:
        directory: Directory of the files; made if absent.
        kind: Kind of the values.
    """

    def __init__(self, directory: Path, kind: ValueKind) -> None:
        self._kind: ValueKind = kind
        self._directory = directory
        self._files: list[Path] = []

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._files)

    def append(self, counted: pa.Table) -> None:
        """Write the result of `CountTable.drain`.

        Raises:
            StorageError: The disk is full.
        """
        file = AtomicFile(self._directory / f"{len(self._files):06d}.arrow")
        with file.guard(), pa.OSFile(str(file.partial), "wb") as sink, pa.ipc.new_file(sink, counted.schema) as writer:
            for chunk in counted.to_batches(_CHUNK_VALUES):
                for rows in _partitions(chunk.column("value")):
                    # One batch for each partition, also an empty one: batch i holds partition i mod PARTITIONS.
                    writer.write_batch(chunk.take(pa.array(rows)))
        self._files.append(file.partial)  # temporary, so it needs no fsync

    def merged(self, min_count: int) -> Iterator[pa.Table]:
        """Yield columns value and count of values that occurred `min_count` times, partition by partition."""
        for partition in range(PARTITIONS):
            table = CountTable(self._kind)
            for path in self._files:
                with pa.memory_map(str(path)) as source:
                    reader = pa.ipc.open_file(source)
                    for number in range(partition, reader.num_record_batches, PARTITIONS):
                        values, counts = reader.get_batch(number).columns
                        table.add_counts(values, counts.to_numpy())
            yield table.at_least(min_count)


def _partitions(values: pa.Array) -> list[NDArray[np.int64]]:
    """Return the positions of the values of each partition."""
    partition = partition_of(values).astype(np.uint8)
    ends = np.cumsum(np.bincount(partition, minlength=PARTITIONS))
    return np.split(np.argsort(partition, kind="stable"), ends[:-1])


_LOG = logging.getLogger("terarec.etl")


class ValueCounts:
    """Counts the values of several vocabularies within one bound of memory. Several threads may add.

    Args:
        kinds: Vocabulary -> kind of its values.
        directory: Directory for what memory does not hold.
        memory_bytes: Approximate size before the largest tables go to the disk; None for no bound.
    """

    def __init__(self, kinds: Mapping[str, ValueKind], directory: Path, memory_bytes: int | None) -> None:
        self._tables = {name: CountTable(kind) for name, kind in kinds.items()}
        self._spilled = {
            name: SpilledCounts(directory / f"counts-{number:03d}", kind)
            for number, (name, kind) in enumerate(kinds.items())
        }
        self._memory_bytes = memory_bytes
        self._spilling = threading.Lock()

    def add(self, name: str, array: pa.Array) -> None:
        """Count the values of `array`, each item of a list, for the vocabulary `name`; missing ones are left out."""
        self._tables[name].add(array)

    def add_counts(self, name: str, counted: pa.Table) -> None:
        """Add a table of values and counts to the vocabulary `name`."""
        counts = counted.column("count").combine_chunks().to_numpy()
        self._tables[name].add_counts(counted.column("value").combine_chunks(), counts)

    def drain(self, name: str) -> pa.Table:
        """Return the counts of the vocabulary `name`, none of which were spilled; it is empty afterwards."""
        assert not self._spilled[name]
        return self._tables[name].drain()

    def maybe_spill(self) -> None:
        """Move the largest tables to the disk where memory passes its bound.

        Call it once a block: the size of a table waits for threads that add to it.

        Raises:
            StorageError: The disk is full.
        """
        if self._memory_bytes is not None and self._held() > self._memory_bytes:
            with self._spilling:
                by_size = sorted(self._tables, key=lambda table: -self._tables[table].memory_bytes)
                for table in by_size:
                    if self._held() > self._memory_bytes // 2:
                        self._spill(table)

    def _held(self) -> int:
        return sum(int(table.memory_bytes) for table in self._tables.values())

    def _spill(self, name: str) -> None:
        if not any(self._spilled.values()):
            _LOG.warning(
                "column %r: counting passes the memory bound of %s; it goes on in partitions on the disk",
                name,
                in_bytes(self._memory_bytes or 0),
            )
        self._spilled[name].append(self._tables[name].drain())

    def kept(self, name: str, min_count: int, max_size: int | None, memory_bytes: int | None) -> pa.Table:
        """Return values that occurred `min_count` times, by falling count, ties by rising value (text: bytes).

        Args:
            name: The vocabulary; its counts are dropped afterwards.
            min_count: The least count that is kept.
            max_size: The largest number of values; None for no bound.
            memory_bytes: Bound of the result together with the table of its ids; None for no bound.

        Returns:
            Columns value and count (int64).

        Raises:
            StorageError: The result is over `memory_bytes`, or the disk is full.
        """
        result: pa.Table | None = None
        size, is_whole = 0, True
        for part in self._partitions(name, min_count):
            size += int(part.num_rows)
            if is_whole:
                result = part if result is None else pa.concat_tables([result, part])
                is_large = memory_bytes is not None and encoding_bytes(result) > memory_bytes
                if max_size is not None and (is_large or result.num_rows > 2 * max_size):
                    result = _ordered(result, max_size)
                is_whole = memory_bytes is None or encoding_bytes(result) <= memory_bytes
        assert result is not None
        if not is_whole:
            size = size if max_size is None else min(size, max_size)
            needed = encoding_bytes(result) * size // max(result.num_rows, 1)
            raise StorageError(
                f"column {name!r}",
                f"its vocabulary of {size:,} values needs about {in_bytes(needed)} of memory to "
                f"encode with, where {in_bytes(memory_bytes or 0)} are left; a greater min_count (now {min_count}), a "
                f"max_size (now {'none' if max_size is None else max_size}), HashBucket or more memory would help",
            )
        return _ordered(result, max_size)

    def _partitions(self, name: str, min_count: int) -> Iterator[pa.Table]:
        if not self._spilled[name]:
            yield self._tables.pop(name).at_least(min_count)
            return
        self._spill(name)
        del self._tables[name]
        yield from self._spilled[name].merged(min_count)


def encoding_bytes(kept: pa.Table) -> int:
    """Return the memory of a vocabulary with its compiled table of ids.

    The table has a power of two of slots, at least two for each value: of 16 bytes for integers and of 8 for others; it
    copies texts.
    """
    values = kept.column("value")
    slots = max(64, 1 << (2 * kept.num_rows - 1).bit_length()) if kept.num_rows else 64
    table = slots * (16 if pa.types.is_int64(values.type) else 8)
    copied = values.nbytes if pa.types.is_large_string(values.type) else 0
    return int(kept.nbytes + table + copied)


def _ordered(counted: pa.Table, most: int | None) -> pa.Table:
    ordered = counted.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, most)
    return ordered.combine_chunks()


def in_bytes(count: int) -> str:
    """Format a number of bytes for a message."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


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
        """Add rows, in their order; missing numbers are null, not NaN.

        Raises:
            OSError: The disk is full.
        """
        self._pending.append(rows.select(self._summed.column_names))
        self._pending_rows += rows.num_rows
        self._pending_bytes += rows.nbytes
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
                needed = encoding_bytes(pa.concat_tables(parts))
        if memory_bytes is not None and needed > memory_bytes:
            needed = needed * groups // sum(part.num_rows for part in parts)
            raise StorageError(
                f"column {self._column!r}",
                f"the statistics of its {groups:,} groups need about {in_bytes(needed)} of "
                f"memory, where {in_bytes(memory_bytes)} are left; HashBucket, Categorify with a greater min_count or "
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
                "column %r: the sums of its groups pass the memory bound of %s; they go on in partitions on the disk",
                self._column,
                in_bytes(self._memory_bytes),
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
    found = {}
    for number, (name, column) in enumerate(columns.items()):
        schema = pa.schema([("value", ARROW_TYPES[lookup_kind(column.kind)]), *numbers.items()])
        found[name] = GroupSums(name, schema, aggregates, directory / f"sums-{number:03d}", bound)
    return found
