# SPDX-License-Identifier: Apache-2.0
"""Summaries of the columns of a data set, to compare them with those of another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.engine.score import EncodedFiles
from terarec.etl.engine.served import are_served
from terarec.etl.ops.quantiles import GrowingSample, NumberSample
from terarec.etl.source.arrow_files import read_schema
from terarec.etl.source.blocks import SourceFile
from terarec.etl.source.files import find_files
from terarec.etl.source.hive import files_spec
from terarec.etl.source.source import Source, open_files, read_as
from terarec.etl.workflow import Workflow, workflow_of
from terarec.etl.workflow.datasets import IdValues
from terarec.etl.workflow.plan import columns_needed
from terarec.formats import read_dataset
from terarec.formats.block import ColumnBlock, Keys
from terarec.formats.shard import open_shard
from terarec.kernels.cpu.encoding import Int64Counts, xxh64_int64
from terarec.ragged import Ragged, flat_values
from terarec.spec import CategoricalColumn, DatasetSpec


@dataclass(frozen=True, slots=True)
class IdNames:
    """The ids of one column.

    Attributes:
        missing: Id, or key, of a missing value, as `DatasetSpec.missing_key` gives it.
        rare_ids: Number of ids, from 1 on, that rare and unseen values share.
        values: Values of the ids behind these; None where an id is the value.
    """

    missing: int
    rare_ids: int = 0
    values: pa.Array | None = None

    def are_missing(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the ids mean a missing value, bool[n]."""
        return np.asarray(ids == self.missing)

    def are_rare(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the ids are those of rare and unseen values, bool[n]."""
        return np.asarray((ids > 0) & (ids <= self.rare_ids))

    def texts(self, ids: NDArray[np.int64]) -> pa.Array:
        """Return the values of other ids, as large_string[n]."""
        if self.values is None:
            return pa.array(ids).cast(pa.large_string())
        values = self.values.take(pa.array(ids - 1 - self.rare_ids))
        if pa.types.is_uint32(values.type):
            # As raw logs write them.
            return pa.array([f"{number:08x}" for number in values.to_numpy()], type=pa.large_string())
        return values.cast(pa.large_string())


def id_names(workflow: Workflow, spec: DatasetSpec) -> dict[str, IdNames]:
    """Return the ids of the categorical columns of the data set `spec`, which `workflow` made."""
    return {column.name: _names_of(column, spec, workflow) for column in spec.categorical}


def _names_of(column: CategoricalColumn, spec: DatasetSpec, workflow: Workflow) -> IdNames:
    missing, vocabulary = spec.missing_key(column.name), IdValues(workflow, column.name).vocabulary
    if column.rows is None or vocabulary is None:
        return IdNames(missing=missing)
    return IdNames(missing=missing, rare_ids=vocabulary.hash_buckets, values=vocabulary.values)


def in_raw_units(workflow: Workflow, name: str, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Undo the logarithms and scales of numbers of the dense column `name`; these keep the order of numbers.

    It goes back to the source, or to the step that made a number of something else. What `Clip` cut off and
    `FillMissing` filled in stays so.

    Args:
        workflow: Workflow that made the data set.
        name: Column after the last step.
        numbers: float64[n], without missing ones.
    """
    operators = workflow.plan.operators

    def reads(step: int, outputs: set[str]) -> Iterable[str] | None:
        nonlocal numbers
        if not outputs:
            return None
        (column,) = outputs
        before = operators[step].origin(column) or operators[step].input_of(column)
        if before is None:
            return ()
        numbers = operators[step].inverse(before, numbers, workflow.states.get(step), is_float32=True)
        return (before,)

    columns_needed(operators, (name,), reads)
    return numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberSummary:
    """A dense column or a label.

    Attributes:
        total: Rows.
        missing: Rows without a number.
        sample: Sample of the numbers in raw units: all up to 2^20, else those of the rows with the lowest hashes.
    """

    total: int
    missing: int
    sample: NumberSample


@dataclass(frozen=True, kw_only=True, slots=True)
class CategorySummary:
    """A categorical column; of lists, each item.

    Attributes:
        total: Values.
        missing: Values that are missing.
        rare: Values in the ids that rare and unseen ones share.
        values: Other distinct values as texts, large_string [d], most frequent first.
        counts: int64[d], of these.
        lengths: int64[k], how many lists have each length from 0 on; empty for one value a row.
    """

    total: int
    missing: int
    rare: int
    values: pa.Array
    counts: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """All columns of some rows.

    Attributes:
        name: Name of the data.
        splits: Split -> its rows; those of all splits, whichever were summarized.
        rows: Rows that were summarized.
        numbers: Labels and dense columns.
        categories: Categorical columns.
    """

    name: str
    splits: Mapping[str, int]
    rows: int
    numbers: Mapping[str, NumberSummary]
    categories: Mapping[str, CategorySummary]


class RowSummary:
    """Summarizes rows that come block by block. For one thread.

    Args:
        spec: Spec of their columns.
        workflow: Workflow that made them; it knows the values behind ids and the scales of numbers.
        has_labels: Whether the rows have their labels.
    """

    def __init__(self, spec: DatasetSpec, workflow: Workflow, *, has_labels: bool = True) -> None:
        self.rows = 0
        self._workflow = workflow
        self._features = tuple(column.name for column in spec.categorical)
        self._names = id_names(workflow, spec)
        labels = spec.labels if has_labels else ()
        names = [*(column.name for column in labels), *(column.name for column in spec.dense)]
        self._numbers = {name: _Numbers() for name in names}
        self._categories = [_Categories() for _ in spec.categorical]

    def add(self, numbers: Sequence[NDArray[np.float32]], keys: Sequence[Keys]) -> None:
        """Add n rows.

        Args:
            numbers: Labels, where there are some, and dense columns, each float32[n, columns].
            keys: Keys of each categorical column.
        """
        columns = np.hstack(numbers)
        # Of positions, as shards do not hold row ids.
        hashes = xxh64_int64(np.arange(self.rows, self.rows + len(columns)))
        self.rows += len(columns)
        for gathered, column in zip(self._numbers.values(), columns.T, strict=True):
            gathered.add(column.astype(np.float64), hashes)
        for counted, ids in zip(self._categories, keys, strict=True):
            counted.add(ids)

    def summary(self, name: str, splits: Mapping[str, int] | None = None) -> DataSummary:
        """Return the summary of the rows so far.

        Args:
            name: Name of the data.
            splits: Split -> its rows; None for data without splits.
        """
        return DataSummary(
            name=name,
            splits=splits or {},
            rows=self.rows,
            numbers={column: each.summary(self._workflow, column) for column, each in self._numbers.items()},
            categories={
                column: counted.summary(self._names[column])
                for column, counted in zip(self._features, self._categories, strict=True)
            },
        )


def summarize(name: str, spec: DatasetSpec, blocks: Iterable[ColumnBlock], workflow: Workflow) -> DataSummary:
    """Summarize all rows in one pass; arguments are those of `RowSummary`."""
    rows = RowSummary(spec, workflow)
    for block in blocks:
        rows.add((block.label, block.dense), block.keys)
    return rows.summary(name, {split: spec.num_rows(split) for split in spec.splits})


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
        self._lengths = np.zeros(0, dtype=np.int64)

    def add(self, keys: Keys) -> None:
        if isinstance(keys, Ragged):
            counts = np.bincount(np.diff(keys.offsets), minlength=len(self._lengths))
            counts[: len(self._lengths)] += self._lengths
            self._lengths = counts
        self._counts.add(np.ascontiguousarray(flat_values(keys), dtype=np.int64))

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
            lengths=self._lengths,
        )


def summarize_raw(files: Sequence[str | Path], reference: Path, *, allow_import: Sequence[str] = ()) -> DataSummary:
    """Return the summary of raw logs as the fitted workflow of the data set `reference` encodes them.

    Values that this workflow never saw come out as rare or unseen. Nothing is split, and nothing is fitted. Parquet
    files may lack what records lack that a model scores, such as labels, which are not compared then.

    Args:
        files: Files, directories, globs and URLs in the workflow's source format, or Parquet.
        reference: Data set that a workflow made.
        allow_import: Packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.

    Raises:
        ConfigError: The steps of `reference` read other rows, and the files are no served records; or they name a
            function that is not allowed.
        DataNotFoundError: A file that is not there.
        FormatError: Bad input, with its file and line.
    """
    workflow = workflow_of(reference, allow_import=allow_import)
    workflow = workflow.with_sample_columns(weight=None, metadata=())  # which are not compared, and may be bad here
    dataset = workflow.dataset_spec()
    name = ", ".join(str(path).rstrip("/").rpartition("/")[2] for path in files)
    listed = find_files(files)
    # Records that were served have the outputs of these steps.
    if workflow.plan.grouped_steps and not are_served(workflow, listed):
        steps = ", ".join(type(workflow.spec.steps[step]).__name__ for step in workflow.plan.grouped_steps)
        problem = f"its workflow looks at other rows ({steps}), expected the logs as a data set, or served records"
        raise ConfigError(reference, problem)
    if workflow.plan.grouped_steps or _lacks_columns(workflow, listed):
        rows = RowSummary(dataset, workflow, has_labels=False)
        for block in EncodedFiles(workflow, files).blocks():
            rows.add((block.records.dense,), block.records.keys)
        return rows.summary(name)
    return summarize(name, dataset, _raw_blocks(workflow, open_files(workflow.spec.source, listed)), workflow)


def _lacks_columns(workflow: Workflow, files: Sequence[SourceFile]) -> bool:
    """Return whether Parquet files lack a column of the workflow's source."""
    spec = read_as(workflow.spec.source, files)
    if spec.format != "parquet":
        return False
    names = read_schema(files[0].path, "parquet").names
    # Some columns may be in the names of directories.
    return any(column.name not in names for column in files_spec(spec, files).columns)


def _raw_blocks(workflow: Workflow, source: Source) -> Iterator[ColumnBlock]:
    for rows in source.blocks():
        yield workflow.encode_rows(workflow.apply(rows))


def summarize_dataset(
    directory: Path,
    splits: Sequence[str] | None = None,
    *,
    name: str | None = None,
    allow_import: Sequence[str] = (),
    most_rows: int | None = None,
) -> DataSummary:
    """Return the summary of rows of the data set in `directory`, called by a name and the splits.

    Args:
        directory: Directory with ``dataset.json``.
        splits: Splits to summarize; None: all.
        name: Name of the data; None: that of the directory.
        most_rows: Rows from which on row groups at even distances are summarized, about as many rows in all; None for
            all rows.
        allow_import: Packages whose functions the workflow may name, as for `terarec.etl.workflow.Workflow.load`.

    Raises:
        DataNotFoundError: No data set, or one of its files is not there.
        FormatError: A file that does not hold what it promises.
        ConfigError: A split that the data set does not have, no rows, or a function in the workflow that is not
            allowed.
    """
    spec = read_dataset(directory)
    wanted = tuple(spec.splits) if splits is None else tuple(splits)
    if not sum(spec.num_rows(split) for split in wanted):
        raise ConfigError(directory, f"got no rows in {', '.join(wanted) or 'any split'}, expected at least one")
    workflow = workflow_of(directory, allow_import=allow_import)
    called = name or directory.absolute().name
    called = called if splits is None else f"{called} ({', '.join(wanted)})"
    return summarize(called, spec, _blocks(directory, spec, wanted, most_rows), workflow)


def names_apart(one: Path, other: Path) -> tuple[str, str]:
    """Return the names of two directories, after those of directories around them that distinguish them."""
    parts, others = one.absolute().parts, other.absolute().parts
    for depth in range(1, min(len(parts), len(others)) + 1):
        if parts[-depth:] != others[-depth:]:
            return "/".join(parts[-depth:]), "/".join(others[-depth:])
    return parts[-1], others[-1]


def _blocks(directory: Path, spec: DatasetSpec, splits: Sequence[str], most_rows: int | None) -> Iterator[ColumnBlock]:
    rows = sum(spec.num_rows(split) for split in splits)
    # Of `every` row groups the first one, in the order of all shards.
    every = 1 if most_rows is None else max(-(-rows // most_rows), 1)
    place = 0
    for split in splits:
        for description in spec.shards(split):
            shard = open_shard(spec, directory / description.file, description.rows)
            for group in range(len(shard.group_rows)):
                if place % every == 0:
                    yield shard.read_group(group)
                place += 1
