"""Counts of values that memory does not hold: partitions by hash on the disk, merged one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.values.count_tables import CountTable
from terarec.etl.values.partition_of import PARTITIONS, partition_of
from terarec.etl.values.value_kind import ValueKind
from terarec.io import AtomicFile

_CHUNK_VALUES = 1 << 20


class SpilledCounts:
    """Counts on the disk.

    Args:
        directory: for the files; made if absent.
        kind: of the values.
    """

    def __init__(self, directory: Path, kind: ValueKind) -> None:
        self._kind: ValueKind = kind
        self._directory = directory
        self._files: list[Path] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._files)

    def append(self, counted: pa.Table) -> None:
        """Write what `CountTable.drain` gave.

        Raises:
            StorageError: the disk is full.
        """
        file = AtomicFile(self._directory / f"{len(self._files):06d}.arrow")
        with file.guard(), pa.OSFile(str(file.partial), "wb") as sink, pa.ipc.new_file(sink, counted.schema) as writer:
            for chunk in counted.to_batches(_CHUNK_VALUES):
                for rows in _partitions(chunk.column("value")):
                    # One batch for each partition, also an empty one: batch i holds partition i mod PARTITIONS.
                    writer.write_batch(chunk.take(pa.array(rows)))
        self._files.append(file.partial)  # it ends with the phase, so nothing is gained by flushing it

    def merged(self, min_count: int) -> Iterator[pa.Table]:
        """Values that occurred at least `min_count` times, partition by partition; columns value and count."""
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
    """Positions of the values of each partition."""
    partition = partition_of(values).astype(np.uint8)
    ends = np.cumsum(np.bincount(partition, minlength=PARTITIONS))
    return np.split(np.argsort(partition, kind="stable"), ends[:-1])
