# SPDX-License-Identifier: Apache-2.0
"""What a data set shows about its columns: shared vocabularies, and columns that another one determines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.etl.ops import Operator
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.datasets import IdValues
from terarec.etl.workflow.plan import producer
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, Keys, merge
from terarec.formats.shard import open_shard
from terarec.ragged import Ragged
from terarec.spec import DatasetSpec

_ROWS = 1 << 20
"""Most rows of the train split that are looked at."""
_LEAST_REPEATS = 20
"""Rows of keys that occurred before, below which nothing is said about a column."""


def shared_vocabularies(workflow: Workflow) -> Mapping[str, int]:
    """Return column -> number of the vocabulary of its ids or keys; equal numbers mean equal values.

    A column is in it if a step or a column of the source gives the values of one number alone.
    """
    numbers: dict[object, int] = {}
    groups = {}
    for name in (*workflow.spec.categorical, *workflow.spec.keys):
        step, origin = producer(workflow.plan.operators, name, Operator.origin)
        vocabulary = IdValues(workflow, name).vocabulary
        # Ids of a step without vocabularies, such as `HashBucket`, mean the same in all of its columns.
        key: object = ("source", origin) if step is None else ("step", step, id(vocabulary) if vocabulary else None)
        groups[name] = numbers.setdefault(key, len(numbers))
    return groups


class DeterminedColumns:
    """Rows of the train split of a data set, in which columns determine others.

    Args:
        directory: Directory of a data set that a workflow may have made.
        allow_import: Packages whose functions the workflow may name.

    Raises:
        DataNotFoundError, FormatError: As `workflow_of`, or a damaged shard.
    """

    def __init__(self, directory: Path, *, allow_import: Sequence[str] = ()) -> None:
        dataset = read_dataset(directory)
        self.workflow = workflow_of(directory, allow_import=allow_import)
        block = _first_rows(dataset, directory)
        self._codes: dict[str, NDArray[np.uint64]] = {}
        if block is not None:
            self._codes |= {
                column.name: np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
                for column, values in zip(dataset.dense, block.dense.T, strict=True)
            }
            self._codes |= {
                column.name: _codes(keys) for column, keys in zip(dataset.categorical, block.keys, strict=True)
            }

    def by(self, key: str) -> frozenset[str]:
        """Return the other columns that have one value for each value of the column `key`, and several in all.

        Values of `key` that stand for several ones, such as rare ones, do not count. Without enough rows whose key
        occurred before there are none.
        """
        if key not in self._codes:
            return frozenset()
        reserved = IdValues(self.workflow, key).num_reserved if key in self.workflow.spec.categorical else 0
        keys = self._codes[key]
        places = np.flatnonzero(keys >= reserved)
        places = places[np.argsort(keys[places], kind="stable")]
        repeats = keys[places][1:] == keys[places][:-1]
        if np.count_nonzero(repeats) < _LEAST_REPEATS:
            return frozenset()
        columns = set()
        for name, codes in self._codes.items():
            ordered = codes[places]
            differs = ordered[1:] != ordered[:-1]
            if name != key and differs.any() and not (differs & repeats).any():
                columns.add(name)
        return frozenset(columns)


def _first_rows(dataset: DatasetSpec, directory: Path) -> ColumnBlock | None:
    blocks: list[ColumnBlock] = []
    for description in dataset.splits.get("train", ()):
        shard = open_shard(dataset, directory / description.file, description.rows)
        for group in range(len(shard.group_rows)):
            if sum(block.num_rows for block in blocks) >= _ROWS:
                return merge(blocks)
            blocks.append(shard.read_group(group))
    return merge(blocks) if blocks else None


def _codes(keys: Keys) -> NDArray[np.uint64]:
    """Return a number for each row, equal for equal keys or lists of them; other lists differ but for collisions."""
    if not isinstance(keys, Ragged):
        return keys.astype(np.int64).view(np.uint64)
    lengths = np.diff(keys.offsets)
    places = np.arange(len(keys.values), dtype=np.uint64) - np.repeat(keys.offsets[:-1], lengths).astype(np.uint64)
    mixed = _mix(keys.values.astype(np.int64).view(np.uint64) ^ _mix(places + np.uint64(1)))
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    # Differences of sums modulo 2^64 are sums of the lists.
    totals: NDArray[np.uint64] = sums[keys.offsets[1:]] - sums[keys.offsets[:-1]] + lengths.astype(np.uint64)
    return totals


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well spread numbers, by the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
