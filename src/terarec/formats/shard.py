# SPDX-License-Identifier: Apache-2.0
"""Shards of a split: the base of their writers, the registry of their formats, and how a split is cut into files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa
from numpy.typing import NDArray

from terarec.formats.block import ColumnBlock, Keys, check_rows, slice_rows
from terarec.io.files import AtomicFile
from terarec.spec import DatasetSpec, ShardSpec
from terarec.spec.registry import Registry


class Shard(Protocol):
    """Data file, read group by group."""

    path: Path
    num_rows: int
    group_rows: tuple[int, ...]

    def read_group(self, index: int) -> ColumnBlock:
        """Return the checked rows of row group `index`; safe to call from several threads."""
        ...


class ShardWriter(ABC):
    """Writer of a shard of a split. As a context manager it removes the file unless `close` was called inside.

    Args:
        path: ``<data set>/<split>/<file>``; the file appears when the writer is closed.
        spec: Columns of the data set.
    """

    def __init__(self, path: Path, spec: DatasetSpec) -> None:
        self._spec = spec
        self._file = AtomicFile(path)
        self._num_rows = 0
        self._open = True

    def write(
        self,
        label: NDArray[Any],
        dense: NDArray[Any],
        keys: Sequence[Keys],
        weight: NDArray[Any] | None = None,
        metadata: Sequence[pa.Array] = (),
    ) -> None:
        """Append n rows. The NumPy arrays are copied and may be used again.

        Args:
            label: float32[n, L].
            dense: float32[n, F]; any strides.
            keys: For each categorical column integers[n], or n lists of them where hotness > 1.
            weight: float32[n], where the data set has a weight column.
            metadata: For each metadata column an Arrow array of n int64, double or large_string.

        Raises:
            FormatError: A wrong shape, a key outside its column's rows, or a weight that is negative or not finite;
                nothing was appended.
            StorageError: The disk is full; the partial file is gone.
        """
        self.write_block(
            ColumnBlock(label=label, dense=dense, keys=tuple(keys), weight=weight, metadata=tuple(metadata))
        )

    def write_block(self, block: ColumnBlock) -> None:
        """Append the rows of `block`; see `write`.

        Raises:
            FormatError, StorageError: As `write`.
        """
        where = str(self._file.path)
        weight, metadata = block.weight, block.metadata
        # Before anything is copied, so that an error leaves the file as it was.
        num_rows = check_rows(self._spec, block.label, block.dense, block.keys, where, weight=weight, metadata=metadata)
        self._append(block)
        self._num_rows += num_rows

    def close(self) -> ShardSpec:
        """Finish the file and rename it into place.

        Returns:
            The shard's entry for ``DatasetSpec.splits``.

        Raises:
            StorageError: The disk is full; the partial file is gone.
        """
        self._finish()
        self._file.commit()
        self._open = False
        path = self._file.path
        return ShardSpec(file=f"{path.parent.name}/{path.name}", rows=self._num_rows)

    def abort(self) -> None:
        """Remove the unfinished file."""
        if self._open:
            self._open = False
            # First: a file that is open cannot be removed on every system, and its buffers may still be written.
            self._discard()
            self._file.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @abstractmethod
    def _append(self, rows: ColumnBlock) -> None:
        """Write or buffer checked rows."""

    @abstractmethod
    def _finish(self) -> None:
        """Write buffered rows and close the partial file."""

    @abstractmethod
    def _discard(self) -> None:
        """Close the partial file, which is about to be removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFormat:
    """Format of the shards of a data set.

    Attributes:
        suffix: Suffix of the files.
        open: Function of (path, spec, rows or None) that opens a shard; see `open_shard`.
        create: Function of (path, spec) that creates the writer of a shard.
    """

    suffix: str
    open: Callable[[Path, DatasetSpec, int | None], Shard]
    create: Callable[[Path, DatasetSpec], ShardWriter]


SHARD_FORMATS: Registry[ShardFormat] = Registry("storage")
"""Name -> format; the module of each adds it."""


def shard_path(directory: Path, spec: DatasetSpec, split: str, index: int) -> Path:
    """Return the path of shard `index`: ``<directory>/<split>/part-00000.parquet`` or ``.bin``."""
    return directory / split / f"part-{index:05d}{SHARD_FORMATS[spec.storage].suffix}"


def open_shard(spec: DatasetSpec, path: Path, num_rows: int | None = None) -> Shard:
    """Open a shard of a data set whose columns and storage are `spec`'s.

    Args:
        spec: Description of the data set.
        path: Path of the file.
        num_rows: Rows that ``dataset.json`` promises; None for the file's own number.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: The file does not hold what `spec` promises.
    """
    return SHARD_FORMATS[spec.storage].open(path, spec, num_rows)


def create_shard(spec: DatasetSpec, path: Path) -> ShardWriter:
    """Create a writer for a new shard at `path`, in `spec`'s storage; see `ShardWriter`."""
    return SHARD_FORMATS[spec.storage].create(path, spec)


def even_sizes(total: int | None, most: int) -> Iterator[int]:
    """Yield the rows of each file, at most `most`; for a known `total` they differ by at most one.

    Without it all files but the last are full. The iterator has no end, in case there are more rows than `total`.
    """
    if total:
        files = -(-total // most)
        size, larger = divmod(total, files)
        for index in range(files):
            yield size + (index < larger)
    while True:
        yield most


class FileWriter(Protocol):
    """Writer of one file, which appears when it is closed."""

    def write_block(self, block: ColumnBlock) -> None:
        """Append the rows of `block`."""
        ...

    def close(self) -> object:
        """Finish the file."""
        ...

    def abort(self) -> None:
        """Remove the unfinished file."""
        ...


class SplitFiles:
    """Files of one split, one after the other. A thread finishes a full one, which waits for the disk.

    Attributes:
        files: Path and rows of each full file, and after `close` of all.
    """

    def __init__(
        self,
        create: Callable[[int], tuple[Path, FileWriter]],
        sizes: Iterator[int],
        closed: Sequence[tuple[Path, int]] = (),
    ) -> None:
        self.files: list[tuple[Path, int]] = list(closed)
        self._create = create
        # The closed files have had the first sizes.
        self._sizes = islice(sizes, len(closed), None)
        self._open: tuple[Path, FileWriter] | None = None
        self._size = self._rows = 0
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._finishing: Future[object] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows so far."""
        return sum(rows for _, rows in self.files) + self._rows

    @property
    def closed_rows(self) -> list[int]:
        """Rows of each file that is closed and on the disk, so that it survives a kill."""
        last = self._finishing
        # Only the last file can be unfinished: earlier files were waited for.
        is_closed = last is None or (last.done() and last.exception() is None)
        return [rows for _, rows in (self.files if is_closed else self.files[:-1])]

    def write(self, block: ColumnBlock) -> None:
        """Append the rows of `block`."""
        start = 0
        while start < block.num_rows:
            if self._open is None:
                self._open = self._create(len(self.files))
                self._size = next(self._sizes)
            count = min(self._size - self._rows, block.num_rows - start)
            # Views: the writer copies or writes them before it returns.
            self._open[1].write_block(slice_rows(block, start, start + count))
            start += count
            self._rows += count
            if self._rows == self._size:
                self._finish()

    def close(self) -> None:
        """Finish the last file."""
        self._finish()
        self._wait()
        self._finisher.shutdown()

    def abort(self) -> None:
        """Remove the unfinished file."""
        # The file that it is finishing stays: it is complete.
        self._finisher.shutdown()
        if self._open is not None:
            self._open[1].abort()

    def _finish(self) -> None:
        if self._open is not None:
            path, writer = self._open
            # One file at a time is finished in the background, so that memory is bounded and an error surfaces here.
            self._wait()
            self._finishing = self._finisher.submit(_close, writer)
            self.files.append((path, self._rows))
            self._open, self._rows = None, 0

    def _wait(self) -> None:
        if self._finishing is not None:
            self._finishing.result()


def _close(writer: FileWriter) -> None:
    try:
        writer.close()
    except BaseException:
        writer.abort()  # no other reference is left
        raise
