"""Parquet files -> rows with their ids, and their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from terarec.errors import FormatError
from terarec.etl.columns import ColumnType
from terarec.etl.source.arrow_files import ParquetReader
from terarec.etl.spark.expressions import FILE, LINE, ROW, column, each
from terarec.etl.spark.fields import (
    Field,
    JudgedRows,
    hex_of,
    integer_of,
    judged,
    kinds_of,
    literally,
    number_of,
    present,
    seconds_of,
    year_second_of,
)
from terarec.etl.spark.lines import NumberedLines, escaped, file_positions
from terarec.etl.workflow.plan import source_types
from terarec.spec import SourceColumn, SourceSpec

_PATH, _SHIFT = "__terarec_path", "__terarec_shift"
_TEXTS = "array<string>"
_INTEGERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_NUMBERS = (*_INTEGERS, T.FloatType, T.DoubleType, T.DecimalType)
_TIMES = (T.TimestampType, T.TimestampNTZType, T.DateType)


def number_rows(spark: SparkSession, source: SourceSpec, paths: Sequence[str]) -> NumberedLines:
    """The rows of Parquet files with all of their columns, as `terarec.etl.spark.lines.number_lines` has lines.

    Raises:
        ConfigError: a file lacks a column, or occurs twice.
        FormatError: a column of another type, or not of the same one in all files.
    """
    ParquetReader(source).check_schemas(paths)  # Spark looks at the first file alone, and gives nulls for the others
    read = spark.read.parquet(*map(escaped, paths)).select(
        "*", F.col("_metadata.file_path").alias(_PATH), F.col("_metadata.row_index").alias(LINE)
    )
    counted = read.groupBy(_PATH).count().collect()
    files = file_positions(paths, {row[0] for row in counted})
    rows = [0] * len(paths)
    for path, count in counted:
        rows[files[path]] = count
    before = [0, *accumulate(rows)]
    shifts = pa.table(
        {
            _PATH: pa.array([path for path, _ in counted], pa.string()),
            FILE: pa.array([files[path] for path, _ in counted], pa.int32()),
            _SHIFT: pa.array([before[files[path]] for path, _ in counted], pa.int64()),
        }
    )
    joined = read.join(F.broadcast(spark.createDataFrame(shifts)), _PATH)
    frame = joined.withColumn(ROW, F.col(LINE) + F.col(_SHIFT)).withColumn(LINE, F.col(LINE) + 1).drop(_PATH, _SHIFT)
    return NumberedLines(frame, tuple(rows), (None,) * len(paths))


def parquet_fields(source: SourceSpec, frame: DataFrame, where: str) -> JudgedRows:
    """The columns of Parquet files that were read as `number_rows` does.

    Raises:
        FormatError: a column is of a type that Spark does not take.
    """
    found = {field.name: field.dataType for field in frame.schema.fields}
    types = source_types(source)
    fields = [_field(item, types[item.name], found[item.name], source, where) for item in source.columns]
    return JudgedRows(frame, fields, F.lit(False), lambda: F.array_compact(F.array(*kinds_of(fields))))


def _field(item: SourceColumn, kind: ColumnType, found: T.DataType, source: SourceSpec, where: str) -> Field:
    is_array = isinstance(found, T.ArrayType)
    element = found.elementType if isinstance(found, T.ArrayType) else found
    raw = column(item.name)
    if item.separator is not None and isinstance(found, T.StringType):
        raw = F.coalesce(F.split(present(raw, source), literally(item.separator), -1), F.array().cast(_TEXTS))
    elif is_array is not kind.is_list:
        raise FormatError(f"{where}: column {item.name!r} holds {found.simpleString()}, expected {kind}")
    elif kind.is_list:
        raw = F.coalesce(raw, F.array().cast(found))
    read = _reader(item, element)
    if read is None:
        raise FormatError(f"{where}: column {item.name!r} holds {found.simpleString()}, expected values of {item.type}")
    if isinstance(element, T.StringType):
        raw = each(kind, raw, lambda value: present(value, source))
    elif isinstance(element, T.FloatType | T.DoubleType):
        raw = each(kind, raw, lambda value: F.when(~F.isnan(value), value))

    kinds = _TEXT_FAULTS if isinstance(element, T.StringType) else _FAULTS
    kinds = _FLOAT_FAULTS if isinstance(element, T.FloatType | T.DoubleType) else kinds

    def fault_of(value: Column) -> Column:
        return F.when(value.isNotNull() & read(value).isNull(), kinds[item.type])

    return judged(item, kind, raw, read, fault_of)


_FAULTS = {"text": "utf8", "integer": "integer_range", "time": "time", "number": "infinite", "hex32": "hex"}
_FLOAT_FAULTS = {**_FAULTS, "integer": "integer"}
_TEXT_FAULTS = {**_FAULTS, "integer": "integer", "number": "number"}


def _reader(item: SourceColumn, found: T.DataType) -> Callable[[Column], Column] | None:
    """The values of a column from those of a file, null where they are bad; None for a type that does not fit."""
    is_text = isinstance(found, T.StringType)
    if item.type == "text" and is_text:
        return lambda value: F.when(F.is_valid_utf8(value), value)
    if item.type == "hex32" and is_text:
        return hex_of
    if item.type == "hex32" and isinstance(found, _INTEGERS):
        return lambda value: F.when(value.between(0, 2**32 - 1), value.cast("bigint"))
    if item.separator is not None and is_text and item.type in ("integer", "number"):
        return number_of if item.type == "number" else integer_of
    if item.type == "number" and isinstance(found, _NUMBERS):
        return lambda value: F.when(F.abs(value.cast("double")) < F.lit(float("inf")), value.cast("double"))
    if item.type == "time" and item.format is not None and is_text:
        layout = item.format
        return lambda value: seconds_of(value, layout)
    if item.type == "time" and isinstance(found, _TIMES):
        return lambda value: F.unix_seconds(value.cast("timestamp"))
    if item.type == "time" and isinstance(found, _INTEGERS):
        return lambda value: year_second_of(value.cast("bigint"))
    if item.type == "integer" and isinstance(found, _INTEGERS):
        return lambda value: value.cast("bigint")
    if item.type == "integer" and isinstance(found, T.FloatType | T.DoubleType):
        return lambda value: F.when(
            (F.abs(value.cast("double")) < 2**53) & (F.floor(value) == value), value.cast("bigint")
        )
    return None
