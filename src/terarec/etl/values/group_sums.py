"""Sums, minima and maxima of the rows that share a value: in memory up to a bound, on the disk beyond."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import pyarrow as pa

from terarec.errors import StorageError
from terarec.etl.partitions import Partitions
from terarec.etl.values.partition_of import PARTITIONS, partition_of
from terarec.etl.values.value_counts import encoding_bytes, in_bytes

Aggregate: TypeAlias = Literal["sum", "min", "max"]
_COMPACT_ROWS = 1 << 20
_COPIES = 3
"""Of the sums, while they are made: those before, the rows to be added, and the new ones."""
_LOG = logging.getLogger("terarec.etl")


class GroupSums:
    """Aggregates rows by their keys.

    Every sum is taken row after row, in the order of the rows: neither blocks of another size nor the bound of memory
    change a bit. So the disk gets the sums once, when they pass the bound, and the later rows as they are where floats
    are summed among them, for adding up sums of their own would round otherwise.

    Args:
        column: that is grouped by, for messages.
        schema: of the rows. The first column, "value", is the value that they are grouped by.
        aggregates: what becomes of each column; the others are the keys, of which null is one like any other.
        directory: for what memory does not hold.
        memory_bytes: about so much before it goes to the disk; None: no bound.
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
        """Take in rows, in their order; nulls and NaN among what is aggregated should not occur but as null.

        Raises:
            OSError: the disk is full.
        """
        self._pending.append(rows.select(self._summed.column_names))
        self._pending_rows += rows.num_rows
        self._pending_bytes += rows.nbytes
        is_much = self._memory_bytes is not None and self._pending_bytes > self._memory_bytes // _COPIES
        if is_much or self._pending_rows > max(_COMPACT_ROWS, self._summed.num_rows):
            self._compact()

    def result(self, figures: Callable[[pa.Table], pa.Table], memory_bytes: int | None) -> pa.Table:
        """A row for each key, by rising keys (null last).

        Args:
            figures: makes the rows of the result, which begin with the keys, of those of some groups.
            memory_bytes: bound of the result together with the table of its ids; None: no bound.

        Raises:
            StorageError: the result is over `memory_bytes`; names the column, its size, and what helps.
            OSError: the disk is full.
        """
        parts: list[pa.Table] = []
        groups = needed = 0
        for summed in self._parts():
            groups += summed.num_rows
            if memory_bytes is None or needed <= memory_bytes:
                parts.append(figures(summed))
                needed = encoding_bytes(pa.concat_tables(parts))
        if memory_bytes is not None and needed > memory_bytes:
            needed = needed * groups // sum(part.num_rows for part in parts)
            raise StorageError(
                f"column {self._column!r}: the figures of its {groups:,} groups need about {in_bytes(needed)} of "
                f"memory, where {in_bytes(memory_bytes)} are left; HashBucket, Categorify with a greater min_count or "
                "a max_size, or more memory would help"
            )
        return pa.concat_tables(parts).sort_by([(key, "ascending") for key in self._keys]).combine_chunks()

    def _parts(self) -> Iterator[pa.Table]:
        """The sums of all groups, those of a partition at a time."""
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
        """Add the rows that wait to the sums, in memory or on the disk."""
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
