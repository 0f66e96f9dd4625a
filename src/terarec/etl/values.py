# SPDX-License-Identifier: Apache-2.0
"""Distinct values: their ids, for all steps that look values up, and their counts in training.

Counts are in memory up to a bound, and in partitions on the disk beyond.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import NoSpaceError
from terarec.etl.columns import (
    ARROW_TYPES,
    Kind,
    array_of,
    flat,
    kind_of,
    numpy_values,
    text_buffers,
    texts_of,
    validity,
)
from terarec.io.files import AtomicFile
from terarec.io.opening import arrow_file
from terarec.kernels.cpu.encoding import (
    Hex32Counts,
    Hex32Ids,
    Int64Counts,
    Int64Ids,
    TextCounts,
    TextIds,
    find_columns,
    read_hex32,
    xxh64_int64,
    xxh64_text,
)
from terarec.reports.text import byte_text
from terarec.spec.dataset import MISSING_ID

ValueKind: TypeAlias = Literal["text", "integer", "hex32"]
"""Kinds that can be looked up; ids are looked up as integers."""

VALUE_TYPES: dict[pa.DataType, ValueKind] = {ARROW_TYPES[kind]: kind for kind in get_args(ValueKind)}
"""Arrow type -> kind of the values."""


def lookup_kind(kind: Kind) -> ValueKind:
    """Return the kind under which values of `kind`, no numbers, are looked up."""
    assert kind != "number"
    return "integer" if kind == "id" else kind


_INT32_IDS = 2**31


class ValueIds:
    """V distinct values in the order of their ids: value i has id ``1 + hash_buckets + i``.

    Id 0 is a missing value's; ids ``1 .. hash_buckets`` are those of other values: ``1 + hash mod hash_buckets``.

    Attributes:
        kind: Kind of the values.
        values: Arrow array [V] without nulls, of the kind's type in `VALUE_TYPES`.
        hash_buckets: Number of ids of other values.
    """

    def __init__(self, kind: ValueKind, values: pa.Array, hash_buckets: int = 1) -> None:
        self.kind = kind
        self.values = values
        self.hash_buckets = hash_buckets

    @property
    def first_id(self) -> int:
        """Id of value 0."""
        return 1 + self.hash_buckets

    @property
    def num_ids(self) -> int:
        """Number of ids."""
        return len(self.values) + self.first_id

    @cached_property
    def table(self) -> Hex32Ids | Int64Ids | TextIds:
        """Compiled table that finds ids, made at first use."""
        if self.kind == "text":
            return TextIds(*text_buffers(self.values), hash_buckets=self.hash_buckets)
        numbers = numpy_values(self.values)
        if self.kind == "hex32":
            return Hex32Ids(numbers, hash_buckets=self.hash_buckets)
        return Int64Ids(numbers, hash_buckets=self.hash_buckets)

    def find(self, array: pa.Array) -> NDArray[np.int64]:
        """Find ids int64[m] of the m values of an array of this kind, or of ids where the kind is integer."""
        table, values = self.table, lookup_values(array)
        if isinstance(table, TextIds):
            return table.find_all(*text_buffers(values), validity(values))
        return table.find_all(numpy_values(values), validity(values))

    def find_values(self, values: list[Any] | NDArray[np.int64] | pa.Array) -> NDArray[np.int64]:
        """Find ids int64[m] of Python values, of raw values as `RecordFunction` has them, or of ids int64[m]."""
        if isinstance(values, list):
            return self.table.find_list(values)
        if isinstance(values, pa.Array):
            if isinstance(self.table, Hex32Ids) and isinstance(values, pa.LargeStringArray):
                numbers, missing = read_hex32(*text_buffers(values), validity(values))
                return self.table.find_all(numbers, np.packbits(~missing, bitorder="little"))
            return self.find(values)
        assert isinstance(self.table, Int64Ids)
        return self.table.find_all(values, np.packbits(values != MISSING_ID, bitorder="little"))

    def inverse(self, ids: Iterable[int]) -> list[str | int | None]:
        """Return the values of `ids`; None for missing and for hashed values. hex32 gives eight lower-case digits.

        Raises:
            IndexError: An id outside 0 <= id < `num_ids`.
        """
        values: list[str | int | None] = []
        for number in ids:
            if not 0 <= number < self.num_ids:
                raise IndexError(f"got id {number}, expected 0 <= id < {self.num_ids}")
            value: Any = self.values[int(number) - self.first_id].as_py() if number >= self.first_id else None
            values.append(f"{value:08x}" if self.kind == "hex32" and value is not None else value)
        return values


def find_each(ids: Sequence[ValueIds], arrays: Sequence[pa.Array]) -> list[NDArray[Any]]:
    """Find the ids of each array in its own `ids`, like `ValueIds.find`, as int32 where all of them fit.

    Arrays of one kind and length are looked up together.
    """
    results: list[NDArray[Any]] = [np.empty(0, dtype=np.int32)] * len(arrays)
    together: dict[tuple[str, int], list[int]] = {}
    values = [lookup_values(array) for array in arrays]
    for position, (own, array) in enumerate(zip(ids, values, strict=True)):
        # `find_columns` takes values of one width, and writes int32.
        if own.kind == "text" or own.num_ids > _INT32_IDS:
            results[position] = own.find(array)
        else:
            together.setdefault((own.kind, len(array)), []).append(position)
    for positions in together.values():
        chosen = [values[position] for position in positions]
        tables: list[Any] = [ids[position].table for position in positions]
        rows = find_columns(tables, list(map(numpy_values, chosen)), list(map(validity, chosen)))
        for position, row in zip(positions, rows, strict=True):
            results[position] = row
    return results


def lookup_values(array: pa.Array) -> pa.Array:
    """Return the m values under which an array's are looked up: integers for ids, null for id 0."""
    values = flat(array)
    if kind_of(values) != "id":
        return values
    ids = numpy_values(values).astype(np.int64, copy=False)
    return array_of(ids, ids == MISSING_ID)


PARTITIONS = 64
"""Number of partitions by hash; memory holds one of them at a time."""
_SEED = 7
"""Not the seed of ids in hash buckets, so that these are even inside a partition."""


def partition_of(values: pa.Array) -> NDArray[np.int64]:
    """Return the partition of each of n values (large_string, int64 or uint32), int64[n]; all nulls share one."""
    if pa.types.is_large_string(values.type):
        # The buffers under a null may hold any bytes: nulls get one hash, so that they share a partition.
        hashes = xxh64_text(*text_buffers(values.fill_null("")), _SEED)
    else:
        hashes = xxh64_int64(values.fill_null(0).to_numpy().astype(np.int64, copy=False), _SEED)
    # A mask, as PARTITIONS is a power of two: the bits of a negative hash count like those of others.
    return hashes & (PARTITIONS - 1)


class CountTable:
    """Occurrences of each value of one kind. Several threads may use it."""

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
        """Return the values that occurred `min_count` times, by falling count, ties by rising value (text: bytes)."""
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
        """Write the result of `CountTable.drain`."""
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
                # Mapped, since only the batches of one partition are read of each file.
                with arrow_file(path, is_mapped=True) as source:
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
        # No lock of ours: each compiled table has its own, so threads wait for one column and not for all.
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
        """
        if self._memory_bytes is not None and self._num_bytes() > self._memory_bytes:
            with self._spilling:
                # Down to half the bound, so that not every block spills. A thread that waited here finds it done.
                by_size = sorted(self._tables, key=lambda table: -self._tables[table].memory_bytes)
                for table in by_size:
                    if self._num_bytes() > self._memory_bytes // 2:
                        self._spill(table)

    def _num_bytes(self) -> int:
        return sum(int(table.memory_bytes) for table in self._tables.values())

    def _spill(self, name: str) -> None:
        if not any(self._spilled.values()):
            _LOG.warning(
                "column %r: counting exceeds the memory bound of %s and is spilled to partitions on disk",
                name,
                byte_text(self._memory_bytes or 0),
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
                # Arrow concatenates without a copy.
                result = part if result is None else pa.concat_tables([result, part])
                is_large = memory_bytes is not None and encoding_bytes(result) > memory_bytes
                # Sorting costs more than keeping twice as many for a while.
                if max_size is not None and (is_large or result.num_rows > 2 * max_size):
                    result = _ordered(result, max_size)
                # Once it is too large, the rest is only counted, so that the error names the size of all of it.
                is_whole = memory_bytes is None or encoding_bytes(result) <= memory_bytes
        assert result is not None
        if not is_whole:
            size = size if max_size is None else min(size, max_size)
            needed = encoding_bytes(result) * size // max(result.num_rows, 1)
            raise NoSpaceError(
                f"column {name!r}",
                f"its vocabulary of {size:,} values needs about {byte_text(needed)} of memory to "
                f"encode with, where {byte_text(memory_bytes or 0)} are left; a greater min_count (now {min_count}), a "
                f"max_size (now {'none' if max_size is None else max_size}), HashBucket or more memory would help",
            )
        return _ordered(result, max_size)

    def _partitions(self, name: str, min_count: int) -> Iterator[pa.Table]:
        if not self._spilled[name]:
            yield self._tables.pop(name).at_least(min_count)
            return
        # What memory still holds belongs to all partitions: it has to be on the disk before the first one is merged.
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
