"""What is bad in the rows of a source: counted on the cluster, told by the reader of the local engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from terarec.etl.columns import ColumnType
from terarec.etl.source.bad_input import FATAL, FAULTS_SHOWN
from terarec.etl.source.told import line_faults, row_faults
from terarec.etl.spark.bad_input import PlacedFault
from terarec.etl.spark.counted import Counted
from terarec.etl.spark.expressions import FILE, LINE, ROW, TEXT, column
from terarec.spec import BadInputPolicy, SourceSpec

BAD = "__terarec_bad_row"
"""Column that says whether there is a fault in a row."""

_ROWS, _KINDS, _KIND = "rows", "__terarec_faults", "kind"


@dataclass(frozen=True, slots=True)
class FaultsOf:
    """Tells what is wrong in single lines and rows.

    Attributes:
        source: how they are read.
        paths: of the files.
        headers: the first line of each.
        policy: what follows.
    """

    source: SourceSpec
    paths: Sequence[str]
    headers: Sequence[str | None]
    policy: BadInputPolicy

    def told(self, row: Row) -> Sequence[str]:
        """The faults of a row with its place, its text and the kinds of its faults, each in one line."""
        path, number, place = self.paths[row[FILE]], row[LINE], "row"
        if self.source.format == "parquet":
            faults = row_faults(self.source, path, number, self.policy)
        else:
            place = "line"
            header = self.headers[row[FILE]] or ""
            faults = line_faults(self.source, path, number, bytes(row[TEXT]), header, self.policy)
        # Where only Spark finds fault with a value it tells at least the kind.
        if FATAL in row[_KINDS]:
            return [
                f"{fault} (engine 'spark' reads no line end between quotes, engine 'local' does)" for fault in faults
            ]
        return [str(fault) for fault in faults] or [f"{path}: {place} {number}: {kind}" for kind in row[_KINDS]]


class Faults:
    """Counts bad rows while rows are read, and finds afterwards what is wrong in them, if there are such.

    Args:
        marked: the rows, with their places and `BAD`.
        kinds: makes an array of the kinds of faults of a bad row.
        of: tells of one.
        num_rows: of all files.
        types: of the columns with the values.
    """

    def __init__(
        self,
        marked: DataFrame,
        kinds: Callable[[], Column],
        of: FaultsOf,
        *,
        num_rows: int,
        types: Mapping[str, ColumnType],
    ) -> None:
        self._marked = marked
        self._kinds = kinds
        self._of = of
        self._num_rows = num_rows
        self._types = types
        self._found = Counted(marked, [F.count("*").alias(_ROWS), F.count_if(BAD).alias(BAD)])
        frame = self._found.observed()
        frame = frame.where(~F.col(BAD)) if of.policy == "skip" else frame
        self._kept = Counted(frame, [F.count("*").alias(_ROWS), *_presence(types)])

    def observed(self) -> DataFrame:
        """The rows that the policy keeps, counted while they are computed."""
        return self._kept.observed()

    @property
    def are_counted_twice(self) -> bool:
        """Whether Spark did tasks again whose rows had been counted."""
        return bool(self._found.figures()[_ROWS] != self._num_rows)

    def missing(self) -> Sequence[tuple[int, int]]:
        """How many values of each column are missing, and how many there are; once rows were computed."""
        seen = self._kept.again() if self.are_counted_twice else self._kept.figures()
        totals = [seen.get(f"total{place}", seen[_ROWS]) or 0 for place in range(len(self._types))]
        return [(total - (seen[f"present{place}"] or 0), total) for place, total in enumerate(totals)]

    def counts(self) -> Mapping[str, int]:
        """Kind -> how often it occurred; to be called once rows were computed."""
        return self._told[0]

    def first(self) -> Sequence[PlacedFault]:
        """The first ones; those of kind `FATAL` alone, if there are such that the policy would pass over."""
        told = ((row, line) for row in self._told[1] for line in self._of.told(row))
        return [PlacedFault(row[FILE], row[LINE], row[ROW], line) for row, line in islice(told, FAULTS_SHOWN)]

    @cached_property
    def _told(self) -> tuple[Mapping[str, int], Sequence[Row]]:
        """How often each kind of fault occurred, and the first bad rows: one more pass, if there are bad rows."""
        if not self._found.figures()[BAD]:
            return {}, []
        kinds = self._kinds() if self._of.policy == "missing" else F.slice(self._kinds(), 1, 1)
        places = [F.col(TEXT).cast("binary").alias(TEXT)] if TEXT in self._marked.columns else []
        bad = self._marked.where(BAD).select(ROW, FILE, LINE, *places, kinds.alias(_KINDS))
        bad.persist(StorageLevel.DISK_ONLY)
        try:
            found = bad.select(F.explode(_KINDS).alias(_KIND)).groupBy(_KIND).count().collect()
            counts = {row[0]: row[1] for row in sorted(found)}
            if FATAL in counts and self._of.policy != "raise":
                bad = bad.where(F.array_contains(_KINDS, FATAL))
            return counts, bad.orderBy(ROW).limit(FAULTS_SHOWN).collect()
        finally:
            bad.unpersist()


def _presence(types: Mapping[str, ColumnType]) -> list[Column]:
    """How many values of each column are there, and of all where it holds lists."""
    figures = []
    for place, (name, kind) in enumerate(types.items()):
        x = column(name)
        if kind.is_list:
            figures.append(F.sum(F.size(x)).alias(f"total{place}"))
        there = F.sum(F.size(F.array_compact(x))) if kind.is_list else F.count(x)
        figures.append(there.alias(f"present{place}"))
    return figures
