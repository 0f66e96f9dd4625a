"""How often each value of some columns occurs: in memory up to a bound, on the disk beyond."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from terarec.errors import StorageError
from terarec.etl.columns import Column
from terarec.etl.values.count_tables import CountTable
from terarec.etl.values.spilled_counts import SpilledCounts
from terarec.etl.values.value_kind import ValueKind

_LOG = logging.getLogger("terarec.etl")


class ValueCounts:
    """Counts the values of several vocabularies within one bound of memory. Several threads may add.

    Args:
        kinds: vocabulary -> kind of its values.
        directory: for what memory does not hold.
        memory_bytes: about so much is held before the fullest tables go to the disk; None: no bound.
    """

    def __init__(self, kinds: Mapping[str, ValueKind], directory: Path, memory_bytes: int | None) -> None:
        self._tables = {name: CountTable(kind) for name, kind in kinds.items()}
        self._spilled = {
            name: SpilledCounts(directory / f"counts-{number:03d}", kind)
            for number, (name, kind) in enumerate(kinds.items())
        }
        self._memory_bytes = memory_bytes
        self._spilling = threading.Lock()

    def add(self, name: str, column: Column) -> None:
        """Count the values of `column`, each item of a list, for the vocabulary `name`; missing ones are left out."""
        self._tables[name].add(column)

    def relieve(self) -> None:
        """Keep to the bound of memory. To be called now and then: asking a table for its size waits for who adds to it.

        Raises:
            StorageError: the disk is full.
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
        """Values that occurred at least `min_count` times, by falling count, ties by rising value (text: by its bytes).

        Args:
            name: of the vocabulary; its counts are gone afterwards.
            min_count: the least count to be kept.
            max_size: at most so many values; None: no bound.
            memory_bytes: bound of the result together with the table of its ids; None: no bound.

        Returns:
            Columns value and count (int64).

        Raises:
            StorageError: the result is over `memory_bytes`, or the disk is full.
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
                f"column {name!r}: its vocabulary of {size:,} values needs about {in_bytes(needed)} of memory to "
                f"encode with, where {in_bytes(memory_bytes or 0)} are left; a greater min_count (now {min_count}), a "
                f"max_size (now {'none' if max_size is None else max_size}), HashBucket or more memory would help"
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
    """How much memory a vocabulary takes with its compiled table of ids.

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
    """`count` bytes for a message."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
