"""Shards of a split: how they are opened, created and cut, and parts of a split with the keys that each holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.block import ColumnBlock, slice_rows
from terarec.formats.container import read_tensors, write_tensors
from terarec.formats.parquet import ParquetShard, ParquetShardWriter
from terarec.formats.raw import RawShard, RawShardWriter
from terarec.formats.writer import ShardWriter
from terarec.io import read_versioned_json, write_versioned_json
from terarec.ragged import flat_values
from terarec.spec import DatasetSpec, checks, from_data, to_data
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


_logger = logging.getLogger(__name__)

PARTS_FILE = "_parts.json"
"""Description of the parts in the directory of their split; like all other files that begin with "_", no shard."""
_FORMAT = "terarec.parts"
_VERSION = 1
_MERGED_AT = 1 << 22  # keys of a column that wait to be merged: 32 MiB


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """Consecutive row groups of a split.

    Attributes:
        groups: Number of row groups.
        rows: Samples in them.
        keyset: File of their keys in the directory of the split; None where none was written.
        sha256: Checksum of that file.
    """

    groups: int
    rows: int
    keyset: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        checks.positive_int(self, "groups")
        checks.positive_int(self, "rows", minimum=0)
        if self.keyset is not None:
            checks.inner_path(self, "keyset")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsSpec:
    """Parts of a split, in the order of its samples: the content of its parts file."""

    parts: tuple[PartSpec, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            checks.reject(self, "parts", "got none, expected at least one")


def write_parts(
    spec: DatasetSpec, directory: Path, split: str, count: int, *, keysets: bool = True
) -> tuple[PartSpec, ...]:
    """Divide a split into parts of about equally many samples and write their description, and the keys of each.

    Samples stay where they are: a part is a range of row groups.

    Args:
        spec: Description of the data set.
        directory: Directory of the data set.
        split: Split to divide.
        count: Number of parts. Where the split has fewer row groups, each is a part, and a warning says so.
        keysets: Whether to write the distinct keys of each part.

    Raises:
        ConfigError: No such split, one without samples, or a count below 1.
        FormatError: A shard does not hold what `spec` promises.
        StorageError: The disk is full.
    """
    groups = [(shard, index) for shard in _open(spec, directory, split) for index in range(len(shard.group_rows))]
    if count < 1 or not groups:
        raise ConfigError("parts", f"got {count} for split {split!r} of {len(groups)} row groups, expected at least 1")
    if count > len(groups):
        _logger.warning("parts: %d requested, split %r has %d row groups", count, split, len(groups))
        count = len(groups)
    parts = []
    for number, (start, stop) in enumerate(_ranges([shard.group_rows[index] for shard, index in groups], count)):
        mine = groups[start:stop]
        file = digest = None
        if keysets:
            file = f"_part-{number:05d}.keyset"
            digest = write_tensors(directory / split / file, _distinct_keys(spec, mine))
        rows = sum(shard.group_rows[index] for shard, index in mine)
        parts.append(PartSpec(groups=len(mine), rows=rows, keyset=file, sha256=digest))
    found = PartsSpec(parts=tuple(parts))
    write_versioned_json(directory / split / PARTS_FILE, _FORMAT, _VERSION, to_data(found))
    return found.parts


def read_parts(directory: Path, split: str) -> tuple[PartSpec, ...]:
    """Read the parts of a split.

    Raises:
        DataNotFoundError: The split has no parts.
        FormatError: Their description is damaged.
    """
    path = directory / split / PARTS_FILE
    if not path.is_file():
        raise DataNotFoundError(
            directory, f"split {split!r} has no parts, expected a data set of 'terarec prepare ... --parts N'"
        )
    try:
        return from_data(PartsSpec, read_versioned_json(path, _FORMAT, _VERSION)).parts
    except ConfigError as error:
        raise FormatError(path, f"{error}") from None


def read_part_keys(directory: Path, split: str, part: PartSpec) -> dict[str, NDArray[np.int64]]:
    """Read the distinct keys of a part: column -> int64[n], ascending.

    Raises:
        DataNotFoundError: The part has no keyset, or the file is missing.
        FormatError: The file is damaged.
    """
    if part.keyset is None:
        raise DataNotFoundError(directory, f"a part of split {split!r} has no keyset, expected parts with keysets")
    path = directory / split / part.keyset
    arrays, _ = read_tensors(path, sha256=part.sha256)
    for name, keys in arrays.items():
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise FormatError(path, f"keys of {name!r} are {keys.dtype}{list(keys.shape)}, expected int64[n]")
    return arrays


def _open(spec: DatasetSpec, directory: Path, split: str) -> list[Shard]:
    return [open_shard(spec, directory / entry.file, entry.rows) for entry in spec.shards(split)]


def _ranges(group_rows: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return the first and the last group (exclusive) of each part, none of them empty, of nearly equal rows."""
    ends = np.asarray([*accumulate(group_rows)], dtype=np.int64)
    cuts = [0]
    for number in range(1, count):
        wanted = ends[-1] * number / count
        nearest = int(np.abs(ends - wanted).argmin()) + 1
        cuts.append(min(max(nearest, cuts[-1] + 1), len(ends) - (count - number)))
    return list(zip(cuts, [*cuts[1:], len(ends)], strict=True))


def _distinct_keys(spec: DatasetSpec, groups: Sequence[tuple[Shard, int]]) -> Mapping[str, NDArray[np.int64]]:
    waiting: list[list[NDArray[np.int64]]] = [[] for _ in spec.categorical]
    for shard, index in groups:
        for pieces, column in zip(waiting, shard.read_group(index).keys, strict=True):
            pieces.append(np.unique(flat_values(column)).astype(np.int64, copy=False))
            if sum(len(piece) for piece in pieces[1:]) > max(_MERGED_AT, len(pieces[0])):
                pieces[:] = [np.unique(np.concatenate(pieces))]
    return {
        column.name: np.unique(np.concatenate([np.empty(0, np.int64), *pieces]))
        for column, pieces in zip(spec.categorical, waiting, strict=True)
    }
