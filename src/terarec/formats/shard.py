"""Shards of a split: one way to open and create them, and to cut rows into files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from terarec.formats.block import ColumnBlock, slice_rows
from terarec.formats.parquet import ParquetShard, ParquetShardWriter
from terarec.formats.raw import RawShard, RawShardWriter
from terarec.formats.writer import ShardWriter
from terarec.spec import DatasetSpec
from terarec.spec.registry import Registry


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

    Args:
        create: Function that creates the writer of a file by its number.
        sizes: Rows of each file, without end.
        closed: Path and rows of the files that an interrupted run closed.

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
        is_closed = last is None or (last.done() and last.exception() is None)
        return [rows for _, rows in (self.files if is_closed else self.files[:-1])]

    def write(self, block: ColumnBlock) -> None:
        """Append the rows of `block`.

        Raises:
            StorageError: The disk is full.
        """
        start = 0
        while start < block.num_rows:
            if self._open is None:
                self._open = self._create(len(self.files))
                self._size = next(self._sizes)
            count = min(self._size - self._rows, block.num_rows - start)
            self._open[1].write_block(slice_rows(block, start, start + count))
            start += count
            self._rows += count
            if self._rows == self._size:
                self._finish()

    def close(self) -> None:
        """Finish the last file.

        Raises:
            StorageError: The disk is full.
        """
        self._finish()
        self._wait()
        self._finisher.shutdown()

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._finisher.shutdown()
        if self._open is not None:
            self._open[1].abort()

    def _finish(self) -> None:
        if self._open is not None:
            path, writer = self._open
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


class Shard(Protocol):
    """Data file, read group by group.

    Attributes:
        path: Path of the file.
        num_rows: Samples in the file.
        group_rows: Samples in each row group.
    """

    path: Path
    num_rows: int
    group_rows: tuple[int, ...]

    def read_group(self, index: int) -> ColumnBlock:
        """Return the checked rows of row group `index`; safe to call from several threads."""
        ...


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


_FORMATS = {
    "parquet": ShardFormat(suffix=".parquet", open=ParquetShard, create=ParquetShardWriter),
    "raw": ShardFormat(suffix=".bin", open=RawShard, create=RawShardWriter),
}
SHARD_FORMATS = Registry("storage", _FORMATS)


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
