"""The files of a source -> a frame of typed rows, and what is bad in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from terarec.errors import FormatError
from terarec.etl.source import BadInputPolicy
from terarec.etl.spark.delimited import delimited_fields
from terarec.etl.spark.expressions import FILE, LINE, ROW, TEXT, column
from terarec.etl.spark.faults import KINDS, Faults
from terarec.etl.spark.fields import JudgedRows
from terarec.etl.spark.json_lines import json_fields
from terarec.etl.spark.lines import NumberedLines, number_lines
from terarec.etl.spark.parquet_files import number_rows, parquet_fields
from terarec.spec import SourceSpec

_VALUE = "__terarec_value"


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
        header = source.format == "delimited" and source.header
        numbered = number_lines(spark, paths, header=header, encoding=source.encoding)
    for path, rows in zip(paths, numbered.file_rows, strict=True):
        if not rows:
            raise FormatError(f"{path}: the file is empty, expected at least one row")
    judged = _judged(source, numbered, paths, policy)
    places = [ROW, FILE, LINE] if source.format == "parquet" else [ROW, FILE, LINE, TEXT]
    marked = _marked(judged, places, policy)
    faults = Faults(
        marked,
        source,
        paths,
        numbered.headers,
        num_rows=sum(numbered.file_rows),
        policy=policy,
        types={field.name: field.type for field in judged.fields},
    )
    frame = faults.observed().select(ROW, FILE, LINE, *(column(field.name) for field in judged.fields))
    return TypedRows(frame, numbered.file_rows, faults)


def _marked(judged: JudgedRows, places: Sequence[str], policy: BadInputPolicy) -> DataFrame:
    """Columns `places`, those of the source, and `KINDS`.

    What is wrong costs much to tell: it is asked of those rows alone that have a value which was not read.
    """
    held = {f"{_VALUE}{number}": field for number, field in enumerate(judged.fields)}
    frame = judged.frame.withColumns({name: field.values for name, field in held.items()})
    suspects = [judged.suspect, *(field.suspect(F.col(name)) for name, field in held.items())]
    kinds = judged.kinds if policy == "missing" else F.slice(judged.kinds, 1, 1)
    return frame.select(
        *places,
        *(F.col(name).alias(field.name) for name, field in held.items()),
        F.when(reduce(or_, suspects), kinds).otherwise(F.array().cast("array<string>")).alias(KINDS),
    )


def _judged(source: SourceSpec, numbered: NumberedLines, paths: Sequence[str], policy: BadInputPolicy) -> JudgedRows:
    if source.format == "parquet":
        return parquet_fields(source, numbered.frame, paths[0])
    if source.format == "json_lines":
        return json_fields(source, numbered.frame)
    return delimited_fields(source, numbered, paths, policy)
