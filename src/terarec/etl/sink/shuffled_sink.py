"""Rows in an order that depends on a seed and their ids alone, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.partitions import Partitions
from terarec.etl.sink.sink import Sink
from terarec.etl.sink.spilled_rows import PLACE, ROW, from_table, to_batch
from terarec.formats import ColumnBlock, slice_rows
from terarec.kernels.cpu.hashes import xxh64_int64

SHUFFLED = "train"
"""The split whose rows change places. Others are read in order, or by those who look for a row in their logs."""

_WRITTEN_ROWS = 1 << 14
_MAX_PARTITIONS = 256


class ShuffledSink:
    """Hands the train split to another sink in the order of ``XXH64(row id, seed)``, ties by row id; see `Sink`.

    Rows are scattered to files on the disk by the highest bits of the hash; at the end each file is sorted in memory,
    one after the other. The order does not depend on the number of files.

    Args:
        inner: takes the rows.
        directory: for the files, to make and to remove.
        seed: of the hash.
        estimated_bytes: about the bytes of all rows.
        memory_bytes: what sorting may take.
    """

    def __init__(self, inner: Sink, directory: Path, *, seed: int, estimated_bytes: int, memory_bytes: int) -> None:
        self._inner = inner
        self._seed = seed
        # A file is held three times while it is sorted: as read, as taken in order, and as columns.
        count = min(max(4 * estimated_bytes // memory_bytes, 1), _MAX_PARTITIONS)
        self._partitions = Partitions.make(directory, 1 << (count - 1).bit_length())
        self._like: ColumnBlock | None = None

    def write(self, split: str, rows: NDArray[np.int64], block: ColumnBlock) -> None:
        """See `Sink`."""
        if split != SHUFFLED:
            self._inner.write(split, rows, block)
            return
        self._like = slice_rows(block, 0, 0)
        place = xxh64_int64(rows, self._seed).view(np.uint64)
        bits = self._partitions.count.bit_length() - 1
        partition = (place >> np.uint64(64 - bits)) if bits else np.zeros_like(place)
        self._partitions.scatter(to_batch(rows, place, block), partition.astype(np.int64))

    def close(self) -> None:
        """See `Sink`."""
        for index in range(self._partitions.count):
            table = self._partitions.read(index)
            self._partitions.discard(index)
            if table is not None:
                self._write_sorted(table)
        self._partitions.remove()
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._partitions.remove()
        self._inner.__exit__(kind, error, traceback)

    def _write_sorted(self, table: pa.Table) -> None:
        assert self._like is not None
        rows = table.column(ROW).to_numpy()
        order = np.lexsort((rows, table.column(PLACE).to_numpy()))
        block = from_table(table.take(pa.array(order)), self._like)
        rows = rows[order]
        for start in range(0, len(rows), _WRITTEN_ROWS):
            stop = min(start + _WRITTEN_ROWS, len(rows))
            self._inner.write(SHUFFLED, rows[start:stop], slice_rows(block, start, stop))
