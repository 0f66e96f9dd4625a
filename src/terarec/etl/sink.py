# SPDX-License-Identifier: Apache-2.0
"""Write encoded rows as a data set or as HugeCTR's files, in their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from terarec.etl.columns import SPLIT_NAMES, TRAIN
from terarec.formats import write_dataset
from terarec.formats.block import ColumnBlock
from terarec.formats.hugectr.records import RECORDS_FILE, describe_records, write_records
from terarec.formats.hugectr.split_writer import SplitRecords, record_files
from terarec.formats.parts import write_parts
from terarec.formats.shard import FileWriter, SplitFiles, create_shard, even_sizes, shard_path
from terarec.spec import DatasetSpec, RecordOptions, ShardSpec
from terarec.spec.dataset import RecordKind

TRAIN_SPLIT = SPLIT_NAMES[TRAIN]


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkState:
    """The part of a sink's output that is on the disk, so that it survives a kill.

    Attributes:
        closed: Split -> rows of each closed shard.
        spilled_rows: Rows of the train split in the files of the shuffle.
        spilled_bytes: Bytes of each of these files; empty without a shuffle.
        merged_files: Number of first files whose rows are all in closed shards.
        merged_rows: Rows of these files.
    """

    closed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    spilled_rows: int = 0
    spilled_bytes: Sequence[int] = ()
    merged_files: int = 0
    merged_rows: int = 0

    @property
    def num_rows(self) -> dict[str, int]:
        """Split -> its first rows that `Sink.write` need not get again."""
        rows = {split: sum(shards) for split, shards in self.closed.items()}
        return {**rows, TRAIN_SPLIT: self.spilled_rows} if self.spilled_bytes else rows


class Sink(Protocol):
    """Writes encoded rows to files. As a context manager it removes files that are not closed."""

    def write(self, split: str, rows: NDArray[np.int64], block: ColumnBlock) -> None:
        """Append rows to `split`.

        Args:
            split: Split: "train", "valid" or "test".
            rows: Row ids, int64[n].
            block: Rows.
        """
        ...

    def state(self) -> SinkState:
        """Return the output that is on the disk."""
        ...

    def finish(self) -> Iterator[None]:
        """Write the rows that waited for the last one; yield whenever `state` may have changed."""
        ...

    def close_split(self, split: str) -> None:
        """Finish the files of `split`, which gets no further rows, if that does not depend on other splits."""
        ...

    def close(self) -> None:
        """Finish all data files, and the files that describe them."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOptions:
    """Parts of the train split.

    Attributes:
        count: Number of parts; None for none.
        keysets: Whether to write the distinct keys of each.
    """

    count: int | None = None
    keysets: bool = False

    def rows_per_shard(self, most: int, rows: int | None) -> int:
        """Return the most rows of a file, so that there is one for each part: a part begins with a row group."""
        return min(most, max(1, -(-rows // self.count))) if self.count and rows else most

    def write(self, spec: DatasetSpec, directory: Path) -> None:
        """Write the parts of a data set without them.

        Raises:
            ConfigError: No training sample.
            StorageError: The disk is full.
        """
        if self.count is not None:
            write_parts(spec, directory, TRAIN_SPLIT, self.count, keysets=self.keysets)


RECORD_STORAGES: Mapping[str, RecordKind] = {
    "norm": "norm",
    "hugectr_parquet": "parquet",
    "hugectr_raw": "raw",
    "hugectr_raw_async": "raw_async",
}
"""Storage -> the kind of HugeCTR's files; other storages are a data set's own."""


def closed_files(directory: Path, spec: DatasetSpec, storage: str, closed: Mapping[str, Sequence[int]]) -> set[Path]:
    """Return the files of the shards that an interrupted run closed; `closed` as in `SinkState`."""
    shards = [(split, index) for split, rows in closed.items() for index in range(len(rows))]
    if storage not in RECORD_STORAGES:
        return {shard_path(directory, spec, split, index) for split, index in shards}
    kind = RECORD_STORAGES[storage]
    return {path for split, index in shards for path in record_files(directory / split, kind, index)}


class SplitWriter(Protocol):
    """Writes the files of one split, one after the other."""

    @property
    def closed_rows(self) -> Sequence[int]:
        """Rows of each file that is on the disk, so that it survives a kill."""
        ...

    def write(self, block: ColumnBlock) -> None:
        """Append rows."""
        ...

    def close(self) -> None:
        """Finish the last file, and those common to all; a second call has no effect."""
        ...

    def abort(self) -> None:
        """Remove the unfinished file."""
        ...


class FileSink(Sink):
    """Writes each split to files of its own, in the order of the rows; see `Sink`."""

    def __init__(self, splits: Mapping[str, SplitWriter], describe: Callable[[], None]) -> None:
        self._splits = splits
        self._describe = describe

    @override
    def write(self, split: str, rows: NDArray[np.int64], block: ColumnBlock) -> None:
        # Rows come in the order of the files, so their ids are not needed; a shuffle places rows by them.
        del rows
        self._splits[split].write(block)

    @override
    def state(self) -> SinkState:
        # Raw and RawAsync files hold a whole split: they survive a kill after its last row alone.
        return SinkState(closed={name: files.closed_rows for name, files in self._splits.items()})

    @override
    def finish(self) -> Iterator[None]:
        return iter(())

    @override
    def close_split(self, split: str) -> None:
        self._splits[split].close()

    @override
    def close(self) -> None:
        for files in self._splits.values():
            files.close()
        # Last: a description is what makes the files a data set.
        self._describe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Without effect after `close`.
        for files in self._splits.values():
            files.abort()


def ordered_sink(
    spec: DatasetSpec,
    directory: Path,
    location: Path,
    storage: str,
    rows_per_shard: int,
    expected: Mapping[str, int],
    closed: Mapping[str, Sequence[int]] = MappingProxyType({}),
    parts: PartOptions = PartOptions(),  # frozen
) -> FileSink:
    """Return the sink for rows that arrive in the order of the files.

    Args:
        spec: Columns.
        directory: Directory to write.
        location: Final place of the directory, which HugeCTR's file lists name.
        storage: "parquet", "raw", or one of `RECORD_STORAGES`.
        rows_per_shard: Maximum number of rows of a file; HugeCTR's Norm and Parquet files are parts with a keyset each.
        expected: Rows of each split, where they are known: its files get equally many then.
        closed: Rows of the files of each split that an interrupted run closed.
        parts: Parts of the train split of a data set.

    Raises:
        ConfigError: Columns that the storage cannot hold.
        FormatError: A keyset of the interrupted run is damaged.
    """
    if storage in RECORD_STORAGES:
        kind = RECORD_STORAGES[storage]
        return _records_sink(spec, directory, location, kind, rows_per_shard, expected, closed)
    most = dict.fromkeys(SPLIT_NAMES, rows_per_shard)
    most[TRAIN_SPLIT] = parts.rows_per_shard(rows_per_shard, expected.get(TRAIN_SPLIT))
    splits = {
        name: _shard_files(directory, spec, name, even_sizes(expected.get(name), most[name]), closed.get(name, ()))
        for name in SPLIT_NAMES
    }

    def describe() -> None:
        shards = {
            name: tuple(ShardSpec(file=f"{name}/{path.name}", rows=rows) for path, rows in files.files)
            for name, files in splits.items()
            if files.files
        }
        whole = dataclasses.replace(spec, splits=shards)
        write_dataset(whole, directory, location=location)
        parts.write(whole, directory)

    return FileSink(splits, describe)


def _shard_files(
    directory: Path, spec: DatasetSpec, split: str, sizes: Iterator[int], closed: Sequence[int]
) -> SplitFiles:
    """Return the writer of a data set's `split`."""

    def path_of(index: int) -> Path:
        return shard_path(directory, spec, split, index)

    def create(index: int) -> tuple[Path, FileWriter]:
        return path_of(index), create_shard(spec, path_of(index))

    return SplitFiles(create, sizes, [(path_of(index), rows) for index, rows in enumerate(closed)])


def _records_sink(
    spec: DatasetSpec,
    directory: Path,
    location: Path,
    kind: RecordKind,
    rows_per_file: int,
    expected: Mapping[str, int],
    closed: Mapping[str, Sequence[int]],
) -> FileSink:
    """Return the sink for files of one of HugeCTR's kinds; see `ordered_sink`."""
    options = RecordOptions(kind=kind, keysets=True)
    records = describe_records(spec, options, {})
    splits = {
        name: SplitRecords(
            directory / name,
            location / name,
            records,
            even_sizes(expected.get(name), rows_per_file),
            keysets=True,
            closed=closed.get(name, ()),
        )
        for name in SPLIT_NAMES
    }

    def describe() -> None:
        rows = {name: files.num_rows for name, files in splits.items()}
        write_records(describe_records(spec, options, rows), directory / RECORDS_FILE)

    return FileSink(splits, describe)
