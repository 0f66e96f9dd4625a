# SPDX-License-Identifier: Apache-2.0
"""Data sets of sequences: the last item of each user for the test, the one before it for the validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats import write_dataset
from terarec.formats.parquet import ParquetShardWriter, arrow_errors
from terarec.io.directories import atomic_dir
from terarec.io.opening import arrow_file
from terarec.ragged import Ragged, offsets_of
from terarec.spec import CategoricalColumn, DatasetSpec, LabelColumn, ShardSpec

ITEM, HISTORY, LABEL = "item", "history", "next"
"""Columns of a sample: an item, the items before it, and the label, which is 1."""

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
    sequences = _read(file)
    longest = max(len(items) for items in sequences)
    rows = 1 + max(int(items.max()) for items in sequences)
    spec = DatasetSpec(
        name=file.name.partition(".")[0],
        storage="parquet",
        labels=(LabelColumn(name=LABEL),),
        dense=(),
        categorical=(
            CategoricalColumn(name=ITEM, rows=rows),
            # A list has room for two keys at least.
            CategoricalColumn(name=HISTORY, rows=rows, hotness=max(2, longest - 1)),
        ),
    )
    with atomic_dir(out) as partial:
        splits = {}
        for split, last in _LAST_ITEMS.items():
            name = f"{split}/part-00000.parquet"
            writer = ParquetShardWriter(partial / name, spec)
            items = np.array([items[-last] for items in sequences], dtype=np.int64)
            histories = [items[:-last] for items in sequences]
            lists = Ragged(np.concatenate(histories), offsets_of(np.array([len(items) for items in histories])))
            count = len(sequences)
            writer.write(np.ones((count, 1), np.float32), np.empty((count, 0), np.float32), [items, lists])
            writer.close()
            splits[split] = (ShardSpec(file=name, rows=count),)
        write_dataset(replace(spec, splits=splits), partial, location=out)


def _read(file: Path) -> Sequence[Integers]:
    import pyarrow as pa

    sequences = []
    with arrow_errors(str(file)), arrow_file(file) as source:
        text = pa.CompressedInputStream(source, _compression(file)).read() if _compression(file) else source.read()
    for number, line in enumerate(bytes(text).decode(errors="replace").splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) <= _FEWEST_ITEMS or not all(word.isascii() and word.isdigit() for word in words):
            got = line if len(line) <= 60 else f"{line[:60]}..."
            raise FormatError(file, f"line {number}", f"got {got!r}, expected a user and at least 3 items, all numbers")
        items = np.array([int(word) for word in words[1:]], dtype=np.int64)
        if items.min() < 1:
            raise FormatError(file, f"line {number}", "got the item 0, expected numbers from 1")
        sequences.append(items)
    if not sequences:
        raise FormatError(file, "has no lines, expected one for each user")
    return sequences


def _compression(file: Path) -> str | None:
    return {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}.get(file.suffix)
