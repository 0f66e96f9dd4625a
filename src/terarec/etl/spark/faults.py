"""What is bad in the rows of a source: counted on the cluster, told by the reader of the local engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pyspark.sql import Column, DataFrame, Observation, Row
from pyspark.sql import functions as F

from terarec.errors import FormatError
from terarec.etl.columns import ColumnType
from terarec.etl.source import BadInputPolicy
from terarec.etl.source.bad_input import FAULTS_SHOWN
from terarec.etl.source.told import line_faults, row_faults
from terarec.etl.spark.expressions import FILE, LINE, ROW, TEXT, column
from terarec.kernels.delimited_types import FAULT_KINDS
from terarec.spec import SourceSpec

KINDS = "__terarec_faults"
"""Column of the kinds of a row's faults, an array that is mostly empty."""

_ALL_KINDS = (*FAULT_KINDS, "json", "text", "time")


class Faults:
    """Counts what is bad while rows are read, and finds the first places afterwards.

    Args:
        marked: the rows, with their places and `KINDS`.
        source: how they are read.
        paths: of the files.
        headers: the first line of each.
        policy: what follows.
    """

    def __init__(
        self,
        marked: DataFrame,
        source: SourceSpec,
        paths: Sequence[str],
        headers: Sequence[str | None],
        policy: BadInputPolicy,
    ) -> None:
        self._marked = marked
        self._source = source
        self._paths = paths
        self._headers = headers
        self._policy = policy
        self._names: tuple[str, ...] = ()
        self._found, self._kept = Observation(), Observation()

    def observed(self, types: Mapping[str, ColumnType]) -> DataFrame:
        """The rows that the policy keeps, counted while they are computed; `types` are those of their columns."""
        self._names = tuple(types)
        kinds = [F.sum(F.size(F.filter(KINDS, _is(kind)))).alias(kind) for kind in _ALL_KINDS]
        frame = self._marked.observe(self._found, *kinds)
        if self._policy == "skip":
            frame = frame.where(F.size(KINDS) == 0)
        figures = []
        for place, (name, kind) in enumerate(types.items()):
            x = column(name)
            there = F.sum(F.size(F.array_compact(x))) if kind.is_list else F.count(x)
            total = F.sum(F.size(x)) if kind.is_list else F.count("*")
            figures += [there.alias(f"present{place}"), total.alias(f"total{place}")]
        return frame.observe(self._kept, *figures)

    def missing(self) -> Mapping[str, tuple[int, int]]:
        """Column -> how many of its values are missing, and how many there are; once rows were computed."""
        seen = self._kept.get
        found = [(seen[f"present{place}"] or 0, seen[f"total{place}"] or 0) for place in range(len(self._names))]
        return {name: (total - present, total) for name, (present, total) in zip(self._names, found, strict=True)}

    def counts(self) -> Mapping[str, int]:
        """Kind -> how often it occurred; to be called once rows were computed."""
        seen = self._found.get
        return {kind: seen[kind] for kind in sorted(_ALL_KINDS) if seen.get(kind)}

    def first(self) -> tuple[str, ...]:
        """The first ones, each in one line with file and line.

        Raises:
            FormatError: there is one, and the policy is "raise".
        """
        if not self.counts():
            return ()
        places = [ROW, FILE, LINE, KINDS]
        if TEXT in self._marked.columns:
            places.append(TEXT)
        bad = self._marked.where(F.size(KINDS) > 0).select(*places).orderBy(ROW).limit(FAULTS_SHOWN)
        if TEXT in places:
            bad = bad.withColumn(TEXT, F.col(TEXT).cast("binary"))
        lines = [line for row in bad.collect() for line in self._told(row)]
        if self._policy == "raise":
            raise FormatError(lines[0])
        return tuple(lines[:FAULTS_SHOWN])

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


def _is(kind: str) -> Callable[[Column], Column]:
    return lambda found: found == kind
