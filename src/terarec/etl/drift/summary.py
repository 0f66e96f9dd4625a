"""What is kept of the columns of a data set to compare them with another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.drift.id_names import IdNames, id_names
from terarec.etl.drift.raw_units import in_raw_units
from terarec.etl.statistics import GrowingSample, NumberSample
from terarec.etl.workflow import Workflow
from terarec.formats import ColumnBlock, Keys
from terarec.kernels.cpu.encoding import Int64Counts, xxh64_int64
from terarec.spec import DatasetSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberSummary:
    """A dense column or a label.

    Attributes:
        total: rows.
        missing: rows without a number.
        sample: of the numbers in raw units: all up to 2^20, else the rows of lowest hashes.
    """

    total: int
    missing: int
    sample: NumberSample


@dataclass(frozen=True, kw_only=True, slots=True)
class CategorySummary:
    """A categorical column; of lists, each item.

    Attributes:
        total: values.
        missing: values that are missing.
        rare: values in the ids that rare and unseen ones share.
        values: the other distinct values as texts, large_string [d], most frequent first.
        counts: int64[d], of these.
    """

    total: int
    missing: int
    rare: int
    values: pa.Array
    counts: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """All columns of some rows.

    Attributes:
        name: what the rows are called.
        splits: split -> its rows; those of all splits, whichever were looked at.
        rows: rows that were looked at.
        numbers: labels and dense columns.
        categories: categorical columns.
    """

    name: str
    splits: Mapping[str, int]
    rows: int
    numbers: Mapping[str, NumberSummary]
    categories: Mapping[str, CategorySummary]


def summarize(name: str, spec: DatasetSpec, blocks: Iterable[ColumnBlock], workflow: Workflow) -> DataSummary:
    """Look at all rows once.

    Args:
        name: what to call them.
        spec: their columns.
        blocks: their rows.
        workflow: that made them, which tells what ids stand for and how numbers were scaled.
    """
    names = id_names(workflow, spec)
    numbers = [_Numbers() for _ in (*spec.labels, *spec.dense)]
    categories = [_Categories() for _ in spec.categorical]
    rows = 0
    for block in blocks:
        hashes = xxh64_int64(np.arange(rows, rows + block.num_rows))
        rows += block.num_rows
        for gathered, column in zip(numbers, np.hstack([block.label, block.dense]).T, strict=True):
            gathered.add(column.astype(np.float64), hashes)
        for counted, keys in zip(categories, block.keys, strict=True):
            counted.add(keys)
    dense = spec.column_names[: len(numbers)]
    return DataSummary(
        name=name,
        splits={split: spec.num_rows(split) for split in spec.splits},
        rows=rows,
        numbers={column: gathered.summary(workflow, column) for column, gathered in zip(dense, numbers, strict=True)},
        categories={
            column.name: counted.summary(names[column.name])
            for column, counted in zip(spec.categorical, categories, strict=True)
        },
    )


class _Numbers:
    def __init__(self) -> None:
        self._total = self._missing = 0
        self._sample = GrowingSample()

    def add(self, numbers: NDArray[np.float64], hashes: NDArray[np.int64]) -> None:
        present = ~np.isnan(numbers)
        self._total += len(numbers)
        self._missing += len(numbers) - int(present.sum())
        self._sample.add(NumberSample(hashes[present], numbers[present]))

    def summary(self, workflow: Workflow, name: str) -> NumberSummary:
        sample = self._sample.sample()
        raw = NumberSample(sample.hashes, in_raw_units(workflow, name, sample.numbers))
        return NumberSummary(total=self._total, missing=self._missing, sample=raw)


class _Categories:
    def __init__(self) -> None:
        self._counts = Int64Counts()

    def add(self, keys: Keys) -> None:
        values = keys[0] if isinstance(keys, tuple) else keys
        self._counts.add(np.ascontiguousarray(values, dtype=np.int64))

    def summary(self, names: IdNames) -> CategorySummary:
        ids, counts = self._counts.at_least(1)
        missing, rare = names.are_missing(ids), names.are_rare(ids)
        named = ~(missing | rare)
        return CategorySummary(
            total=int(counts.sum()),
            missing=int(counts[missing].sum()),
            rare=int(counts[rare].sum()),
            values=names.texts(ids[named]),
            counts=counts[named],
        )
