# SPDX-License-Identifier: Apache-2.0
"""Data sets of one file: sequences, of which each user's last items are left out, and ratings."""

from __future__ import annotations

import codecs
import math
from array import array
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
from terarec.ragged import ArrayLists, Ragged, flat_values, offsets_of, take_lists
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
from terarec.spec.checks import is_count, quoted
from terarec.spec.dataset import FIRST_ID

USER, ITEM, HISTORY, TIMES = "user", "item", "history", "times"
"""Columns of a sample: a user, or the items before its item, and their times."""

_FEWEST_ITEMS = 3
_MOST_DIGITS = 15
_SEPARATORS = ("\t", "::", ",")

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
            GivenIds(columns=(ITEM, HISTORY), rows=(rows, rows), zero_is_missing=True),
        ),
        split=LeaveOneOut(column=USER, order=order, min_rows=_FEWEST_ITEMS, train="last"),
        labels=(LabelSpec(name="next"),),
        categorical=(ITEM, HISTORY),
    )
    prepare(Workflow.of(workflow), pa.table(columns), out)


def prepare_rated_sequences(file: Path, out: Path, *, max_length: int) -> None:
    """Write the data set of the sequences that a file of ratings gives, atomically, split as by `prepare_sequences`.

    Items of a user are in the order of time, those of one time in that of the file. A sample also has the times of the
    items of its history. Users of fewer than three ratings are left out.

    Args:
        file: As for `prepare_ratings`, of items from 1 on.
        out: Directory to write.
        max_length: Number of items of a history, the last ones.

    Raises:
        FormatError: A line of another form, with its number, or no user of three ratings.
    """
    users, items, times = _read_ratings(file)
    if not items.all():
        raise FormatError(file, "has a rating of the item 0, expected numbers from 1")
    order = np.lexsort((times, users))  # stable
    users, items, times = users[order], items[order], times[order]
    _, counts = np.unique(users, return_counts=True)
    ends, is_enough = counts.cumsum(), counts >= _FEWEST_ITEMS
    if not is_enough.any():
        raise FormatError(file, "has no user of three ratings, expected one for validation, test and training each")
    last = (ends[is_enough, None] - np.arange(_FEWEST_ITEMS, 0, -1)).ravel()  # the samples: rows of training first
    begins = np.maximum(np.repeat((ends - counts)[is_enough], _FEWEST_ITEMS), last - max_length)
    lengths = last - begins
    bounds = np.concatenate([[0], lengths.cumsum()])
    places = np.arange(bounds[-1]) + np.repeat(begins - bounds[:-1], lengths)
    lists = [pa.LargeListArray.from_arrays(bounds, values[places]) for values in (items, times.astype(np.int64))]
    columns = {USER: users[last], ITEM: items[last], HISTORY: lists[0], TIMES: lists[1]}
    table = pa.table({**columns, "place": last, "next": np.ones(len(last), dtype=np.int64)})
    rows = 1 + int(items.max())
    workflow = WorkflowSpec(
        name=_name(file),
        source=SourceSpec(
            format="arrow",
            columns=tuple(
                SourceColumn(name=name, type="integer", separator=" " if name in (HISTORY, TIMES) else None)
                for name in table.column_names
            ),
        ),
        steps=(
            GivenIds(columns=(ITEM, HISTORY), rows=(rows, rows), max_length=max_length, zero_is_missing=True),
            GivenIds(columns=(TIMES,), rows=(None,), max_length=max_length),
        ),
        split=LeaveOneOut(column=USER, order="place", min_rows=_FEWEST_ITEMS, train="last"),
        labels=(LabelSpec(name="next"),),
        categorical=(ITEM, HISTORY),
        keys=(TIMES,),
    )
    prepare(Workflow.of(workflow), table, out)


def prepare_ratings(file: Path, out: Path, *, test: float, histories: bool = False) -> None:
    """Write the data set of a file of ratings, atomically; all rated items are alike, whatever their rating.

    Of the n ratings of a user, round((1 - test) n), the earliest, are for training. Ratings of the test whose user or
    item is not in the train split are left out.

    Args:
        file: A user, an item, a rating and a time in each line, all numbers with a tab, ``::`` or a comma between them;
            a first line with names is passed over. Plain or compressed.
        out: Directory to write.
        test: Share of the ratings of a user for the test.
        histories: Whether samples also have the items of the user in the train split, of which a user is then one
            sample, of the last of these items with those before it as history.

    Raises:
        FormatError: A line of another form, with its number, or no ratings for a split.
    """
    users, items, times = _read_ratings(file)
    order = np.lexsort((times, users))  # stable: of equal times the earlier line comes first
    _, counts = np.unique(users, return_counts=True)
    place = np.arange(len(users)) - np.repeat(counts.cumsum() - counts, counts)
    is_train = place < np.repeat(np.round((1.0 - test) * counts), counts)
    splits = {"train": order[is_train], "test": order[~is_train]}
    columns, ids = [], []
    for name, values in ((USER, users), (ITEM, items)):
        known = np.unique(values[splits["train"]])
        splits["test"] = splits["test"][np.isin(values[splits["test"]], known)]
        columns.append(CategoricalColumn(name=name, rows=FIRST_ID + len(known), given=False))
        ids.append(np.searchsorted(known, values) + FIRST_ID)
    for split, rows in splits.items():
        if not len(rows):
            raise FormatError(file, f"leaves no rating of a known user and item for {split!r}, expected more ratings")
    pairs = {split: [of[rows] for of in ids] for split, rows in splits.items()}
    keys: Mapping[str, Sequence[Integers | ArrayLists]] = pairs
    if histories:
        keys, longest = _with_histories(*pairs["train"], *pairs["test"])
        columns.append(replace(columns[1], name=HISTORY, hotness=longest))
    _write(file, out, "taken", columns, keys)


def _with_histories(
    users: Integers, items: Integers, test_users: Integers, test_items: Integers
) -> tuple[dict[str, list[Integers | ArrayLists]], int]:
    """Return the columns user, item and history of both splits, and the length of the longest history.

    Args:
        users: Users of the train split int64[n], ascending, each without a gap.
        items: Their items int64[n], in the order of time.
        test_users: Users of the test split int64[m].
        test_items: Their items int64[m].
    """
    distinct, starts, counts = np.unique(users, return_index=True, return_counts=True)
    last = starts + counts - 1
    before = Ragged(np.delete(items, last), offsets_of(counts - 1))
    every = take_lists(Ragged(items, offsets_of(counts)), np.searchsorted(distinct, test_users))
    return {
        "train": [distinct, items[last], before],
        "test": [test_users, test_items, every],
    }, int(counts.max())


def _write(
    file: Path,
    out: Path,
    label: str,
    columns: Sequence[CategoricalColumn],
    splits: Mapping[str, Sequence[Integers | ArrayLists]],
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
            name, count = f"{split}/part-00000.parquet", len(flat_values(keys[0]))
            writer = ParquetShardWriter(partial / name, spec)
            writer.write(np.ones((count, 1), np.float32), np.empty((count, 0), np.float32), keys)
            writer.close()
            shards[split] = (ShardSpec(file=name, rows=count),)
        write_dataset(replace(spec, splits=shards), partial, location=out)


def _name(file: Path) -> str:
    return file.name.partition(".")[0]


def _read_sequences(file: Path) -> Sequence[Integers]:
    sequences, users, numbers = [], array("q"), array("q")
    for number, line in _lines(file):
        words = line.split()
        if len(words) <= _FEWEST_ITEMS or not all(map(_is_number, words)):
            raise _wrong_line(file, number, line, "a user and at least 3 items, all numbers")
        items = np.array([int(word) for word in words[1:]], dtype=np.int64)
        if items.min() < 1:
            raise FormatError(file, f"line {number}", "got the item 0, expected numbers from 1")
        users.append(int(words[0]))
        numbers.append(number)
        sequences.append(items)
    if not sequences:
        raise FormatError(file, "has no lines, expected one for each user")
    _check_once(file, "user", numbers, np.array(users))
    return sequences


def _read_ratings(file: Path) -> tuple[Integers, Integers, NDArray[np.float64]]:
    """Return users, items and times of n ratings."""
    # Arrays: lists would take four times the memory, of tens of millions of lines.
    users, items, times, numbers = array("q"), array("q"), array("d"), array("q")
    separator = ""
    for number, line in _lines(file):
        separator = separator or next((text for text in _SEPARATORS if line.count(text) == 3), _SEPARATORS[0])
        words = line.split(separator)
        if number == 1 and len(words) == 4 and not any(map(_is_float, words)):  # the names
            continue
        if len(words) != 4 or not (all(map(_is_number, words[:2])) and all(map(_is_float, words[2:]))):
            expected = "a user, an item, a rating and a time, all numbers, with a tab, :: or a comma between them"
            raise _wrong_line(file, number, line, expected)
        users.append(int(words[0]))
        items.append(int(words[1]))
        times.append(float(words[3]))
        numbers.append(number)
    if not users:
        raise FormatError(file, "has no ratings, expected one in each line")
    columns = np.array(users), np.array(items)
    _check_once(file, "user and item", numbers, *columns)
    return *columns, np.array(times)


def _check_once(file: Path, what: str, lines: Sequence[int], *columns: Integers) -> None:
    """Raise unless each value is in one line, unlike in a file that was appended to itself."""
    order = np.lexsort(columns[::-1])
    again = np.logical_and.reduce([column[order[1:]] == column[order[:-1]] for column in columns])
    if again.any():
        place = int(order[1:][again].min())  # the sort is stable: the later one of both
        first = int(np.logical_and.reduce([column == column[place] for column in columns]).argmax())
        problem = f"got the {what} of line {lines[first]} again, expected each in one line"
        raise FormatError(file, f"line {lines[place]}", problem)


def _is_number(word: str) -> bool:
    return is_count(word) and len(word) <= _MOST_DIGITS


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
