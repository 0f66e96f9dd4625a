# SPDX-License-Identifier: Apache-2.0
"""Data sets of ratings: the latest of each user for the test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter, arrow_errors
from terarec.io.directories import atomic_dir
from terarec.io.opening import arrow_file
from terarec.spec import CategoricalColumn, DatasetSpec, LabelColumn, ShardSpec
from terarec.spec.dataset import FIRST_ID

USER, ITEM, LABEL = "user", "item", "taken"
"""Columns of a sample, whose label is 1."""

Integers = NDArray[np.int64]


def prepare_ratings(file: Path, out: Path, *, test: float) -> None:
    """Write the data set of a file of ratings, atomically; all rated items are alike, whatever their rating.

    Of the n ratings of a user, round((1 - test) n), the earliest, are for training. Ratings of the test whose user or
    item is not in the train split are left out.

    Args:
        file: A user, an item, a rating and a time in each line, all numbers with a tab between them; a first line with
            names is passed over. Plain or compressed.
        out: Directory to write.
        test: Share of the ratings of a user for the test.

    Raises:
        FormatError: A line of another form, with its number, or no ratings.
    """
    users, items, times = _read(file).T
    order = np.lexsort((times, users))  # stable: of equal times the earlier line comes first
    _, counts = np.unique(users, return_counts=True)
    place = np.arange(len(users)) - np.repeat(counts.cumsum() - counts, counts)
    is_train = place < np.repeat(np.round((1.0 - test) * counts), counts)
    splits = {"train": order[is_train], "test": order[~is_train]}
    columns = {}
    for name, values in ((USER, users), (ITEM, items)):
        known = np.unique(values[splits["train"]])
        splits["test"] = splits["test"][np.isin(values[splits["test"]], known)]
        columns[name] = (known, np.searchsorted(known, values) + FIRST_ID)
    spec = DatasetSpec(
        name=file.name.partition(".")[0],
        storage="parquet",
        labels=(LabelColumn(name=LABEL),),
        dense=(),
        categorical=tuple(
            CategoricalColumn(name=name, rows=FIRST_ID + len(known)) for name, (known, _) in columns.items()
        ),
    )
    with atomic_dir(out) as partial:
        shards = {}
        for split, rows in splits.items():
            name = f"{split}/part-00000.parquet"
            writer = ParquetShardWriter(partial / name, spec)
            keys = [ids[rows] for _, ids in columns.values()]
            writer.write(np.ones((len(rows), 1), np.float32), np.empty((len(rows), 0), np.float32), keys)
            writer.close()
            shards[split] = (ShardSpec(file=name, rows=len(rows)),)
        write_dataset(replace(spec, splits=shards), partial, location=out)


def _read(file: Path) -> Integers:
    """Return users, items and times: int64[n, 3]."""
    ratings = []
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        words = line.split("\t")
        try:
            user, item, time = int(words[0]), int(words[1]), int(float(words[3]))
            float(words[2])
        except (ValueError, IndexError, OverflowError):
            if number == 1 and len(words) == 4:  # the names
                continue
            got = line if len(line) <= 60 else f"{line[:60]}..."
            expected = "a user, an item, a rating and a time, all numbers, with a tab between them"
            raise FormatError(file, f"line {number}", f"got {got!r}, expected {expected}") from None
        ratings.append((user, item, time))
    if not ratings:
        raise FormatError(file, "has no ratings, expected one in each line")
    return np.array(ratings, dtype=np.int64)


def read_text(file: Path) -> str:
    """Return the text of a file, plain or compressed."""
    import pyarrow as pa

    kind = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}.get(file.suffix)
    with arrow_errors(str(file)), arrow_file(file) as source:
        text = source.read() if kind is None else pa.CompressedInputStream(source, kind).read()
    return bytes(text).decode(errors="replace")
