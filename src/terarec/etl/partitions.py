"""Rows on the disk in so many files, for work on more rows than fit in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_BUFFERED_ROWS = 1 << 17
"""Rows gathered before they are scattered, so that each of hundreds of files gets hundreds of them at once."""


class Partitions:
    """Files of record batches. Each is opened for as long as a write takes, so that their number is not bounded.

    Args:
        directory: of the files.
        count: number of files.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self.count = count
        self._directory = directory
        self._waiting: list[tuple[pa.RecordBatch, NDArray[np.int64]]] = []
        self._waiting_rows = 0

    @classmethod
    def make(cls, directory: Path, count: int) -> Self:
        """Empty files; what an earlier run left in `directory` is thrown away."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return cls(directory, count)

    def scatter(self, batch: pa.RecordBatch, partition: NDArray[np.int64]) -> None:
        """Append every row of `batch` to the file that ``partition int64[n]`` names; rows keep their order.

        They are gathered in memory first; `flush` writes them, and so does whatever reads.

        Raises:
            OSError: the disk is full.
        """
        self._waiting.append((batch, partition))
        self._waiting_rows += batch.num_rows
        if self._waiting_rows >= _BUFFERED_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what `scatter` gathered.

        Raises:
            OSError: the disk is full.
        """
        if not self._waiting_rows:
            return
        batch = pa.Table.from_batches([batch for batch, _ in self._waiting]).combine_chunks().to_batches()[0]
        partition = np.concatenate([partition for _, partition in self._waiting])
        self._waiting, self._waiting_rows = [], 0
        sorted_batch = batch.take(pa.array(np.argsort(partition, kind="stable")))
        start = 0
        for index, end in enumerate(np.cumsum(np.bincount(partition, minlength=self.count)).tolist()):
            if end > start:
                self.append(index, sorted_batch.slice(start, end - start))
            start = end

    def append(self, index: int, batch: pa.RecordBatch) -> None:
        """Append `batch` to file `index`.

        Raises:
            OSError: the disk is full.
        """
        # Serialised first, because Python's own write tells a full disk by its error number.
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, batch.schema) as stream:
            stream.write_batch(batch)
        with self._path(index).open("ab") as file:
            file.write(buffer.getvalue())

    def read(self, index: int) -> pa.Table | None:
        """All rows of file `index`, in the order in which they came; None if there are none."""
        batches = list(self.batches(index))
        return pa.Table.from_batches(batches) if batches else None

    def batches(self, index: int) -> Iterator[pa.RecordBatch]:
        """Yield the batches of file `index` as they were appended; rows in memory are written before."""
        self.flush()
        path = self._path(index)
        if path.exists():
            with pa.OSFile(str(path)) as file:
                while file.tell() < file.size():
                    with pa.ipc.open_stream(file) as stream:
                        yield from stream

    def discard(self, index: int) -> None:
        """Remove file `index`."""
        self._path(index).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self._directory / f"{index:05d}.arrows"
