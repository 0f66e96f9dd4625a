# SPDX-License-Identifier: Apache-2.0
"""Types of the columns of unknown logs, from a sample of their first rows."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from terarec.errors import FormatError
from terarec.etl.cleaning import parse_texts
from terarec.etl.columns import array_of, concatenate_rows, null_mask
from terarec.etl.source.arrow_files import is_string, read_schema
from terarec.etl.source.blocks import BadInputReport, SourceFile
from terarec.etl.source.files import find_files
from terarec.etl.source.source import SAMPLE_ROWS, open_files
from terarec.etl.source.text import open_text, read_text
from terarec.etl.times import is_moment, parse_times
from terarec.formats.arrays import is_number, items_type
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.codec import parse_json
from terarec.spec.workflow import ISO_FORMAT, SourceFormat, SourceType

_HEAD_BYTES = 1 << 18
_HEAD_LINES = 200
_DELIMITERS = ("\t", ",", ";", "|", "::", " ")
_MISSING_WORDS = ("?", "NULL", "null", "NaN", "nan", "\\N", "NA", "N/A", "None", "-")
_SURELY_MISSING = frozenset({"?", "NULL", "null", "\\N"})
"""Words that mean a missing value among texts, too; the others do only among numbers."""
_FEW_ODD = 0.01
"""Share of the values of a column of decimals that may be typing errors, and not words of a code."""
_TIME_FORMATS = (
    *("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S UTC", "%Y-%m-%d %H:%M"),
    *("%Y-%m-%d", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d", "%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y"),
    *("%d/%m/%Y %H:%M:%S", "%d/%m/%Y", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y", "%m %d, %Y", "%Y%m%d", "%Y%m%d%H%M%S"),
    ISO_FORMAT,
)
_IS_TIME = re.compile(r"(?i)(time|date|day|^when$|(^|_)ts($|_)|(^|_)at$)")
_IS_NAME = re.compile(r"[^\W\d].*")
_YEARS = (631_152_000, 4_102_444_800)
"""Seconds of 1990 and of 2100."""


class SampledColumn:
    """A column of the sample.

    Args:
        spec: Description of the column in the files.
        values: Arrow array of its values, null where missing, in lists for lists.
        time_formats: Formats that all of its values have as times, where it is not known which one is meant.
        time_evidence: Evidence for the format of its times, where others fit, too.
    """

    def __init__(
        self,
        spec: SourceColumn,
        values: pa.Array,
        *,
        time_formats: Sequence[str] = (),
        time_evidence: str = "",
    ) -> None:
        self.time_formats = tuple(time_formats)
        self.time_evidence = time_evidence
        self.name = spec.name
        self.spec = spec
        self.values = values
        self.is_list = pa.types.is_large_list(values.type)
        self.items = values.flatten() if self.is_list else values
        self.missing = self.items.null_count
        self.distinct = len(pc.unique(self.items.drop_null()))

    @property
    def present(self) -> int:
        """Values that are not missing."""
        return len(self.items) - int(self.missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The first rows of unknown logs.

    Attributes:
        source: How the files are read.
        columns: The columns.
        unread: Names of the columns that a source cannot read.
        reasons: Decisions about the format, each with its reason.
        dropped: Lines of the sample that do not fit the format.
    """

    source: SourceSpec
    columns: Sequence[SampledColumn]
    unread: Sequence[str] = ()
    reasons: Sequence[str] = ()
    dropped: int = 0


def read_sample(sources: Sequence[str | Path]) -> Sample:
    """Return the first rows of files of one format, and how they are read."""
    files = find_files(sources)
    with open_text(files[0]) as (_, stream):
        head: bytes = stream.read(_HEAD_BYTES)
    # The last one begins a stream of Arrow.
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        source_format: Literal["parquet", "arrow"] = "parquet" if head.startswith(b"PAR1") else "arrow"
        schema = read_schema(files[0].path, source_format)
        types = {field.name: items_type(field.type) for field in schema}
        fields = [(name, _source_type(kind), is_lists) for name, (kind, is_lists) in types.items()]
        return _read_typed(source_format, fields, files)
    if head.lstrip()[:1] == b"{":
        return _read_typed("json_lines", _json_fields(files), files)
    spec, reasons = _delimited(files[0], head)
    spec, columns, faults = _with_quotes(spec, files, reasons)
    words: set[str] = set()
    # Missing words are gathered over all columns, since a source has one list of them.
    inferred = [_inferred(name, texts, spec.delimiter, words, reasons) for name, texts in columns.items()]
    if words:
        reasons.append(f"{', '.join(map(repr, sorted(words)))} mean a missing value: not one of the other values")
    return _sample(replace(spec, missing=("", *sorted(words))), inferred, (), reasons, faults)


def _with_quotes(
    spec: SourceSpec, files: Sequence[SourceFile], reasons: list[str]
) -> tuple[SourceSpec, Mapping[str, pa.Array], BadInputReport]:
    """Return `spec`, or without quotes where more lines fit so, with the rows; the reason is added to `reasons`."""
    columns, faults, error = None, None, None
    try:
        columns, faults = _columns(spec, files)
    except FormatError as first_error:
        error = first_error
    if spec.quote and (faults is None or faults.counts):
        # A quote may be a character of a value, such as an inch.
        unquoted = replace(spec, quote=False)
        try:
            others, other_faults = _columns(unquoted, files)
        except FormatError:
            others, other_faults = None, None
        if other_faults is not None and (faults is None or _count(other_faults) < _count(faults)):
            assert others is not None
            reasons.append("quotes are characters of values: more lines have all fields so than with quoted fields")
            return unquoted, others, other_faults
    if columns is None or faults is None:
        assert error is not None
        raise error
    return spec, columns, faults


def _count(faults: BadInputReport) -> int:
    return sum(faults.counts.values())


def _sample(
    spec: SourceSpec,
    columns: Sequence[SampledColumn],
    unread: Sequence[str],
    reasons: Sequence[str],
    faults: BadInputReport,
) -> Sample:
    dropped = _count(faults)
    rows = max(len(column.values) for column in columns)
    lines = [
        f"{dropped:,} of {rows + dropped:,} rows of the sample do not fit and are left out here, such as {first}; "
        "terarec prepare leaves them out with --bad-input skip"
        for first in faults.first[:1]
    ]
    return Sample(
        source=spec,
        columns=columns,
        unread=unread,
        reasons=(*reasons, *lines),
        dropped=dropped,
    )


def _columns(spec: SourceSpec, files: Sequence[SourceFile]) -> tuple[Mapping[str, pa.Array], BadInputReport]:
    """Return the first rows of the files without those that cannot be read, and these."""
    source = open_files(spec, files, "skip", limit=SAMPLE_ROWS)
    blocks = list(source.blocks())
    rows = concatenate_rows(blocks)
    if not rows.num_rows:
        raise FormatError(source.files[0].path, f"no row of the sample can be read: {source.bad_input.first[0]}")
    return rows.columns, source.bad_input


def _read_typed(source_format: SourceFormat, fields: Sequence[_Field], files: Sequence[SourceFile]) -> Sample:
    """Read files that hold the types of their values; only text may turn out to be times or hexadecimal digits."""
    spec = SourceSpec(format=source_format, columns=_typed(fields))
    columns = []
    rows, faults = _columns(spec, files)
    for column, values in zip(spec.columns, rows.values(), strict=True):
        if column.type == "integer" and column.separator is None and _are_seconds(column.name, values.drop_null()):
            column = replace(column, type="time")
        is_text = column.type == "text" and column.separator is None
        columns.append(_inferred_text(column.name, values) if is_text else SampledColumn(column, values))
    unread = [name for name, kind, _ in fields if kind is None]
    return _sample(spec, columns, unread, [f"the files are {source_format}, by their first bytes"], faults)


_Field: TypeAlias = tuple[str, SourceType | None, bool]
"""Name, type if there is one, and whether it holds lists."""


def _typed(fields: Sequence[_Field]) -> tuple[SourceColumn, ...]:
    columns = tuple(
        SourceColumn(name=name, type=kind, separator="," if is_lists else None)
        for name, kind, is_lists in fields
        if kind is not None
    )
    if not columns:
        raise FormatError(
            "sources", "no column holds texts, integers, numbers, times or lists of them, expected at least one"
        )
    return columns


def _source_type(kind: pa.DataType) -> SourceType | None:
    # Nulls have no type: they are a text that is missing in all rows.
    if is_string(kind) or pa.types.is_null(kind):
        return "text"
    if pa.types.is_integer(kind):
        return "integer"
    if is_number(kind):
        return "number"
    return "time" if is_moment(kind) else None


def _json_fields(files: Sequence[SourceFile]) -> list[_Field]:
    """Return the fields of the objects of the first block of lines."""
    types: dict[str, set[tuple[SourceType | None, bool]]] = {}
    for line in next(iter(read_text(files[0]))).text.splitlines()[:SAMPLE_ROWS]:
        try:
            fields = parse_json(line) if line.strip() else {}
        except ValueError:
            continue
        for name, value in fields.items() if isinstance(fields, dict) else ():
            items = value if isinstance(value, list) else [value]
            types.setdefault(name, set()).update(
                (_PYTHON_TYPES.get(type(item)), isinstance(value, list)) for item in items if item is not None
            )
    fields_of_text: list[_Field] = []
    for name, seen in types.items():
        kinds, shapes = {kind for kind, _ in seen}, {is_lists for _, is_lists in seen}
        kind = "number" if kinds == {"integer", "number"} else next(iter(kinds)) if len(kinds) == 1 else None
        fields_of_text.append((name, kind if len(shapes) == 1 else None, True in shapes))
    return fields_of_text


_PYTHON_TYPES: dict[type, SourceType] = {str: "text", int: "integer", float: "number"}


def _delimited(file: SourceFile, head: bytes) -> tuple[SourceSpec, list[str]]:
    """Return how delimited text is read, all of its columns as text, and the reasons."""
    # The last line is cut off somewhere.
    if len(head) == _HEAD_BYTES:
        head = head[: head.rfind(b"\n") + 1]
    try:
        text, encoding = head.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        # Any bytes are Latin-1, so it comes after UTF-8.
        text, encoding = head.decode("latin-1"), "latin-1"
    is_quoted = '"' in text
    tried, widths, steady = _steady(text, is_quoted)
    if is_quoted and not steady:
        is_quoted = False
        tried, widths, steady = _steady(text, is_quoted)
    if not steady:
        raise FormatError(file.path, "found no delimiter, expected delimited text, JSON lines, Parquet or Arrow")
    # Many texts hold blanks: one separates only where nothing else does.
    delimiter = max(steady, key=lambda mark: (mark != " ", widths[mark][0]))
    first, *others = tried[delimiter]
    width = widths[delimiter][0]
    if len(first) != width:
        raise FormatError(f"{file.path}: line 1", f"found {len(first)} fields, expected {width} as in most lines")
    others = [record for record in others if len(record) == width]
    names = [field.strip() for field in first]
    has_header = len(set(names)) == len(names) and all(_IS_NAME.fullmatch(name) for name in names)
    has_header = has_header and bool(others)
    # Values of a first line that is data come again below.
    has_header = has_header and not any(name in {row[at].strip() for row in others} for at, name in enumerate(names))
    if not has_header:
        names = [f"column_{number}" for number in range(1, len(first) + 1)]
    _, steady_lines = widths[delimiter]
    reasons = [
        f"{delimiter!r} separates {width} fields in {steady_lines} of the first {len(tried[delimiter])} lines",
        "the first line names the columns: none of its words is a value below"
        if has_header
        else "no header: the first line has values of the others, or is none of distinct names",
        f"the text is {encoding}" + ("" if encoding == "utf-8" else ": it is not UTF-8"),
    ]
    if is_quoted:
        reasons.append("fields may be in quotes: the first lines have some")
    spec = SourceSpec(
        format="delimited",
        columns=tuple(SourceColumn(name=name, type="text") for name in names),
        delimiter=delimiter,
        header=has_header,
        quote=is_quoted,
        trim=True,
        encoding=encoding,  # type: ignore[arg-type]  # one of the two above
    )
    return spec, reasons


def _steady(text: str, is_quoted: bool) -> tuple[dict[str, list[list[str]]], dict[str, tuple[int, int]], list[str]]:
    """Return the first lines cut by each delimiter, the most frequent width and its lines, and which mostly give it."""
    tried = {mark: _records(text, mark, is_quoted) for mark in _DELIMITERS}
    widths = {mark: Counter(map(len, records)).most_common(1)[0] for mark, records in tried.items() if records}
    steady = [mark for mark, (width, times) in widths.items() if width > 1 and times >= 0.9 * len(tried[mark])]
    return tried, widths, steady


def _records(text: str, delimiter: str, is_quoted: bool) -> list[list[str]]:
    """Return the fields of the first lines that are not empty."""
    if len(delimiter) > 1:
        return [line.split(delimiter) for line in text.splitlines() if line][:_HEAD_LINES]
    reader = csv.reader(
        io.StringIO(text),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE,
        skipinitialspace=delimiter != " ",
    )
    try:
        return [record for record in itertools.islice(reader, _HEAD_LINES) if record]
    except csv.Error:
        return []


def _inferred(name: str, texts: pa.Array, delimiter: str, words: set[str], reasons: list[str]) -> SampledColumn:
    """Return a column of delimited text in its narrowest type.

    Words that mean missing values are added to `words`, and what does not fit the type to `reasons`.
    """
    values = pc.unique(texts.drop_null())
    sure = [word for word in values.to_pylist() if word in _SURELY_MISSING]
    unsure = [word for word in values.to_pylist() if word in _MISSING_WORDS]
    numbers = values.filter(pc.invert(pc.is_in(values, pa.array(unsure, values.type))))
    kind = _number_type(name, numbers) if len(numbers) else None
    odd = _odd_values(texts, unsure) if kind is None else None
    if odd is not None:
        kind = "number"
        reasons.append(
            f"{len(odd):,} of {len(texts) - texts.null_count:,} values of {name!r} are no numbers, such as "
            f"{odd[0].as_py()!r}; terarec prepare takes them as missing with --bad-input missing"
        )
    types = unsure if kind is not None else sure
    words.update(types)
    if types:
        texts = pc.if_else(pc.is_in(texts, pa.array(types, texts.type)), pa.scalar(None, texts.type), texts)
    if kind is None:
        return _inferred_text(name, texts, delimiter)
    spec = SourceColumn(name=name, type=kind)
    return SampledColumn(spec, parse_texts(texts, "number" if kind == "number" else "integer")[0])


def _odd_values(texts: pa.Array, words: Sequence[str]) -> pa.Array | None:
    """Return the few of these texts that are neither decimals nor `words`; None if they are no column of decimals."""
    if not pc.any(pc.match_substring_regex(texts, r"^-?\d+\.\d+$")).as_py():
        return None  # integers with a few letters among them may be codes
    values = texts.filter(pc.invert(pc.is_in(texts, pa.array(words, texts.type)))).drop_null()
    _, bad = parse_texts(values, "number")
    if bad is None or not 0 < bad.sum() <= _FEW_ODD * len(values):
        return None
    odd = values.filter(pa.array(bad))
    numbers = pc.unique(values.filter(pa.array(~bad)))
    return odd if _number_type("", numbers) == "number" else None


def _number_type(name: str, values: pa.Array) -> SourceType | None:
    """Return the number type of all of these texts; None if they are not numbers, or are digits of a code."""
    # A number would lose the zeros at the start of a code.
    if pc.any(pc.match_substring_regex(values, r"^-?0\d")).as_py():
        return None
    if _IS_TIME.search(name) and _time_formats(values):
        return None
    for kind in ("integer", "number"):
        read, bad = parse_texts(values, kind)
        if bad is None or not bad.any():
            if kind == "integer" and _are_seconds(name, read):
                return "time"
            is_long = kind == "number" and pc.all(pc.match_substring_regex(values, r"^-?\d+$")).as_py()
            return None if is_long else "integer" if kind == "integer" else "number"  # ids of more than 64 bits
    return None


def _are_seconds(name: str, values: pa.Array) -> bool:
    """Return whether integers of a column of this name are seconds since 1970."""
    if not _IS_TIME.search(name) or not len(values):
        return False
    bounds = pc.min_max(values)
    return bool(_YEARS[0] <= bounds["min"].as_py() <= bounds["max"].as_py() <= _YEARS[1])


def _inferred_text(name: str, texts: pa.Array, delimiter: str | None = None) -> SampledColumn:
    """Return a column of texts as times, hexadecimal digits, lists or texts."""
    values = pc.unique(texts.drop_null())
    forms = _time_formats(values) if len(values) else []
    if forms:
        chosen, evidence = _chosen_format(texts, forms)
        if chosen is None:
            return SampledColumn(SourceColumn(name=name, type="text"), texts, time_formats=forms)
        seconds = parse_times(texts, chosen).seconds
        spec = SourceColumn(name=name, type="time", format=chosen)
        return SampledColumn(spec, array_of(seconds, null_mask(texts)), time_evidence=evidence)
    if len(values) and pc.all(pc.match_substring_regex(values, "^[0-9a-fA-F]{8}$")).as_py():
        return SampledColumn(SourceColumn(name=name, type="hex32"), texts)
    for separator in ("|", ";"):
        share = pc.sum(pc.match_substring(values, separator)).as_py() if len(values) else 0
        if delimiter not in (None, separator) and share and share >= 0.2 * len(values):
            lists = pc.split_pattern(texts, separator).cast(pa.large_list(pa.large_string()))
            if len(pc.unique(lists.flatten())) < len(values):
                return SampledColumn(SourceColumn(name=name, type="text", separator=separator), lists)
    return SampledColumn(SourceColumn(name=name, type="text"), texts)


def _time_formats(values: pa.Array) -> list[str]:
    """Return the first format in which all of these texts are times, and another order of day and month that fits."""
    for form in _TIME_FORMATS:
        other = form.replace("%m/%d/%Y", "%d/%m/%Y")
        forms = [form] if other == form else [form, other]
        # A few values first: most formats fail at them, and the others are read whole.
        fitting = [
            candidate for candidate in forms if _fits(values[:_HEAD_LINES], candidate) and _fits(values, candidate)
        ]
        if fitting:
            return fitting
    return []


def _fits(values: pa.Array, form: str) -> bool:
    return not parse_times(values, form).bad.any()


def _chosen_format(texts: pa.Array, forms: Sequence[str]) -> tuple[str | None, str]:
    """Return the format of `forms` that is meant, with the evidence; None where the values do not show it."""
    if len(forms) == 1:
        is_clear = "%m/%d/%Y" in forms[0] or "%d/%m/%Y" in forms[0]
        return forms[0], "days above 12 show which number is the month" if is_clear else ""
    present = texts.drop_null()
    rising = [form for form in forms if bool((np.diff(parse_times(present, form).seconds) >= 0).all())]
    if len(rising) == 1 and len(pc.unique(present)) > 1:
        other = next(form for form in forms if form != rising[0])
        return rising[0], f"the rows are in order of time so, and not by {other!r}"
    return None, ""
