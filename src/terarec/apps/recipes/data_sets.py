# SPDX-License-Identifier: Apache-2.0
"""Data sets of one file: sequences, of which each user's last items are left out, and ratings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter, arrow_errors
from terarec.io.directories import atomic_dir
from terarec.io.opening import arrow_file
from terarec.ragged import ArrayLists, Ragged, offsets_of
from terarec.spec import CategoricalColumn, DatasetSpec, LabelColumn, ShardSpec
from terarec.spec.checks import quoted
from terarec.spec.dataset import FIRST_ID

USER, ITEM, HISTORY = "user", "item", "history"
"""Columns of a sample: a user, or the items before its item."""

_FEWEST_ITEMS = 3
_LAST_ITEMS = {"train": 3, "valid": 2, "test": 1}
"""Split -> how many items from the end of a sequence its sample's item is."""

Integers = NDArray[np.int64]


def prepare_sequences(file: Path, out: Path) -> None:
    """Write the data set of a file of sequences, atomically.

    A sample of the train split has the last item but two and those before it; the history of the validation ends
    there, and that of the test one item later. A user with three items, and so without a history to train on, has an
    empty one.

    Args:
        file: A line a user: the user's number, and at least three numbers of items, which are 1 or higher, in the order
            of time. Plain or compressed.
        out: Directory to write.

    Raises:
        FormatError: A line of another form, with its number.
    """
    sequences = _read_sequences(file)
    longest = max(len(items) for items in sequences)
    rows = 1 + max(int(items.max()) for items in sequences)
    columns = (
        CategoricalColumn(name=ITEM, rows=rows),
        # A list has room for two keys at least.
        CategoricalColumn(name=HISTORY, rows=rows, hotness=max(2, longest - 1)),
    )
    splits: dict[str, list[Integers | ArrayLists]] = {}
    for split, last in _LAST_ITEMS.items():
        histories = [items[:-last] for items in sequences]
        splits[split] = [
            np.array([items[-last] for items in sequences], dtype=np.int64),
            Ragged(np.concatenate(histories), offsets_of(np.array([len(items) for items in histories]))),
        ]
    _write(file, out, "next", columns, splits)


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
    users, items, times = _read_ratings(file).T
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
    _write(
        file,
        out,
        "taken",
        [CategoricalColumn(name=name, rows=FIRST_ID + len(known)) for name, (known, _) in columns.items()],
        {split: [ids[rows] for _, ids in columns.values()] for split, rows in splits.items()},
    )


def _write(
    file: Path,
    out: Path,
    label: str,
    columns: Sequence[CategoricalColumn],
    splits: Mapping[str, Sequence[Integers | ArrayLists]],
) -> None:
    """Write a data set of the name of a file, whose label is always 1: split -> the keys of each column."""
    spec = DatasetSpec(
        name=file.name.partition(".")[0],
        storage="parquet",
        labels=(LabelColumn(name=label),),
        dense=(),
        categorical=tuple(columns),
    )
    with atomic_dir(out) as partial:
        shards = {}
        for split, keys in splits.items():
            name, count = f"{split}/part-00000.parquet", len(keys[0])
            writer = ParquetShardWriter(partial / name, spec)
            writer.write(np.ones((count, 1), np.float32), np.empty((count, 0), np.float32), keys)
            writer.close()
            shards[split] = (ShardSpec(file=name, rows=count),)
        write_dataset(replace(spec, splits=shards), partial, location=out)


def _read_sequences(file: Path) -> Sequence[Integers]:
    sequences = []
    for number, line in _lines(file):
        words = line.split()
        if not words:
            continue
        if len(words) <= _FEWEST_ITEMS or not all(word.isascii() and word.isdigit() for word in words):
            raise _wrong_line(file, number, line, "a user and at least 3 items, all numbers")
        items = np.array([int(word) for word in words[1:]], dtype=np.int64)
        if items.min() < 1:
            raise FormatError(file, f"line {number}", "got the item 0, expected numbers from 1")
        sequences.append(items)
    if not sequences:
        raise FormatError(file, "has no lines, expected one for each user")
    return sequences


def _read_ratings(file: Path) -> Integers:
    """Return users, items and times: int64[n, 3]."""
    ratings = []
    for number, line in _lines(file):
        words = line.split("\t")
        try:
            user, item, time = int(words[0]), int(words[1]), int(float(words[3]))
            float(words[2])
        except (ValueError, IndexError, OverflowError):
            if number == 1 and len(words) == 4:  # the names
                continue
            expected = "a user, an item, a rating and a time, all numbers, with a tab between them"
            raise _wrong_line(file, number, line, expected) from None
        ratings.append((user, item, time))
    if not ratings:
        raise FormatError(file, "has no ratings, expected one in each line")
    return np.array(ratings, dtype=np.int64)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Return the numbers from 1 and the lines of a file, plain or compressed."""
    import pyarrow as pa

    kind = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}.get(file.suffix)
    with arrow_errors(str(file)), arrow_file(file) as source:
        text = source.read() if kind is None else pa.CompressedInputStream(source, kind).read()
    return enumerate(bytes(text).decode(errors="replace").splitlines(), start=1)


def _wrong_line(file: Path, number: int, line: str, expected: str) -> FormatError:
    return FormatError(file, f"line {number}", f"got {quoted(line)}, expected {expected}")
