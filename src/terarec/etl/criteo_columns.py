"""What is learnt about the columns of Criteo's layout, and blocks of its text encoded with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from terarec.etl.prepare_report import ColumnReport
from terarec.etl.vocabulary import Vocabulary
from terarec.formats import ColumnBlock
from terarec.kernels.cpu.counts import Hex32Counts
from terarec.kernels.cpu.encoding import log_shift, parse_criteo
from terarec.kernels.cpu.ids import Hex32Ids
from terarec.kernels.encoding_types import CATEGORY_NAMES, INTEGER_NAMES, LABEL_NAME, NUM_CATEGORIES, NUM_INTEGERS
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    LogShiftEncoder,
    VocabularyEncoder,
)


class CriteoCounts:
    """Counts of the categories of all blocks learnt from. Several threads may call `learn`."""

    def __init__(self) -> None:
        self._tables = tuple(Hex32Counts() for _ in CATEGORY_NAMES)

    def learn(self, text: bytes, num_rows: int) -> NDArray[np.int32]:
        """Count the categories of the first `num_rows` lines of `text`; returns the minima int32[13] of their integers.

        A missing integer counts as 0. All lines are checked.

        Raises:
            LineFaultError: a line that is not in Criteo's layout.
        """
        parsed = parse_criteo(text)
        missing = parsed.missing[:num_rows]
        for column, table in enumerate(self._tables):
            table.add_bit(parsed.categories[column, :num_rows], missing, NUM_INTEGERS + column)
        minima: NDArray[np.int32] = parsed.integers[:, :num_rows].min(axis=1)
        return minima

    def vocabularies(self, min_count: int) -> tuple[Vocabulary, ...]:
        """The vocabulary of each category."""
        return tuple(Vocabulary("hex32", *table.at_least(min_count)) for table in self._tables)

    @property
    def distinct(self) -> tuple[int, ...]:
        """Number of distinct values of each category."""
        return tuple(len(table) for table in self._tables)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearntColumns:
    """How each column is encoded.

    Attributes:
        shifts: of the logarithm of each integer.
        vocabularies: of each category.
        ids: the vocabularies' tables, made before threads ask for them.
        min_count: with which the vocabularies were made.
        distinct: distinct values of each category in the training part.
    """

    shifts: tuple[float, ...]
    vocabularies: tuple[Vocabulary, ...]
    ids: tuple[Hex32Ids, ...]
    min_count: int
    distinct: tuple[int, ...]

    @classmethod
    def finish(cls, counts: CriteoCounts, minima: Sequence[int], min_count: int) -> LearntColumns:
        """Ids by frequency; shifts that make the ``minima[13]`` of the training part 1."""
        vocabularies = counts.vocabularies(min_count)
        return cls(
            shifts=tuple(1.0 - minimum for minimum in minima),
            vocabularies=vocabularies,
            ids=tuple(Hex32Ids(vocabulary.values.to_numpy()) for vocabulary in vocabularies),
            min_count=min_count,
            distinct=counts.distinct,
        )

    def encode(self, text: bytes) -> ColumnBlock:
        """Encode all lines of `text`.

        Raises:
            LineFaultError: a line that is not in Criteo's layout.
        """
        parsed = parse_criteo(text)
        num_rows = len(parsed.label)
        dense = np.empty((NUM_INTEGERS, num_rows), dtype=np.float32)
        for column, shift in enumerate(self.shifts):
            log_shift(parsed.integers[column], shift, dense[column])
        keys = np.empty((NUM_CATEGORIES, num_rows), dtype=np.int32)
        for column, ids in enumerate(self.ids):
            ids.find_bit(parsed.categories[column], parsed.missing, NUM_INTEGERS + column, keys[column])
        return ColumnBlock(label=parsed.label[:, None], dense=dense.T, keys=tuple(keys))

    def describe(self, storage: Literal["parquet", "raw"], best_auc: float | None) -> DatasetSpec:
        """The data set, without its shards."""
        categories = zip(CATEGORY_NAMES, self.vocabularies, strict=True)
        return DatasetSpec(
            name="criteo",
            storage=storage,
            labels=(LabelColumn(name=LABEL_NAME),),
            dense=tuple(
                DenseColumn(name=name, encoder=LogShiftEncoder(shift=shift))
                for name, shift in zip(INTEGER_NAMES, self.shifts, strict=True)
            ),
            categorical=tuple(
                CategoricalColumn(name=name, rows=vocabulary.rows, encoder=self._encoder(name))
                for name, vocabulary in categories
            ),
            best_auc=best_auc,
        )

    def report(self) -> tuple[ColumnReport, ...]:
        """The categories, for people."""
        columns = zip(CATEGORY_NAMES, self.vocabularies, self.distinct, strict=True)
        return tuple(ColumnReport(name=name, rows=kept.rows, distinct=distinct) for name, kept, distinct in columns)

    def _encoder(self, name: str) -> VocabularyEncoder:
        return VocabularyEncoder(file=f"vocabularies/{name}.parquet", value_type="hex32", min_count=self.min_count)
