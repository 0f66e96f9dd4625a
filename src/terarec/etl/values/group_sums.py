"""Sums, minima and maxima of the rows that share a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import pyarrow as pa

from terarec.errors import StorageError

Aggregate: TypeAlias = Literal["sum", "min", "max"]
_COMPACT_ROWS = 1 << 20


class GroupSums:
    """Aggregates rows by their keys, in memory that grows with the distinct keys alone.

    Every sum is taken row after row, in the order of the rows: blocks of another size give the same bits.

    Args:
        column: that is grouped by, for errors.
        schema: of the rows.
        aggregates: what becomes of each column; the others are the keys, of which null is one like any other.
        memory_bytes: bound of the result; None: no bound.
    """

    def __init__(
        self, column: str, schema: pa.Schema, aggregates: Mapping[str, Aggregate], memory_bytes: int | None
    ) -> None:
        self._column = column
        self._aggregates = list(aggregates.items())
        self._keys = [name for name in schema.names if name not in aggregates]
        self._summed: pa.Table = schema.empty_table().select([*self._keys, *aggregates])
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._memory_bytes = memory_bytes

    def add(self, rows: pa.Table) -> None:
        """Take in rows, in their order; nulls and NaN among what is aggregated should not occur but as null.

        Raises:
            StorageError: the distinct keys need more memory than allowed.
        """
        self._pending.append(rows.select(self._summed.column_names))
        self._pending_rows += rows.num_rows
        if self._pending_rows > max(_COMPACT_ROWS, self._summed.num_rows):
            self._compact()

    def table(self) -> pa.Table:
        """A row for each key, by rising keys (null last).

        Raises:
            StorageError: as for `add`.
        """
        self._compact()
        return self._summed.sort_by([(key, "ascending") for key in self._keys]).combine_chunks()

    def _compact(self) -> None:
        rows = pa.concat_tables([self._summed, *self._pending])
        # One thread adds in the order of the rows, what was summed before being the first of its key.
        grouped = rows.group_by(self._keys, use_threads=False).aggregate(self._aggregates)
        names = [*self._keys, *(f"{name}_{function}" for name, function in self._aggregates)]
        self._summed = grouped.select(names).rename_columns(self._summed.column_names).cast(self._summed.schema)
        self._pending, self._pending_rows = [], 0
        held = self._summed.nbytes
        if self._memory_bytes is not None and held > self._memory_bytes:
            raise StorageError(
                f"column {self._column!r}: the sums of its {self._summed.num_rows:,} groups hold "
                f"{held / 2**20:.1f} MiB, expected at most {self._memory_bytes / 2**20:.1f} MiB; HashBucket, "
                "Categorify with a greater min_count or a max_size, or more memory would help"
            )
