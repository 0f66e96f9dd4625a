# SPDX-License-Identifier: Apache-2.0
"""Readers of either type of data: a prepared data set, or HugeCTR's files that a ``records.json`` describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terarec.data.description import read_spec, records_file
from terarec.data.reader import BatchReader, DatasetSource, Reader
from terarec.data.records.reader import RecordReader
from terarec.data.records.sources import ColumnSource
from terarec.data.sampling import RankShare
from terarec.errors import ConfigError
from terarec.formats.hugectr.records import read_records


def open_reader(
    path: str | Path,
    split: str = "train",
    *,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    threads: int = 1,
    repeat: bool = False,
    by_parts: bool = False,
    share: RankShare | None = None,
) -> BatchReader:
    """Open a split of a prepared data set or of HugeCTR's files.

    Batches have the columns that `read_spec` describes, with keys from 0 on in each column of known rows, or those that
    ``keys`` of a ``records.json`` requests.

    Args:
        path: Directory of a prepared data set, directory with a ``records.json``, or such a file.
        split: Split to read.
        batch_size: Samples B in a batch.
        shuffle: Whether the order is random, a new one in every epoch.
        seed: Shuffle seed.
        drop_last: Whether a last batch of fewer samples is left out.
        threads: Threads that read and decode ahead.
        repeat: Whether each epoch follows the previous one without an end.
        by_parts: Whether the parts of a prepared data set come one after the other.
        share: The rank that reads its samples of each batch; None for whole batches.

    Raises:
        DataNotFoundError: No such path, a directory without either description, no parts, or a file is missing.
        FormatError: A file does not hold what the description promises; also while iterating. No samples to repeat.
        ConfigError: No such split, or an argument out of range.
    """
    records = records_file(Path(path))
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seed": seed,
        "drop_last": drop_last,
        "repeat": repeat,
        "threads": threads,
    }
    reader: BatchReader
    if records is None:
        reader = Reader(DatasetSource(Path(path), split, by_parts=by_parts), **options)
    elif by_parts:
        raise ConfigError(records, "got by_parts=True for HugeCTR's files, expected a prepared data set with parts")
    else:
        spec = read_records(records)
        source = ColumnSource(spec, split, records.parent, read_spec(records).categorical)
        reader = RecordReader(source, shuffles_rows=spec.shuffles_rows, **options)
    if share is not None:
        # After the reader is made, so that both kinds check their arguments before they divide anything.
        reader.take_share(share)
    return reader
