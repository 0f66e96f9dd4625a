"""Lines of delimited text -> their fields, cut and judged as csrc/encoding/delimited.cpp does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.errors import FormatError
from terarec.etl.source import BadInputPolicy
from terarec.etl.source.delimited import split_header
from terarec.etl.source.names import check_names
from terarec.etl.source.text import MAX_LINE_BYTES
from terarec.etl.spark.expressions import TEXT
from terarec.etl.spark.fields import Field, JudgedRows, literally, read_fields
from terarec.etl.spark.lines import NumberedLines
from terarec.spec import SourceSpec

_PARTS, _CONTENTS, _BAD = "__terarec_parts", "__terarec_contents", "__terarec_bad"
_SPACES = r"[ \t\x0b\x0c\r]"


@dataclass(frozen=True, slots=True)
class _Cut:
    """The fields of a line.

    Attributes:
        contents: array of text, without quotes around them.
        badly_quoted: array of bool; None if quotes mean nothing.
    """

    contents: Column
    badly_quoted: Column | None

    def content(self, place: int) -> Column:
        """The field at `place`, null if it is badly quoted, or not there."""
        field = F.get(self.contents, F.lit(place))
        return field if self.badly_quoted is None else F.when(~self.is_bad(place), field)

    def is_bad(self, place: int) -> Column:
        """Whether a quote does not end there, or something follows it; null if there is no such field."""
        assert self.badly_quoted is not None
        return F.get(self.badly_quoted, F.lit(place))


def delimited_fields(
    source: SourceSpec, numbered: NumberedLines, paths: Sequence[str], policy: BadInputPolicy
) -> JudgedRows:
    """The columns of delimited lines.

    With the policy "missing" all faults are told; else the first one of a line, in the order of the local engine.

    Raises:
        ConfigError: the header lacks a column.
        FormatError: headers that differ from file to file.
    """
    names = _names(source, paths, numbered.headers)
    is_long = F.octet_length(TEXT) > MAX_LINE_BYTES
    frame, cut = _cut(numbered.frame, F.when(~is_long, F.col(TEXT)), source)
    places = [names.index(column.name) for column in source.columns]
    fields = read_fields(source, [cut.content(place) for place in places], F.is_valid_utf8(TEXT))
    known = dict(zip(places, fields, strict=True))
    each = [_fault(cut, place, known.get(place)) for place in range(len(names))]
    parsed = [fault for fault in each if fault is not None]
    count = F.size(cut.contents)
    length = F.when(count < len(names), "short_line").when(count > len(names), "long_line")
    late = [field.fault for field in sorted(fields, key=lambda field: field.name) if field.read_late]
    times = [F.when(fault == "time", fault) for fault in late]
    if policy == "missing":
        faults = F.array_compact(F.array(*parsed, length, *times))
    else:
        # Of a line that is dropped, too few or too many fields tell more than what stands in one.
        first = F.coalesce(*parsed, F.lit(None).cast("string"))
        first = F.when((first == "quote") | length.isNull(), first).otherwise(length)
        faults = F.slice(F.array_compact(F.array(first, *times)), 1, 1)
    return JudgedRows(frame, fields, F.when(is_long, F.array(F.lit("oversized_line"))).otherwise(faults))


def _fault(cut: _Cut, place: int, field: Field | None) -> Column | None:
    """What the parser of lines finds wrong in the field at `place`; it leaves written times for later."""
    fault = None if field is None else field.fault
    if field is not None and field.read_late:
        fault = F.when(field.fault != "time", field.fault)
    if cut.badly_quoted is None:
        return fault
    return F.when(cut.is_bad(place), "quote").otherwise(F.lit(None).cast("string") if fault is None else fault)


def _names(source: SourceSpec, paths: Sequence[str], headers: Sequence[str | None]) -> list[str]:
    """The names of the fields of a line."""
    wanted = [column.name for column in source.columns]
    if not source.header:
        return wanted
    first = headers[0] or ""
    for path, header in zip(paths, headers, strict=True):
        if header != first:
            raise FormatError(f"{path}: header {header!r} differs from {first!r}, expected one header for all files")
    names = split_header(paths[0], first.encode(), source)
    check_names(paths[0], wanted, names)
    return names


def _cut(frame: DataFrame, line: Column, source: SourceSpec) -> tuple[DataFrame, _Cut]:
    """`frame` with the fields of its lines in columns of their own, so that a line is cut once."""
    delimiter = literally(source.delimiter)
    if not source.quote:
        contents = F.transform(F.split(line, delimiter, -1), lambda part: _trimmed(part, source))
        return frame.withColumn(_CONTENTS, contents), _Cut(F.col(_CONTENTS), None)
    # Spaces around quotes belong to no field, and a delimiter is no space.
    space = f"(?:(?!{delimiter}){_SPACES})*+" if source.trim else ""
    inside = '[^"]*+(?:""[^"]*+)*+'
    good = f'{space}"({inside})"{space}'
    # Possessive, or else Java would take a step of its stack for every character.
    rest = f"[^{delimiter}]*+" if len(source.delimiter) == 1 else f"(?:(?!{delimiter})(?s:.))*+"
    anonymous = f'{space}"{inside}(?:"{space}(?={delimiter}|\\z)|"{space}{rest}|\\z)'
    field = f'(?:{anonymous}|{space}(?!"){rest})'
    # A delimiter in front makes every field match alike, an empty last one too.
    parts = F.regexp_extract_all(F.concat(F.lit(source.delimiter), line), F.lit(f"{delimiter}({field})"), F.lit(1))
    frame = frame.withColumn(_PARTS, parts)
    is_bad = F.transform(_PARTS, lambda part: part.rlike(f'^{space}"') & ~part.rlike(f"^{good}\\z"))
    contents = F.transform(
        _PARTS,
        lambda part: F.when(
            part.rlike(f"^{good}\\z"), F.replace(F.regexp_extract(part, good, 1), F.lit('""'), F.lit('"'))
        ).otherwise(_trimmed(part, source)),
    )
    return frame.withColumns({_CONTENTS: contents, _BAD: is_bad}), _Cut(F.col(_CONTENTS), F.col(_BAD))


def _trimmed(part: Column, source: SourceSpec) -> Column:
    return F.btrim(part, F.lit(" \t\n\x0b\x0c\r")) if source.trim else part
