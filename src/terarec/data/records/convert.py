# SPDX-License-Identifier: Apache-2.0
"""Conversion of a data set to HugeCTR's files and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

from terarec.closer import stream
from terarec.data.decode import cut
from terarec.data.reader import DatasetSource
from terarec.data.records.sources import ColumnSource, RecordSource
from terarec.formats import read_dataset, write_dataset
from terarec.formats.block import ColumnBlock, slice_rows
from terarec.formats.hugectr.records import (
    RECORDS_FILE,
    ROWS_PER_FILE,
    describe_dataset,
    describe_records,
    read_records,
    write_records,
)
from terarec.formats.hugectr.split_writer import SplitRecords, add_key_offsets
from terarec.formats.shard import create_shard, shard_path
from terarec.io.directories import atomic_dir
from terarec.parallel import ordered_map
from terarec.spec import DatasetSpec, RecordOptions, RecordsSpec, ShardSpec
from terarec.spec.dataset import DatasetStorage

_THREADS = 2  # that read groups ahead of the writer


def write_as_records(
    dataset: Path, out: Path, options: RecordOptions, progress: Callable[[int, int], None] | None = None
) -> RecordsSpec:
    """Write every split of a data set as HugeCTR's files, and ``records.json``, which describes them.

    Each categorical column becomes a slot, an input of its own, in the data set's order; its rows are the slot's size.
    Labels and dense numbers are float32, but labels of RawAsync files int32. Weights and metadata are left out, as the
    files have no place for them.

    Args:
        dataset: Directory with ``dataset.json``.
        out: Directory to create.
        options: Options of the files.
        progress: Callback with (rows done, rows in all).

    Returns:
        The content of ``records.json``.

    Raises:
        ConfigError: `out` holds something; a column of any int64 keys, whose slot would have no size; more than one key
            a sample for Raw files.
        FormatError: The data set is damaged, or has labels or lists that the files cannot hold.
        StorageError: The disk is full.
    """
    spec = read_dataset(dataset)
    records = describe_records(spec, options, {split: spec.num_rows(split) for split in spec.splits})
    total = sum(split.rows for split in records.splits.values())
    done = 0
    with atomic_dir(out) as partial:
        for split in records.splits:
            source = DatasetSource(dataset, split)
            # File lists name the files by full paths: those that they will have after the directory is renamed.
            location = out.resolve() / split
            with closing(_write_split(source, records, partial / split, location, keysets=options.keysets)) as written:
                for rows in written:
                    done += rows
                    if progress is not None:
                        progress(done, total)
        write_records(records, partial / RECORDS_FILE)
    return records


@stream
def _write_split(
    source: DatasetSource, records: RecordsSpec, directory: Path, location: Path, *, keysets: bool
) -> Generator[int]:
    """Write the files of one split into `directory`, which will be at `location`; yield the rows of each block."""
    sizes = repeat(ROWS_PER_FILE.get(records.kind, 1))
    writer = SplitRecords(directory, location, records, sizes, keysets=keysets)
    try:
        with closing(ordered_map(source.read, range(len(source.group_rows)), _THREADS)) as blocks:
            for block in blocks:
                writer.write(block)
                yield block.num_rows
        writer.close()
    finally:
        # Does nothing after `close`.
        writer.abort()


_ROWS_PER_SHARD = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedRecords:
    """Report of a conversion into a data set.

    Attributes:
        dataset: Description of the data set.
        num_skipped: Records that were left out because their checksum failed.
    """

    dataset: DatasetSpec
    num_skipped: int


def write_as_dataset(
    records: Path, out: Path, *, storage: DatasetStorage = "parquet", progress: Callable[[int, int], None] | None = None
) -> ImportedRecords:
    """Write HugeCTR's files as a data set.

    A slot becomes a categorical column: of as many rows as the slot has keys, its keys from 0 on, where the layout
    gives the slots' sizes, and else of any int64 keys, for dynamic tables. Dense numbers are stored as a reader returns
    them.

    Args:
        records: Path of a ``records.json``.
        out: Directory to create.
        storage: Format of the shards.
        progress: Callback with (rows done, rows in all).

    Raises:
        ConfigError: `out` holds something.
        DataNotFoundError: A file is missing.
        FormatError: A file is damaged, or holds a key outside its slot or none where one is promised.
        StorageError: The disk is full.
    """
    spec = read_records(records)
    dataset = describe_dataset(spec, out.name, storage, {})
    total = sum(entry.rows for entry in spec.splits.values())
    done = num_skipped = 0
    with atomic_dir(out) as partial:
        splits: dict[str, tuple[ShardSpec, ...]] = {}
        for split in spec.splits:
            source = ColumnSource(spec, split, records.parent, dataset.categorical)
            left_out: list[int] = []
            shards: list[ShardSpec] = []
            for pieces in cut(_blocks(source, left_out), _ROWS_PER_SHARD, slice_of=slice_rows, skip=0, drop_last=False):
                path = shard_path(partial, dataset, split, len(shards))
                shards.append(_write_shard(path, pieces, dataset, source.key_offsets))
                done += shards[-1].rows
                if progress is not None:
                    progress(done, total)
            splits[split] = tuple(shards)
            num_skipped += sum(left_out)
        dataset = dataclasses.replace(dataset, splits=splits)
        write_dataset(dataset, partial, location=out)
    return ImportedRecords(dataset=dataset, num_skipped=num_skipped)


def _blocks(source: RecordSource, left_out: list[int]) -> Iterator[ColumnBlock]:
    """Yield the groups of `source`; append the number of records left out of each to `left_out`."""
    for block, skipped in ordered_map(source.read, range(len(source.group_rows)), _THREADS):
        left_out.append(skipped)
        yield block


def _write_shard(
    path: Path, pieces: Sequence[ColumnBlock], dataset: DatasetSpec, key_offsets: Sequence[int]
) -> ShardSpec:
    with create_shard(dataset, path) as writer:
        for piece in pieces:
            writer.write(piece.label, piece.dense, add_key_offsets(piece.keys, key_offsets))
        return writer.close()
