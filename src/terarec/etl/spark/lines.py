"""Lines of text files and where each stands, whatever the partitions in which Spark reads them.

A file is read in blocks, a block by one task from its start to its end. So the numbers that Spark gives to rows, which
rise by one within a task, less the first one of the block, count the lines of the block; what the blocks before it
hold, one pass over the lines tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from terarec.errors import ConfigError, FormatError
from terarec.etl.source.text import CARRIAGE_RETURNS
from terarec.etl.spark.expressions import FILE, LINE, ROW, TEXT

_PATH, _BLOCK, _COUNTER = "__terarec_path", "__terarec_block", "__terarec_counter"
_LINE_SHIFT, _ROW_SHIFT, _HEADER = "__terarec_line_shift", "__terarec_row_shift", "__terarec_header"
_TASK_BITS = 33
"""Bits of Spark's rising numbers that count the rows of one task."""


@dataclass(frozen=True, slots=True)
class NumberedLines:
    """The lines of some files that are rows: all but headers and empty ones.

    Attributes:
        frame: columns `TEXT` (without the line's end), `FILE` (position among the sources), `LINE` (number in the file,
            from 1) and `ROW`.
        file_rows: how many each file has.
        headers: the first line of each file, None for an empty one.
    """

    frame: DataFrame
    file_rows: tuple[int, ...]
    headers: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    file: int
    path: str
    start: int
    lines: int
    rows: int
    counter: int
    head: str | None

    @property
    def task(self) -> int:
        return self.counter >> _TASK_BITS


def number_lines(spark: SparkSession, paths: Sequence[str], *, header: bool, encoding: str) -> NumberedLines:
    """Read the lines of files, in order; one pass over them finds their numbers.

    Args:
        spark: the session.
        paths: of the files.
        header: whether the first line of each file is no row.
        encoding: of the text.

    Raises:
        ConfigError: a file occurs twice, or Spark passes over it.
        FormatError: a file whose lines end in carriage returns alone.
    """
    lines = _read(spark, paths, encoding)
    is_row = (F.col(TEXT) != "").cast("bigint")
    head = F.min_by(F.when(F.col(_BLOCK) == 0, F.col(TEXT)), _COUNTER)
    counted = lines.groupBy(_PATH, _BLOCK).agg(F.count("*"), F.sum(is_row), F.min(_COUNTER), head).collect()
    files = file_positions(paths, {row[0] for row in counted})
    blocks = sorted((_Block(files[row[0]], *row) for row in counted), key=lambda block: (block.file, block.start))
    for block in blocks:
        if block.lines == 1 and block.start == 0 and "\r" in (block.head or ""):
            raise FormatError(f"{paths[block.file]}: {CARRIAGE_RETURNS}")
    numbered = lines.join(F.broadcast(spark.createDataFrame(_shifts(blocks, header=header))), [_PATH, _BLOCK])
    if header:
        numbered = numbered.where(F.col(_HEADER).isNull() | (F.col(_HEADER) != F.col(_COUNTER)))
    frame = numbered.where(F.col(TEXT) != "").select(
        TEXT,
        FILE,
        (F.col(_COUNTER) + F.col(_LINE_SHIFT)).alias(LINE),
        (F.monotonically_increasing_id() + F.col(_ROW_SHIFT)).alias(ROW),
    )
    rows = [0] * len(paths)
    headers: list[str | None] = [None] * len(paths)
    for block in blocks:
        rows[block.file] += _rows_of(block, header=header)
        headers[block.file] = block.head if block.start == 0 else headers[block.file]
    return NumberedLines(frame, tuple(rows), tuple(headers))


def file_positions(paths: Sequence[str], found: set[str]) -> Mapping[str, int]:
    """The path of each file as Spark tells it -> its position among `paths`.

    Raises:
        ConfigError: a file occurs twice.
    """
    positions: dict[str, int] = {}
    known = {_plain(path): position for position, path in enumerate(paths)}
    if len(known) < len(paths):
        twice = next(path for position, path in enumerate(paths) if known[_plain(path)] != position)
        raise ConfigError(f"{twice}: occurs twice among the sources, expected every file once")
    for path in found:
        positions[path] = known[_plain(unquote(path))]
    return positions


def escaped(path: str) -> str:
    """`path` for Spark, which takes it as a pattern."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def _plain(path: str) -> str:
    return re.sub(r"^file:/*", "/", path)


def _read(spark: SparkSession, paths: Sequence[str], encoding: str) -> DataFrame:
    text = spark.read.option("lineSep", "\n").text([escaped(path) for path in paths])
    if encoding == "latin-1":
        text = text.withColumn("value", F.decode(F.col("value").cast("binary"), "ISO-8859-1"))
    return text.select(
        # No regular expression, which would put replacement characters for bytes that are not UTF-8.
        F.expr("if(endswith(value, '\r'), left(value, length(value) - 1), value)").alias(TEXT),
        F.col("_metadata.file_path").alias(_PATH),
        F.col("_metadata.file_block_start").alias(_BLOCK),
        F.monotonically_increasing_id().alias(_COUNTER),
    )


def _rows_of(block: _Block, *, header: bool) -> int:
    return block.rows - (1 if header and block.start == 0 and block.head else 0)


def _shifts(blocks: Sequence[_Block], *, header: bool) -> pa.Table:
    """What turns Spark's numbers into those of lines and of rows, block by block."""
    row_counters: dict[int, int] = {}
    first_rows: dict[tuple[int, int], int] = {}
    for block in sorted(blocks, key=lambda block: block.counter):  # as the tasks read them
        counter = row_counters.get(block.task, block.task << _TASK_BITS)
        first_rows[block.file, block.start] = counter
        row_counters[block.task] = counter + _rows_of(block, header=header)
    columns: dict[str, list[object]] = {name: [] for name in (_PATH, _BLOCK, FILE, _LINE_SHIFT, _ROW_SHIFT, _HEADER)}
    lines_before: dict[int, int] = {}
    rows_before = 0
    for block in blocks:
        line_shift = lines_before.get(block.file, 0) + 1 - block.counter
        row_shift = rows_before - first_rows[block.file, block.start]
        first = block.counter if header and block.start == 0 else None
        values = (block.path, block.start, block.file, line_shift, row_shift, first)
        for name, value in zip(columns, values, strict=True):
            columns[name].append(value)
        lines_before[block.file] = lines_before.get(block.file, 0) + block.lines
        rows_before += _rows_of(block, header=header)
    types = (pa.string(), pa.int64(), pa.int32(), pa.int64(), pa.int64(), pa.int64())
    arrays = [pa.array(values, kind) for values, kind in zip(columns.values(), types, strict=True)]
    return pa.table(dict(zip(columns, arrays, strict=True)))
