"""Lines of delimited text -> their fields, cut and judged as csrc/encoding/delimited.cpp does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.etl.cleaning import SPACE
from terarec.etl.source.bad_input import FATAL
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.source.text import MAX_LINE_BYTES
from terarec.etl.spark.expressions import FILE, TEXT
from terarec.etl.spark.fields import Field, JudgedRows, literally, read_fields
from terarec.etl.spark.lines import NumberedLines
from terarec.spec import BadInputPolicy, SourceSpec

_PARTS, _CONTENTS, _BAD = "__terarec_parts", "__terarec_contents", "__terarec_bad"
_VALID, _LONG = "__terarec_valid", "__terarec_long"
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

    def content(self, place: Column) -> Column:
        """The field at `place`, null if it is badly quoted, or not there."""
        field = F.get(self.contents, place)
        return field if self.badly_quoted is None else F.when(~self.is_bad(place), field)

    def is_bad(self, place: Column) -> Column:
        """Whether a quote does not end there, or something follows it; null if there is no such field."""
        assert self.badly_quoted is not None
        return F.get(self.badly_quoted, place)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the fields of a line are in some of the files.

    Attributes:
        names: of the fields; None for one that is no column.
        files: positions of these files among the sources.
    """

    names: tuple[str | None, ...]
    files: tuple[int, ...]


def delimited_fields(
    source: SourceSpec, numbered: NumberedLines, paths: Sequence[str], policy: BadInputPolicy
) -> JudgedRows:
    """The columns of delimited lines.

    With the policy "missing" all faults are told; else the first one of a line, in the order of the local engine.

    Raises:
        ConfigError: a header lacks a column.
        FormatError: a header is not UTF-8, or has a column twice.
    """
    layouts = _layouts(source, paths, numbered.headers)
    frame = numbered.frame.withColumns({_VALID: F.is_valid_utf8(TEXT), _LONG: F.octet_length(TEXT) > MAX_LINE_BYTES})
    frame, cut = _cut(frame, F.when(~F.col(_LONG), F.col(TEXT)), source)
    texts = [cut.content(_by_layout(layouts, _placer(column.name))) for column in source.columns]
    fields = read_fields(source, texts, F.col(_VALID))
    is_long = F.col(_LONG)
    is_bad = is_long | (F.size(cut.contents) != _by_layout(layouts, lambda layout: F.lit(len(layout.names))))
    has_bad_quotes = F.lit(False)
    if cut.badly_quoted is not None:  # what is behind a quote in a line that is too long stays unknown
        has_bad_quotes = F.coalesce(
            F.array_contains(cut.badly_quoted, F.lit(True)), is_long & F.col(TEXT).contains('"')
        )
        is_bad = is_bad | has_bad_quotes

    def kinds() -> Column:
        faults = _by_layout(layouts, lambda layout: _faults(layout, F.size(cut.contents), fields, policy))
        faults = F.when(is_long, F.array(F.lit("oversized_line"))).otherwise(faults)
        return F.when(has_bad_quotes, F.array(F.lit(FATAL))).otherwise(faults)

    return JudgedRows(frame, fields, is_bad, kinds)


def _layouts(source: SourceSpec, paths: Sequence[str], headers: Sequence[str | None]) -> list[_Layout]:
    """The layouts of the files, those of most files last."""
    if not source.header:
        return [_Layout(tuple(column.name for column in source.columns), tuple(range(len(paths))))]
    reader = DelimitedReader(source)
    files: dict[tuple[str | None, ...], list[int]] = {}
    known: dict[str, tuple[str | None, ...]] = {}
    for position, (path, header) in enumerate(zip(paths, headers, strict=True)):
        line = header or ""
        if line not in known:
            names = reader.fields(path, line.encode())
            known[line] = tuple(name if source.column(name) else None for name in names)
        files.setdefault(known[line], []).append(position)
    layouts = [_Layout(names, tuple(positions)) for names, positions in files.items()]
    return sorted(layouts, key=lambda layout: len(layout.files))


def _by_layout(layouts: Sequence[_Layout], expression: Callable[[_Layout], Column]) -> Column:
    """The expression for the layout of a row's file."""
    chosen = expression(layouts[-1])
    for layout in layouts[:-1]:
        chosen = F.when(F.col(FILE).isin(*layout.files), expression(layout)).otherwise(chosen)
    return chosen


def _placer(name: str) -> Callable[[_Layout], Column]:
    return lambda layout: F.lit(layout.names.index(name))


def _faults(layout: _Layout, count: Column, fields: Sequence[Field], policy: BadInputPolicy) -> Column:
    """The kinds of faults of a line that is not too long."""
    known = {field.name: field for field in fields}
    each = [_fault(known.get(name or "")) for name in layout.names]
    parsed = [fault for fault in each if fault is not None]
    length = F.when(count < len(layout.names), "short_line").when(count > len(layout.names), "long_line")
    late = [field.fault() for field in sorted(fields, key=lambda field: field.name) if field.read_late]
    times = [F.when(fault == "time", fault) for fault in late]
    if policy == "missing":
        return F.array_compact(F.array(*parsed, length, *times))
    # Of a line that is dropped, too few or too many fields tell more than what stands in one.
    first = F.coalesce(*parsed, F.lit(None).cast("string"))
    first = F.when(length.isNull(), first).otherwise(length)
    return F.slice(F.array_compact(F.array(first, *times)), 1, 1)


def _fault(field: Field | None) -> Column | None:
    """What the parser of lines finds wrong in a field; it leaves written times for later."""
    fault = None if field is None else field.fault()
    if fault is not None and field is not None and field.read_late:
        fault = F.when(fault != "time", fault)
    return fault


def _cut(frame: DataFrame, line: Column, source: SourceSpec) -> tuple[DataFrame, _Cut]:
    """`frame` with the fields of its lines in columns of their own, so that a line is cut once."""
    delimiter = literally(source.delimiter)
    if not source.quote:
        contents = F.split(line, delimiter, -1)
        if source.trim:
            contents = F.transform(contents, lambda part: _trimmed(part, source))
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
    return F.btrim(part, F.lit(SPACE)) if source.trim else part
