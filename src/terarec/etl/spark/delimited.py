"""Lines of delimited text -> their fields."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.errors import FormatError
from terarec.etl.source.delimited import split_header
from terarec.etl.spark.expressions import TEXT
from terarec.etl.spark.fields import Field, literally, read_fields
from terarec.spec import SourceSpec


def delimited_fields(
    source: SourceSpec, paths: Sequence[str], headers: Sequence[str | None]
) -> tuple[list[Field], Column]:
    """The columns of delimited lines, and the kind of fault of a whole line, null for a good one.

    Raises:
        FormatError: headers that differ from file to file, or lack a column.
    """
    fields, quotes_good = _split(F.col(TEXT), source)
    places = _places(source, paths, headers)
    expected = len(source.columns) if places is None else places[1]
    texts = [F.get(fields, F.lit(place)) for place in (range(expected) if places is None else places[0])]
    count = F.size(fields)
    fault = F.when(~quotes_good, "quote").when(count < expected, "short_line").when(count > expected, "long_line")
    return read_fields(source, texts, F.is_valid_utf8(TEXT)), fault


def _places(source: SourceSpec, paths: Sequence[str], headers: Sequence[str | None]) -> tuple[list[int], int] | None:
    """The positions of the columns by the header, and how many fields that has; None without headers."""
    if not source.header:
        return None
    first: str | None = None
    for path, header in zip(paths, headers, strict=True):
        if header is None:
            continue
        if first is not None and header != first:
            raise FormatError(f"{path}: header {header!r} differs from {first!r}, expected one header for all files")
        first = header
    names = split_header(paths[0], (first or "").encode(), source)
    for column in source.columns:
        if column.name not in names:
            raise FormatError(f"{paths[0]}: column {column.name!r} is missing, the header names {', '.join(names)}")
    return [names.index(column.name) for column in source.columns], len(names)


def _split(line: Column, source: SourceSpec) -> tuple[Column, Column]:
    """The fields of a line, an array of text, and whether its quotes are good.

    A field between quotes loses them, and two quotes inside become one. Trimming is left to the reader of values.
    """
    delimiter = literally(source.delimiter)
    if not source.quote:
        return F.split(line, delimiter, -1), F.lit(True)
    space = f"(?:(?!{delimiter})[ \\t\\x0b\\x0c])*" if source.trim else ""
    quoted = f'{space}"((?:[^"]|"")*+)"{space}'
    anonymous = quoted.replace('((?:[^"]', '(?:(?:[^"]')
    # Possessive, or else Java would take a step of its stack for every character.
    plain = f"[^{delimiter}]*" if len(source.delimiter) == 1 else f"(?:(?!{delimiter})(?s:.))*+"
    field = f'(?:{anonymous}|{space}(?!"){plain})'
    # A delimiter in front makes every field match alike, an empty last one too.
    parts = F.regexp_extract_all(
        F.concat(F.lit(source.delimiter), line), F.lit(f"{delimiter}({field})(?={delimiter}|\\z)"), F.lit(1)
    )
    unquoted = F.transform(
        parts,
        lambda part: F.when(
            part.rlike(f"^{quoted}\\z"), F.replace(F.regexp_extract(part, quoted, 1), F.lit('""'), F.lit('"'))
        ).otherwise(part),
    )
    return unquoted, line.rlike(f"^{field}(?:{delimiter}{field})*\\z")
