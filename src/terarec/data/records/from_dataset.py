"""A terarec data set -> HugeCTR's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

from terarec.data.source import DatasetSource
from terarec.formats import read_dataset
from terarec.formats.hugectr import (
    RECORDS_FILE,
    ROWS_PER_FILE,
    RecordOptions,
    SplitRecords,
    describe_records,
    write_records,
)
from terarec.io import atomic_dir
from terarec.parallel import ordered_map
from terarec.spec import RecordsSpec

_THREADS = 2

Progress = Callable[[int, int], None]


def write_as_records(dataset: Path, out: Path, options: RecordOptions, progress: Progress | None = None) -> RecordsSpec:
    """Write every split of a data set as HugeCTR's files, and ``records.json``, which says what they hold.

    Each categorical column becomes a slot, an input of its own, in the data set's order; its rows are the slot's size.
    Labels and dense numbers are float32, but labels of RawAsync files int32. Weights and metadata are left out, as the
    files have no place for them.

    Args:
        dataset: directory with ``dataset.json``.
        out: directory to make.
        options: what files to write.
        progress: called with (rows done, rows in all).

    Returns:
        The content of ``records.json``.

    Raises:
        ConfigError: `out` holds something; a column of any int64 keys, whose slot would have no size; more than one key
            a sample for Raw files.
        FormatError: the data set is damaged, or has labels or lists that the files cannot hold.
        StorageError: the disk is full.
    """
    spec = read_dataset(dataset)
    records = describe_records(spec, options, {split: spec.num_rows(split) for split in spec.splits})
    total = sum(split.rows for split in records.splits.values())
    done = 0
    with atomic_dir(out) as partial:
        for split in records.splits:
            source = DatasetSource(dataset, split)
            location = out.resolve() / split
            for rows in _write_split(source, records, partial / split, location, keysets=options.keysets):
                done += rows
                if progress is not None:
                    progress(done, total)
        write_records(records, partial / RECORDS_FILE)
    return records


def _write_split(
    source: DatasetSource, records: RecordsSpec, directory: Path, location: Path, *, keysets: bool
) -> Iterator[int]:
    """Write the files of one split into `directory`, which will be at `location`; gives the rows of each block."""
    sizes = repeat(ROWS_PER_FILE.get(records.kind, 1))
    writer = SplitRecords(directory, location, records, sizes, keysets=keysets)
    try:
        for block in ordered_map(source.read, range(len(source.group_rows)), _THREADS):
            writer.write(block)
            yield block.num_rows
        writer.close()
    finally:
        writer.abort()
