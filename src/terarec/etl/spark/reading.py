"""The files of a source -> a frame of typed rows, and what is bad in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from terarec.errors import FormatError
from terarec.etl.columns import ColumnType
from terarec.etl.source import BadInputPolicy
from terarec.etl.spark.delimited import delimited_fields
from terarec.etl.spark.expressions import FILE, LINE, ROW, column
from terarec.etl.spark.fields import Field
from terarec.etl.spark.json_lines import json_fields
from terarec.etl.spark.lines import number_lines
from terarec.etl.spark.parquet_files import number_rows, parquet_fields
from terarec.kernels.delimited_types import EXPECTED
from terarec.spec import SourceSpec

_FAULTS = "__terarec_faults"
_KEPT = 10
_SHOWN = 80
_EXPECTED: Mapping[str, str] = {
    **dict(EXPECTED.items()),
    "json": "a JSON object",
    "time": "a time in the column's format",
}


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Rows of a source.

    Attributes:
        frame: columns `ROW`, `FILE` and those of the source.
        file_rows: how many rows each file has, those that were skipped included.
        faults: what is bad in them, known once `frame` was computed.
    """

    frame: DataFrame
    file_rows: tuple[int, ...]
    faults: Faults


class Faults:
    """Counts what is bad while rows are read, and finds the first places afterwards.

    Args:
        marked: the rows, with an array of their faults.
        types: column -> its type.
        paths: of the files.
        policy: what follows.
    """

    def __init__(
        self, marked: DataFrame, types: Mapping[str, ColumnType], paths: Sequence[str], policy: BadInputPolicy
    ) -> None:
        self._marked = marked
        self._types = types
        self._paths = paths
        self._policy = policy
        self._seen = Observation()

    def observed(self) -> DataFrame:
        """The rows, counted while they are computed."""
        counts = [F.sum(F.size(F.filter(_FAULTS, _is(kind)))).alias(kind) for kind in _EXPECTED]
        values = [
            F.count(column(name)) if not kind.is_list else F.sum(F.size(F.array_compact(column(name))))
            for name, kind in self._types.items()
        ]
        totals = [
            F.count("*") if not kind.is_list else F.sum(F.size(column(name))) for name, kind in self._types.items()
        ]
        present = [figure.alias(f"present{place}") for place, figure in enumerate(values)]
        there = [figure.alias(f"total{place}") for place, figure in enumerate(totals)]
        return self._marked.observe(self._seen, F.count("*").alias("rows"), *counts, *present, *there)

    def missing(self) -> Mapping[str, tuple[int, int]]:
        """Column -> how many of its values are missing, and how many there are; once rows were computed."""
        seen = self._seen.get
        found = [(seen[f"present{place}"] or 0, seen[f"total{place}"] or 0) for place in range(len(self._types))]
        return {name: (total - present, total) for name, (present, total) in zip(self._types, found, strict=True)}

    def counts(self) -> Mapping[str, int]:
        """Kind -> how often it occurred; to be called once rows were computed."""
        seen = self._seen.get
        return {kind: seen[kind] for kind in _EXPECTED if seen.get(kind)}

    def first(self) -> tuple[str, ...]:
        """The first ones, each in one line with file and line.

        Raises:
            FormatError: there is one, and the policy is "raise".
        """
        if not self.counts():
            return ()
        bad = self._marked.where(F.size(_FAULTS) > 0).select(ROW, FILE, LINE, _FAULTS).orderBy(ROW).limit(_KEPT)
        lines = [_line(self._paths[row[FILE]], row[LINE], fault) for row in bad.collect() for fault in row[_FAULTS]]
        if self._policy == "raise":
            raise FormatError(lines[0])
        return tuple(lines[:_KEPT])


def read_rows(spark: SparkSession, source: SourceSpec, paths: Sequence[str], policy: BadInputPolicy) -> TypedRows:
    """Read files in order.

    Args:
        spark: the session.
        source: how they are read.
        paths: of the files.
        policy: what follows a value or a line that cannot be read.

    Raises:
        ConfigError: a file occurs twice.
        FormatError: a column is missing, or a file has no row.
    """
    if source.format == "parquet":
        numbered = number_rows(spark, paths)
        fields, line_fault = parquet_fields(source, numbered.frame, paths[0])
    else:
        header = source.format == "delimited" and source.header
        numbered = number_lines(spark, paths, header=header, encoding=source.encoding)
        if source.format == "delimited":
            fields, line_fault = delimited_fields(source, paths, numbered.headers)
        else:
            fields, line_fault = json_fields(source)
    for path, rows in zip(paths, numbered.file_rows, strict=True):
        if not rows:
            raise FormatError(f"{path}: the file is empty, expected at least one row")
    marked = numbered.frame.select(
        ROW, FILE, LINE, *(field.values.alias(field.name) for field in fields), _faults(fields, line_fault, policy)
    )
    faults = Faults(marked, {field.name: field.type for field in fields}, paths, policy)
    frame = faults.observed()
    if policy == "skip":
        frame = frame.where(F.size(_FAULTS) == 0)
    return TypedRows(frame.select(ROW, FILE, *(column(field.name) for field in fields)), numbered.file_rows, faults)


def _faults(fields: Sequence[Field], line_fault: Column, policy: BadInputPolicy) -> Column:
    """What is bad in a row, mostly nothing: an array of kind, column and text; the first one where it decides."""
    described = [
        F.when(field.fault.isNotNull(), _described(field.fault, F.lit(field.name), F.substring(field.text, 1, _SHOWN)))
        for field in fields
    ]
    whole = F.when(line_fault.isNotNull(), _described(line_fault, F.lit(""), F.lit("")))
    listed = F.array_compact(F.array(*described, whole))
    return (listed if policy == "missing" else F.slice(listed, 1, 1)).alias(_FAULTS)


def _is(kind: str) -> Callable[[Column], Column]:
    return lambda fault: fault.getField("kind") == kind


def _described(kind: Column, name: Column, text: Column) -> Column:
    return F.struct(kind.alias("kind"), name.alias("column"), text.alias("text"))


def _line(path: str, number: int, fault: Mapping[str, str]) -> str:
    if not fault["column"]:
        return f"{path}: line {number}: expected {_EXPECTED[fault['kind']]}"
    return (
        f"{path}: line {number}, column {fault['column']!r}: got {fault['text']!r}, expected {_EXPECTED[fault['kind']]}"
    )
