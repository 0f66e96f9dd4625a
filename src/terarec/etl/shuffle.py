# SPDX-License-Identifier: Apache-2.0
"""Write the train split in the order of a hash, where a preparation shuffles it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from terarec.etl.columns import SPLIT_NAMES
from terarec.etl.partitions import Partitions
from terarec.etl.sink import TRAIN_SPLIT, Sink, SinkState
from terarec.formats.block import ColumnBlock, Keys, slice_rows
from terarec.formats.parquet import lists_of_array
from terarec.kernels.cpu.encoding import xxh64_int64
from terarec.ragged import Ragged

ROW, PLACE, FLOATS, KEYS, WEIGHT = "row", "place", "floats", "keys", "weight"


def block_to_batch(
    rows: NDArray[np.int64], block: ColumnBlock, place: NDArray[np.uint64] | None = None
) -> pa.RecordBatch:
    """Return `block` with its row ids and their `place` in the final order; lists of keys are separate columns."""
    floats = np.concatenate([block.label, block.dense], axis=1, dtype=np.float32)
    columns: dict[str, pa.Array] = {ROW: pa.array(rows), FLOATS: _matrix(floats)}
    if place is not None:
        columns[PLACE] = pa.array(place)
    scalars = [keys for keys in block.keys if not isinstance(keys, Ragged)]
    if scalars:
        columns[KEYS] = _matrix(np.stack(scalars, axis=1))
    for index, keys in enumerate(block.keys):
        if isinstance(keys, Ragged):
            columns[f"list{index}"] = pa.LargeListArray.from_arrays(pa.array(keys.offsets), pa.array(keys.values))
    if block.weight is not None:
        columns[WEIGHT] = pa.array(block.weight)
    columns |= {f"metadata{index}": array for index, array in enumerate(block.metadata)}
    return pa.record_batch(columns)


def block_from_table(table: pa.Table, num_labels: int) -> ColumnBlock:
    """Return the rows of a table of such batches with `num_labels` labels."""
    floats, names = _rows(table, FLOATS), table.column_names
    columns = list(_rows(table, KEYS).T) if KEYS in names else []
    num_keys = len(columns) + sum(name.startswith("list") for name in names)
    keys: list[Keys] = []
    scalars = iter(columns)
    for index in range(num_keys):
        if f"list{index}" in names:
            lists = table.column(f"list{index}").combine_chunks()
            keys.append(lists_of_array(lists))
        else:
            keys.append(np.ascontiguousarray(next(scalars)))
    return ColumnBlock(
        label=floats[:, :num_labels],
        dense=floats[:, num_labels:],
        keys=tuple(keys),
        weight=table.column(WEIGHT).to_numpy() if WEIGHT in names else None,
        metadata=tuple(table.column(name).combine_chunks() for name in names if name.startswith("metadata")),
    )


def _matrix(values: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _rows(table: pa.Table, name: str) -> NDArray[Any]:
    column = table.column(name).combine_chunks()
    values: NDArray[Any] = column.flatten().to_numpy()
    return values.reshape(len(column), column.type.list_size)


_WRITTEN_ROWS = 1 << 14
_MAX_PARTITIONS = 256


class ShuffledSink(Sink):
    """Passes the train split to another sink in the order of ``XXH64(row id, seed)``, ties by row id; see `Sink`.

    The other splits stay in order: they are read in order, or by those who look for a row in their logs.

    Rows are scattered to files on the disk by the highest bits of the hash. `finish` sorts each file in memory, one
    after the other. The order does not depend on the number of files.

    The files are forced to the disk after every `rows_per_commit` rows. Each is removed when its rows are in closed
    shards.
    """

    def __init__(
        self,
        inner: Sink,
        directory: Path,
        *,
        num_labels: int,
        seed: int,
        estimated_bytes: int,
        memory_bytes: int,
        rows_per_commit: int,
        begin: SinkState,
    ) -> None:
        self._inner = inner
        self._num_labels = num_labels
        self._seed = seed
        self._rows_per_commit = rows_per_commit
        if begin.spilled_bytes:
            self._partitions = Partitions.reopen(directory, begin.spilled_bytes, discarded=begin.merged_files)
        else:
            # A file is in memory three times while it is sorted: as read, in the new order, and as columns.
            count = min(max(4 * estimated_bytes // memory_bytes, 1), _MAX_PARTITIONS)
            # A power of two, since the highest bits of the hash name the file.
            self._partitions = Partitions.make(directory, 1 << (count - 1).bit_length())
        self._rows = self._requested_rows = begin.spilled_rows
        self._committed = (begin.spilled_rows, begin.spilled_bytes)
        self._merged = [(begin.merged_files, begin.merged_rows)]
        self._num_discarded = begin.merged_files
        self._begin_closed = sum(begin.closed.get(TRAIN_SPLIT, ()))
        self._is_finished = False
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="shuffle")
        self._committing: Future[tuple[int, list[int]]] | None = None

    @override
    def write(self, split: str, rows: NDArray[np.int64], block: ColumnBlock) -> None:
        if split != TRAIN_SPLIT:
            self._inner.write(split, rows, block)
            return
        place = xxh64_int64(rows, self._seed).view(np.uint64)
        bits = self._partitions.count.bit_length() - 1
        # The highest bits: sorted one after the other, the files give the final order.
        partition = (place >> np.uint64(64 - bits)) if bits else np.zeros_like(place)
        self._partitions.scatter(block_to_batch(rows, block, place), partition.astype(np.int64))
        self._rows += len(rows)
        # One commit at a time: a slow disk makes them rarer, and does not hold the writing up.
        is_free = self._committing is None or self._committing.done()
        if is_free and self._rows - self._requested_rows >= self._rows_per_commit:
            self._commit()

    @override
    def state(self) -> SinkState:
        # The train split has closed shards only after all rows are scattered: before that it is in the files alone.
        inner = self._inner.state()
        if self._committing is not None and self._committing.done():
            # This raises what went wrong in the other thread, such as a full disk.
            self._committed = self._committing.result()
        rows, sizes = self._committed
        # Shards of shuffled rows are of no use without the files of the others.
        shards = inner.closed.get(TRAIN_SPLIT, ()) if rows == self._rows else []
        # A resumed run begins at the first file whose rows are not all in closed shards.
        while len(self._merged) > 1 and self._merged[1][1] <= sum(shards):
            del self._merged[0]
        files, merged = self._merged[0]
        return SinkState(
            closed={**inner.closed, TRAIN_SPLIT: shards},
            spilled_rows=rows,
            spilled_bytes=sizes,
            merged_files=files,
            merged_rows=merged,
        )

    @override
    def finish(self) -> Iterator[None]:
        self._is_finished = True
        for split in SPLIT_NAMES:
            if split != TRAIN_SPLIT:
                self._inner.close_split(split)
        if self._rows > self._requested_rows:
            self._commit()  # files are sorted at the same time
        yield
        first, before = self._merged[0]
        for index in range(first, self._partitions.count):
            table = self._partitions.read(index)
            if table is not None:
                skipped = min(max(self._begin_closed - before, 0), table.num_rows)
                for _ in self._write_sorted(table, skipped):
                    yield
                    self._discard_merged()
                before += table.num_rows
            self._merged.append((index + 1, before))

    @override
    def close_split(self, split: str) -> None:
        if split != TRAIN_SPLIT:
            self._inner.close_split(split)

    @override
    def close(self) -> None:
        if not self._is_finished:
            for _ in self.finish():
                pass
        self._committer.shutdown()
        # The files of the shuffle stay: a run that is killed before its last phase is committed needs them. The caller
        # removes them.
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._committer.shutdown()
        self._inner.__exit__(*error)

    def _commit(self) -> None:
        """Force the rows so far to the disk, in another thread."""
        # Sizes are taken before the other thread starts: rows written meanwhile lie behind them, and `reopen` cuts them
        # off.
        rows, sizes = self._rows, self._partitions.sizes()

        def sync() -> tuple[int, list[int]]:
            self._partitions.sync()
            return rows, sizes

        self._requested_rows = rows
        self._committing = self._committer.submit(sync)

    def _discard_merged(self) -> None:
        """Remove files that the last `state` does not need."""
        last = self._merged[0][0]
        for index in range(self._num_discarded, last):
            self._partitions.discard(index)
        self._num_discarded = last

    def _write_sorted(self, table: pa.Table, skipped: int) -> Iterator[None]:
        """Write the rows of a file except for the first ones; yield after each block of them."""
        rows = table.column(ROW).to_numpy()
        order = np.lexsort((rows, table.column(PLACE).to_numpy()))[skipped:]
        block = block_from_table(table.take(pa.array(order)), self._num_labels)
        rows = rows[order]
        for start in range(0, len(rows), _WRITTEN_ROWS):
            stop = min(start + _WRITTEN_ROWS, len(rows))
            self._inner.write(TRAIN_SPLIT, rows[start:stop], slice_rows(block, start, stop))
            yield
