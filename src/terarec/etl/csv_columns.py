"""The columns of a CSV file: learnt from the training part, described, and encoded as training and serving see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.column_statistics import Moments, Quantiles, ValueCounts
from terarec.etl.csv_options import CsvOptions
from terarec.etl.csv_source import CsvBlock
from terarec.etl.encoders import Encoders
from terarec.etl.prepare_report import ColumnReport
from terarec.etl.vocabulary import ValueType, Vocabulary
from terarec.formats import ColumnBlock
from terarec.spec import (
    BucketizeEncoder,
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    FieldError,
    LabelColumn,
    LogShiftEncoder,
    StandardizeEncoder,
    VocabularyEncoder,
)

_LABELS_SHOWN = 5
_ACCEPTED_LABEL = "a number from 0 to 1, or --positive VALUE"


@dataclass(frozen=True, slots=True)
class CsvColumns:
    """What was learnt from the training part.

    Attributes:
        spec: the data set's columns, without splits.
        vocabularies: by categorical column.
        reports: of the columns that have one.
    """

    spec: DatasetSpec
    vocabularies: Mapping[str, Vocabulary]
    reports: tuple[ColumnReport, ...]


class CsvLearner:
    """Learns what encoders need from the training part, block by block.

    Args:
        options: the columns.
    """

    def __init__(self, options: CsvOptions) -> None:
        self._options = options
        self._labels = ValueCounts(pa.string())
        self._moments = {column: Moments() for column in (*options.dense, *options.log)}
        self._quantiles = {column: Quantiles() for column in options.buckets}
        self._texts = {column: ValueCounts(pa.string()) for column in options.categorical}
        self._integers = {column: ValueCounts(pa.int64()) for column in options.integer_categorical}

    def add(self, block: CsvBlock) -> None:
        """Take in some rows.

        Raises:
            FormatError: a field of the wrong kind, with its file, row and column.
        """
        self._labels.add(block.columns[self._options.label])
        raw = raw_columns(block, self._options)
        for column, counts in (*self._texts.items(), *self._integers.items()):
            counts.add(raw[column])
        statistics: list[tuple[str, Moments | Quantiles]] = [*self._moments.items(), *self._quantiles.items()]
        for column, statistic in statistics:
            statistic.add(raw[column].cast(pa.float64()).to_numpy(zero_copy_only=False))

    def columns(self, name: str) -> CsvColumns:
        """What was learnt, as the columns of a data set called `name`.

        Raises:
            ConfigError: no row is positive, or a column to cut into intervals does not vary.
        """
        options = self._options
        self._check_positives()
        vocabularies = {column: self._vocabulary("string", counts) for column, counts in self._texts.items()} | {
            options.id_name(column): self._vocabulary("int64", counts) for column, counts in self._integers.items()
        }
        reports = tuple(
            ColumnReport(name=column, rows=vocabularies[column].rows, distinct=counts.table().num_rows)
            for column, counts in zip(vocabularies, (*self._texts.values(), *self._integers.values()), strict=True)
        )
        spec = DatasetSpec(
            name=name,
            storage=options.storage,
            labels=(LabelColumn(name=options.label, positives=options.positives),),
            dense=tuple(self._dense_column(column) for column in self._moments),
            categorical=(
                *(self._id_column(column, column, vocabularies) for column in self._texts),
                *(self._id_column(options.id_name(column), column, vocabularies) for column in self._integers),
                *(self._bucket_column(column) for column in self._quantiles),
                *(CategoricalColumn(name=column) for column in options.keys),
            ),
        )
        return CsvColumns(spec, vocabularies, reports)

    def _vocabulary(self, value_type: ValueType, counts: ValueCounts) -> Vocabulary:
        table = counts.table()
        return Vocabulary.from_counts(value_type, table["value"], table["count"], self._options.min_count)

    def _dense_column(self, column: str) -> DenseColumn:
        moments = self._moments[column]
        if column in self._options.dense:
            return DenseColumn(name=column, encoder=StandardizeEncoder(mean=moments.mean, deviation=moments.deviation))
        # A missing value counts as 0, as everywhere.
        minimum = min(moments.minimum, 0.0) if moments.missing else moments.minimum
        return DenseColumn(name=column, encoder=LogShiftEncoder(shift=1.0 - minimum))

    def _id_column(self, name: str, source: str, vocabularies: Mapping[str, Vocabulary]) -> CategoricalColumn:
        encoder = VocabularyEncoder(
            file=vocabulary_file(name),
            value_type=vocabularies[name].value_type,
            min_count=self._options.min_count,
        )
        return CategoricalColumn(
            name=name, rows=vocabularies[name].rows, encoder=encoder, source=None if source == name else source
        )

    def _bucket_column(self, source: str) -> CategoricalColumn:
        bounds = self._quantiles[source].bounds(self._options.buckets[source])
        if not bounds:
            raise FieldError("", "buckets", f"column {source!r} does not vary in the training part, expected it to")
        return CategoricalColumn(
            name=self._options.bucket_name(source),
            rows=len(bounds) + 2,  # the missing value's id, and one interval more than bounds
            encoder=BucketizeEncoder(boundaries=bounds),
            source=source,
        )

    def _check_positives(self) -> None:
        if not self._options.positives:
            return
        seen = self._labels.table().sort_by([("count", "descending"), ("value", "ascending")])["value"].to_pylist()
        if not set(seen) & set(self._options.positives):
            shown = ", ".join(map(repr, seen[:_LABELS_SHOWN])) + (", ..." if len(seen) > _LABELS_SHOWN else "")
            raise ConfigError(
                f"label {self._options.label!r}: no row of the training part holds "
                f"{' or '.join(map(repr, self._options.positives))}; it holds {shown}"
            )


def raw_columns(block: CsvBlock, options: CsvOptions) -> dict[str, pa.Array]:
    """The raw columns of `block` but the label, each as the type that its encoders read.

    Raises:
        FormatError: a field of the wrong kind, with its file, row and column.
    """
    raw: dict[str, pa.Array] = {}
    for column in options.raw_names[1:]:
        if column in options.categorical:
            raw[column] = block.columns[column]
        elif column in options.integer_categorical or column in options.keys:
            raw[column] = block.integers(column)
        else:
            raw[column] = block.numbers(column)
    return raw


def encode_rows(block: CsvBlock, encoders: Encoders, options: CsvOptions) -> ColumnBlock:
    """The rows of `block` as the data set's shards hold them.

    Raises:
        FormatError: a field of the wrong kind, a missing label, or one that is not from 0 to 1, with its file, row and
            column.
    """
    encoded = encoders.encode(raw_columns(block, options))
    return ColumnBlock(label=_label(block, options)[:, None], dense=encoded.dense, keys=encoded.keys)


def vocabulary_file(column: str) -> str:
    """Where the vocabulary of `column` is, relative to dataset.json."""
    return f"vocabularies/{column}.parquet"


def _label(block: CsvBlock, options: CsvOptions) -> NDArray[np.float32]:
    texts = block.columns[options.label]
    if texts.null_count:
        raise block.fault(options.label, pc.index(texts.is_null(), True).as_py(), "a label in every row")
    if options.positives:
        positive = pc.is_in(texts, value_set=pa.array(options.positives, type=pa.string()))
        labels: NDArray[np.float32] = positive.cast(pa.float32()).to_numpy()
        return labels
    numbers = block.numbers(options.label, _ACCEPTED_LABEL).to_numpy(zero_copy_only=False)
    outside = ~((numbers >= 0) & (numbers <= 1))  # NaN is outside, too
    if outside.any():
        raise block.fault(options.label, int(np.argmax(outside)), _ACCEPTED_LABEL)
    return np.asarray(numbers, dtype=np.float32)
