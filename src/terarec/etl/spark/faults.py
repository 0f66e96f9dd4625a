"""What is bad in the rows of a source: counted on the cluster, told by the reader of the local engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from terarec.etl.columns import ColumnType
from terarec.etl.source import BadInputPolicy
from terarec.etl.source.bad_input import FAULTS_SHOWN
from terarec.etl.source.told import line_faults, row_faults
from terarec.etl.spark.bad_input import PlacedFault
from terarec.etl.spark.counted import Counted
from terarec.etl.spark.expressions import FILE, LINE, ROW, TEXT, column
from terarec.kernels.delimited_types import FAULT_KINDS
from terarec.spec import SourceSpec

KINDS = "__terarec_faults"
"""Column of the kinds of a row's faults, an array that is mostly empty."""

_ROWS = "rows"
_ALL_KINDS = (*FAULT_KINDS, "json", "text", "time")


class Faults:
    """Counts what is bad while rows are read, and finds the first places afterwards.

    Args:
        marked: the rows, with their places and `KINDS`.
        source: how they are read.
        paths: of the files.
        headers: the first line of each.
        num_rows: of all of them.
        policy: what follows.
        types: of the columns.
    """

    def __init__(
        self,
        marked: DataFrame,
        source: SourceSpec,
        paths: Sequence[str],
        headers: Sequence[str | None],
        *,
        num_rows: int,
        policy: BadInputPolicy,
        types: Mapping[str, ColumnType],
    ) -> None:
        self._marked = marked
        self._source = source
        self._paths = paths
        self._headers = headers
        self._policy = policy
        self._num_rows = num_rows
        kinds = [
            F.sum(F.when(F.size(KINDS) > 0, F.size(F.filter(KINDS, _is(kind))))).alias(kind) for kind in _ALL_KINDS
        ]
        self._found = Counted(marked, [F.count("*").alias(_ROWS), *kinds])
        frame = self._found.observed()
        frame = frame.where(F.size(KINDS) == 0) if policy == "skip" else frame
        self._names = tuple(types)
        self._kept = Counted(frame, [F.count("*").alias(_ROWS), *_presence(types)])

    def observed(self) -> DataFrame:
        """The rows that the policy keeps, counted while they are computed."""
        return self._kept.observed()

    @property
    def are_counted_twice(self) -> bool:
        """Whether Spark did tasks again whose rows had been counted."""
        return bool(self._found.figures()[_ROWS] != self._num_rows)

    def missing(self) -> Mapping[str, tuple[int, int]]:
        """Column -> how many of its values are missing, and how many there are; once rows were computed."""
        seen = self._kept.again() if self.are_counted_twice else self._kept.figures()
        found = {}
        for place, name in enumerate(self._names):
            total = seen.get(f"total{place}", seen[_ROWS]) or 0
            found[name] = (total - (seen[f"present{place}"] or 0), total)
        return found

    def counts(self) -> Mapping[str, int]:
        """Kind -> how often it occurred; to be called once rows were computed."""
        seen = self._found.again() if self.are_counted_twice else self._found.figures()
        return {kind: seen[kind] for kind in sorted(_ALL_KINDS) if seen.get(kind)}

    def first(self) -> Sequence[PlacedFault]:
        """The first ones."""
        if not self.counts():
            return []
        places = [ROW, FILE, LINE, KINDS]
        if TEXT in self._marked.columns:
            places.append(TEXT)
        bad = self._marked.where(F.size(KINDS) > 0).select(*places).orderBy(ROW).limit(FAULTS_SHOWN)
        if TEXT in places:
            bad = bad.withColumn(TEXT, F.col(TEXT).cast("binary"))
        found = [PlacedFault(row[FILE], row[LINE], row[ROW], told) for row in bad.collect() for told in self._told(row)]
        return found[:FAULTS_SHOWN]

    def _told(self, row: Row) -> Sequence[str]:
        path, number, place = self._paths[row[FILE]], row[LINE], "row"
        if self._source.format == "parquet":
            faults = row_faults(self._source, path, number, self._policy)
        else:
            place = "line"
            header = self._headers[row[FILE]] or ""
            faults = line_faults(self._source, path, number, bytes(row[TEXT]), header, self._policy)
        # Where only Spark finds fault with a value it tells at least the kind.
        return [str(fault) for fault in faults] or [f"{path}: {place} {number}: {kind}" for kind in row[KINDS]]


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


def _occurrences(kind: str) -> Column:
    found = F.when(F.size(KINDS) > 0, F.size(F.filter(KINDS, _is(kind))))  # most rows have no fault
    return F.sum(found).alias(kind)


def _is(kind: str) -> Callable[[Column], Column]:
    return lambda found: found == kind
