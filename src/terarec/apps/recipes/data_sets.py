# SPDX-License-Identifier: Apache-2.0
"""Data sets of one file: sequences, of which each user's last items are left out, and ratings."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl import prepare
from terarec.etl.ops import GivenIds, History
from terarec.etl.workflow import Workflow
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter, arrow_errors
from terarec.io.directories import atomic_dir
from terarec.io.opening import arrow_file
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    LabelColumn,
    LabelSpec,
    LeaveOneOut,
    ShardSpec,
    SourceColumn,
    SourceSpec,
    WorkflowSpec,
)
from terarec.spec.checks import quoted
from terarec.spec.dataset import FIRST_ID

USER, ITEM, HISTORY = "user", "item", "history"
"""Columns of a sample: a user, or the items before its item."""

_FEWEST_ITEMS = 3
_MOST_DIGITS = 15

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
    lengths, items = np.array(list(map(len, sequences))), np.concatenate(sequences)
    rows, longest, order = 1 + int(items.max()), int(lengths.max()), "place"
    columns = {
        USER: np.repeat(np.arange(len(sequences)), lengths),
        ITEM: items,
        order: np.arange(len(items)),
        "next": np.ones(len(items), dtype=np.int64),
    }
    workflow = WorkflowSpec(
        name=_name(file),
        source=SourceSpec(format="arrow", columns=tuple(SourceColumn(name=name, type="integer") for name in columns)),
        steps=(
            History(columns=(ITEM,), outputs=(HISTORY,), group=USER, order=order, max_length=longest - 1),
            GivenIds(columns=(ITEM, HISTORY), rows=(rows, rows)),
        ),
        split=LeaveOneOut(column=USER, order=order, min_rows=_FEWEST_ITEMS, train="last"),
        labels=(LabelSpec(name="next"),),
        categorical=(ITEM, HISTORY),
    )
    prepare(Workflow.of(workflow), pa.table(columns), out)


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
        FormatError: A line of another form, with its number, or no ratings for a split.
    """
    users, items, times = _read_ratings(file)
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
    for split, rows in splits.items():
        if not len(rows):
            raise FormatError(file, f"leaves no rating of a known user and item for {split!r}, expected more ratings")
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
    splits: Mapping[str, Sequence[Integers]],
) -> None:
    """Write a data set of the name of a file, whose label is always 1: split -> the keys of each column."""
    spec = DatasetSpec(
        name=_name(file),
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


def _name(file: Path) -> str:
    return file.name.partition(".")[0]


def _read_sequences(file: Path) -> Sequence[Integers]:
    sequences, lines = [], _FirstLines(file, "user")
    for number, line in _lines(file):
        words = line.split()
        if len(words) <= _FEWEST_ITEMS or not all(map(_is_number, words)):
            raise _wrong_line(file, number, line, "a user and at least 3 items, all numbers")
        lines.add(int(words[0]), number)
        items = np.array([int(word) for word in words[1:]], dtype=np.int64)
        if items.min() < 1:
            raise FormatError(file, f"line {number}", "got the item 0, expected numbers from 1")
        sequences.append(items)
    if not sequences:
        raise FormatError(file, "has no lines, expected one for each user")
    return sequences


def _read_ratings(file: Path) -> tuple[Integers, Integers, NDArray[np.float64]]:
    """Return users, items and times of n ratings."""
    users, items, times = list[int](), list[int](), list[float]()
    lines = _FirstLines(file, "user and item")
    for number, line in _lines(file):
        words = line.split("\t")
        if number == 1 and len(words) == 4 and not any(map(_is_float, words)):  # the names
            continue
        if len(words) != 4 or not (all(map(_is_number, words[:2])) and all(map(_is_float, words[2:]))):
            expected = "a user, an item, a rating and a time, all numbers, with a tab between them"
            raise _wrong_line(file, number, line, expected)
        lines.add((int(words[0]), int(words[1])), number)
        users.append(int(words[0]))
        items.append(int(words[1]))
        times.append(float(words[3]))
    if not users:
        raise FormatError(file, "has no ratings, expected one in each line")
    return np.array(users, dtype=np.int64), np.array(items, dtype=np.int64), np.array(times)


class _FirstLines:
    """The line of each value that a file has once, such as those of a file that was appended to itself have not."""

    def __init__(self, file: Path, what: str) -> None:
        self._file, self._what = file, what
        self._lines: dict[object, int] = {}

    def add(self, value: object, line: int) -> None:
        first = self._lines.setdefault(value, line)
        if first != line:
            problem = f"got the {self._what} of line {first} again, expected each in one line"
            raise FormatError(self._file, f"line {line}", problem)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS


def _is_float(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Return the numbers from 1 and the lines of a file, plain or compressed, without empty ones."""
    kind = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}.get(file.suffix)
    with arrow_errors(str(file), kind or "text"), arrow_file(file) as source:
        text = source.read() if kind is None else pa.CompressedInputStream(source, kind).read()
    # As bytes: `str.splitlines` would end a line at other control characters, too.
    lines = bytes(text).removeprefix(codecs.BOM_UTF8).splitlines()
    return ((number, line.decode(errors="replace")) for number, line in enumerate(lines, start=1) if line.strip())


def _wrong_line(file: Path, number: int, line: str, expected: str) -> FormatError:
    return FormatError(file, f"line {number}", f"got {quoted(line)}, expected {expected}")
