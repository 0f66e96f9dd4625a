"""Compiled count tables for the columns of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import Column, text_buffers
from terarec.etl.values.value_kind import ValueKind, as_values
from terarec.kernels.cpu.counts import Hex32Counts, Int64Counts, TextCounts


class CountTable:
    """How often each value of one kind occurs. Several threads may use it.

    Args:
        kind: of the values.
    """

    def __init__(self, kind: ValueKind) -> None:
        self._table: TextCounts | Int64Counts | Hex32Counts
        if kind == "text":
            self._table = TextCounts()
        else:
            self._table = Int64Counts() if kind == "integer" else Hex32Counts()

    def add(self, column: Column) -> None:
        """Count the m values of `column` but those that are missing."""
        table, column = self._table, as_values(column)
        if isinstance(table, TextCounts):
            text = column.values
            table.add(*text_buffers(text), text.is_null().to_numpy(zero_copy_only=False) if text.null_count else None)
        else:
            table.add(column.values, column.missing)

    def add_counts(self, values: pa.Array, counts: NDArray[np.int64]) -> None:
        """Count each of `values`, no nulls, as many times as `counts`, int64[n], says."""
        if isinstance(self._table, TextCounts):
            self._table.add(*text_buffers(values), None, counts)
        else:
            self._table.add(values.to_numpy(), None, counts)

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        return self._table.memory_bytes

    def drain(self) -> pa.Table:
        """Columns value and count, a row for each value; the table is empty after it."""
        return _counted(*self._table.drain())

    def at_least(self, min_count: int) -> pa.Table:
        """The same of values that occurred `min_count` times, by falling count, ties by rising value (text: bytes)."""
        return _counted(*self._table.at_least(min_count))


def _counted(*parts: NDArray[Any]) -> pa.Table:
    """Columns value and count from (values, counts), or from (bytes, offsets, counts) of texts."""
    if len(parts) == 2:
        return pa.table({"value": parts[0], "count": parts[1]})
    text, offsets, counts = parts
    values = pa.LargeStringArray.from_buffers(len(counts), pa.py_buffer(offsets), pa.py_buffer(text))
    return pa.table({"value": values, "count": counts})
