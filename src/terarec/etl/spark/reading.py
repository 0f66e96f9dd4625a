"""The files of a source -> a frame of typed rows, and what is bad in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from terarec.errors import FormatError
from terarec.etl.source.text import compression_of
from terarec.etl.spark.delimited import delimited_fields
from terarec.etl.spark.expressions import FILE, LINE, ROW
from terarec.etl.spark.faults import BAD, Faults, FaultsOf
from terarec.etl.spark.fields import JudgedRows
from terarec.etl.spark.json_lines import json_fields
from terarec.etl.spark.lines import NumberedLines, number_lines
from terarec.etl.spark.parquet_files import number_rows, parquet_fields
from terarec.spec import BadInputPolicy, SourceSpec

_VALUE = "__terarec_value"
_PLACES = 3
"""Columns of `TypedRows.frame` before those of the source."""


@dataclass(frozen=True, slots=True)
class TypedRows:
    """Rows of a source.

    Attributes:
        frame: columns `ROW`, `FILE`, `LINE` and those of the source.
        file_rows: how many rows each file has, those that were skipped included.
        faults: what is bad in them, known once `frame` was computed.
    """

    frame: DataFrame
    file_rows: tuple[int, ...]
    faults: Faults

    def missing(self) -> Mapping[str, tuple[int, int]]:
        """Column -> how many of its values are missing, and how many there are; once `frame` was computed."""
        return dict(zip(self.frame.columns[_PLACES:], self.faults.missing(), strict=True))


def read_rows(spark: SparkSession, source: SourceSpec, paths: Sequence[str], policy: BadInputPolicy) -> TypedRows:
    """Read files in order.

    Args:
        spark: the session.
        source: how they are read.
        paths: of the files.
        policy: what follows a value or a line that cannot be read.

    Raises:
        ConfigError: a file lacks a column, or occurs twice.
        FormatError: a column is of another type, or a file has no row.
    """
    if source.format == "parquet":
        numbered = number_rows(spark, source, paths)
    else:
        for path in paths:
            if (compression := compression_of(path)) in ("xz", "zip"):
                raise FormatError(f"{path}: is a {compression} file, expected text, plain or gzip (engine 'spark')")
        header = source.format == "delimited" and source.header
        numbered = number_lines(spark, paths, header=header, encoding=source.encoding)
    for path, rows in zip(paths, numbered.file_rows, strict=True):
        if not rows:
            raise FormatError(f"{path}: the file is empty, expected at least one row")
    judged = _judged(source, numbered, paths, policy)
    held = {f"{_VALUE}{number}": field for number, field in enumerate(judged.fields)}
    frame = judged.frame.withColumns({name: field.values for name, field in held.items()})
    bad = [judged.is_bad, *(field.is_bad(F.col(name)) for name, field in held.items())]
    faults = Faults(
        frame.withColumn(BAD, reduce(or_, bad)),
        judged.kinds,
        FaultsOf(source, paths, numbered.headers, policy),
        num_rows=sum(numbered.file_rows),
        types={name: field.type for name, field in held.items()},
    )
    values = (F.col(name).alias(field.name) for name, field in held.items())
    return TypedRows(faults.observed().select(ROW, FILE, LINE, *values), numbered.file_rows, faults)


def _judged(source: SourceSpec, numbered: NumberedLines, paths: Sequence[str], policy: BadInputPolicy) -> JudgedRows:
    if source.format == "parquet":
        return parquet_fields(source, numbered.frame, paths[0])
    if source.format == "json_lines":
        return json_fields(source, numbered.frame)
    return delimited_fields(source, numbered, paths, policy)
