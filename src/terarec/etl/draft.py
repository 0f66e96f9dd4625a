"""Draft of a workflow for unknown logs: types, roles and steps by a sample of their first rows."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import array_of, concatenate_rows, null_mask
from terarec.etl.ops import (
    Categorify,
    DateParts,
    FillMissing,
    HashBucket,
    ListSlice,
    LogOp,
    Normalize,
    Operator,
)
from terarec.etl.source import SourceFile, find_files, open_source, parse_times
from terarec.etl.source.arrow_files import is_list, is_string, read_schema, value_type
from terarec.etl.source.text import open_text, read_text
from terarec.etl.source.times import parse_texts
from terarec.spec import (
    FieldError,
    LabelSpec,
    SourceColumn,
    SourceSpec,
    Split,
    SplitByFraction,
    SplitByTime,
    WorkflowSpec,
)
from terarec.spec.codec import parse_json
from terarec.spec.quoting import did_you_mean, quoted
from terarec.spec.workflow import SourceFormat, SourceType

SAMPLE_ROWS = 100_000
"""Most rows that a draft reads."""
Use = Literal["label", "dense", "ids", "hashed ids", "date parts", "left out"]

_HEAD_BYTES = 1 << 18
_HEAD_LINES = 200
_VALID_SHARE = 0.1
_FEW_VALUES = 12
_SURELY_REPEATED = 100
"""A column whose values all differ identifies rows, if there are this many values."""
_MANY_VALUES = 10_000
_MANY_SHARE = 0.3
_MOST_BUCKETS = 1 << 22
_LONGEST_LIST = 50
_UNREAD = "truth values, objects or values of several types"
_DELIMITERS = ("\t", ",", ";", "|", "::", " ")
_MISSING_WORDS = ("?", "NULL", "null", "NaN", "nan", "\\N", "NA", "N/A", "None", "-")
_SURELY_MISSING = frozenset({"?", "NULL", "null", "\\N"})
"""Words that mean a missing value among texts, too; the others do only among numbers."""
_LABELS = (
    *("label", "target", "click", "clicked", "is_click", "clk", "conversion", "converted", "is_conversion", "purchase"),
    *("purchased", "bought", "buy", "liked", "y", "class", "income", "outcome", "rating", "overall", "stars", "score"),
)
_POSITIVE_WORDS = ("yes", "true", "y", "t", "positive", "purchase", "click")
_TIME_FORMATS = (
    *("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S UTC", "%Y-%m-%d %H:%M"),
    *("%Y-%m-%d", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d", "%m/%d/%Y %I:%M:%S %p", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y"),
    *("%d/%m/%Y %H:%M:%S", "%d/%m/%Y", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y", "%m %d, %Y", "%Y%m%d", "%Y%m%d%H%M%S"),
)
_IS_TIME = re.compile(r"(?i)(time|date|day|^when$|(^|_)ts($|_)|(^|_)at$)")
_IS_ID = re.compile(r"(^|[_ .])(?i:id|ids|code|zip|type|category|cat|key|number|no)$|[a-z](Id|ID|Code|Type)$")
_IS_NAME = re.compile(r"[^\W\d].*")
_YEARS = (631_152_000, 4_102_444_800)
"""Seconds of 1990 and of 2100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChoice:
    """The decision of a draft for a column.

    Attributes:
        column: Its name.
        type: Its type in the files; None where the source reads no such values.
        format: How its times are written; None for other types and for seconds.
        distinct: Different values in the sample.
        missing_share: Share of missing values in the sample.
        use: What it becomes.
        reason: Why.
    """

    column: str
    type: SourceType | None
    format: str | None = None
    distinct: int
    missing_share: float
    use: Use
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A workflow for unknown logs.

    Attributes:
        spec: The workflow; it prepares the files as it is.
        sample_rows: Rows that were read.
        label_reason: Why the label is one, and what its values mean.
        split_reason: Why rows are split so.
        choices: What becomes of each column.
    """

    spec: WorkflowSpec
    sample_rows: int
    label_reason: str
    split_reason: str
    choices: tuple[ColumnChoice, ...]


def draft_workflow(sources: Sequence[str | Path], label: str | None = None, name: str = "draft") -> Draft:
    """Return a workflow for files of unknown columns, from their first `SAMPLE_ROWS` rows.

    Args:
        sources: Files, directories, patterns or URLs of one format, in order.
        label: Column to predict; None to guess it.
        name: Name of the workflow.

    Raises:
        ConfigError: No such column, or no column that looks like a label or holds anything to learn from.
        DataNotFoundError: A source does not exist.
        FormatError: A damaged file, or text that is neither delimited nor JSON lines.
    """
    source, columns, unread = _read_sample(sources)
    if label in unread:
        problem = f"got {quoted(label)}, which holds {_UNREAD}"
        raise FieldError("", "label", f"{problem}, expected one of {', '.join(column.name for column in columns)}")
    rows = max(len(column.values) for column in columns)
    chosen, label_spec, label_reason = _find_label(columns, label)
    others = [column for column in columns if column is not chosen]
    choices = {column.name: _choice(column, rows) for column in others}
    steps = _steps(others, choices, rows)
    times = [column for column in others if choices[column.name].use == "date parts"]
    split: Split = SplitByFraction(valid=_VALID_SHARE)
    split_reason = f"the last {_VALID_SHARE:.0%} of the rows, as there is no column of times"
    if times:
        split = SplitByTime(column=times[0].name, valid=_VALID_SHARE)
        split_reason = f"the latest {_VALID_SHARE:.0%} of the rows by {times[0].name!r}"
    uses = {name: choice.use for name, choice in choices.items()}
    dense = tuple(name for name, use in uses.items() if use == "dense")
    ids = tuple(name for name, use in uses.items() if use in ("ids", "hashed ids"))
    parts = tuple(dict.fromkeys(output for step in steps for output in step.writes if output not in uses))
    if not (dense or ids or parts):
        raise ConfigError(sources[0], "no column but the label varies, expected columns to learn from")
    is_positional = source.format == "delimited" and not source.header
    read = [column for column in columns if is_positional or column is chosen or uses[column.name] != "left out"]
    spec = WorkflowSpec(
        name=name,
        source=replace(source, columns=tuple(column.spec for column in read)),
        steps=steps,
        split=split,
        labels=(label_spec,),
        dense=dense,
        categorical=(*ids, *parts),
    )
    found = ColumnChoice(
        column=chosen.name,
        type=chosen.spec.type,
        format=chosen.spec.format,
        distinct=chosen.distinct,
        missing_share=chosen.missing / max(rows, 1),
        use="label",
        reason=label_reason,
    )
    listed = [found if column is chosen else choices[column.name] for column in columns]
    listed += [
        ColumnChoice(column=item, type=None, distinct=0, missing_share=0.0, use="left out", reason=_UNREAD)
        for item in unread
    ]
    return Draft(
        spec=spec, sample_rows=rows, label_reason=label_reason, split_reason=split_reason, choices=tuple(listed)
    )


class _SampledColumn:
    """A column of the sample.

    Args:
        spec: How the files hold it.
        values: Arrow array of its values, null where missing, in lists for lists.
    """

    def __init__(self, spec: SourceColumn, values: pa.Array) -> None:
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


def _read_sample(sources: Sequence[str | Path]) -> tuple[SourceSpec, list[_SampledColumn], list[str]]:
    """Return how the files are read, their columns, and the names of those that a source cannot read."""
    files = find_files(sources)
    with open_text(files[0]) as (_, stream):
        head: bytes = stream.read(_HEAD_BYTES)
    if head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        source_format: Literal["parquet", "arrow"] = "parquet" if head.startswith(b"PAR1") else "arrow"
        schema = read_schema(files[0].path, source_format)
        found = [(field.name, _arrow_type(field.type), is_list(field.type)) for field in schema]
        return _read_typed(source_format, found, sources)
    if head.lstrip()[:1] == b"{":
        return _read_typed("json_lines", _json_fields(files), sources)
    spec = _delimited(files[0], head)
    words: set[str] = set()
    inferred = [_inferred(name, texts, spec.delimiter, words) for name, texts in _columns(spec, sources).items()]
    return replace(spec, missing=("", *sorted(words))), inferred, []


def _columns(spec: SourceSpec, sources: Sequence[str | Path]) -> Mapping[str, pa.Array]:
    """Return the first rows of the files; those that cannot be read are left out."""
    source = open_source(spec, sources, "skip", limit=SAMPLE_ROWS)
    rows = concatenate_rows(list(source.blocks()))
    if not rows.num_rows:
        raise FormatError(source.files[0].path, f"no row of the sample can be read: {source.bad_input.first[0]}")
    return rows.columns


def _read_typed(
    source_format: SourceFormat, fields: Sequence[_Field], sources: Sequence[str | Path]
) -> tuple[SourceSpec, list[_SampledColumn], list[str]]:
    """Read files that hold the types of their values; only text may turn out to be times or hexadecimal digits."""
    spec = SourceSpec(format=source_format, columns=_typed(fields))
    columns = []
    for column, values in zip(spec.columns, _columns(spec, sources).values(), strict=True):
        if column.type == "integer" and column.separator is None and _are_seconds(column.name, values.drop_null()):
            column = replace(column, type="time")
        is_text = column.type == "text" and column.separator is None
        columns.append(_inferred_text(column.name, values) if is_text else _SampledColumn(column, values))
    return spec, columns, [name for name, kind, _ in fields if kind is None]


_Field: TypeAlias = tuple[str, SourceType | None, bool]
"""Name, type if there is one, and whether it holds lists."""


def _typed(found: Sequence[_Field]) -> tuple[SourceColumn, ...]:
    columns = tuple(
        SourceColumn(name=name, type=kind, separator="," if is_lists else None)
        for name, kind, is_lists in found
        if kind is not None
    )
    if not columns:
        raise FormatError(
            "sources", "no column holds texts, integers, numbers, times or lists of them, expected at least one"
        )
    return columns


def _arrow_type(found: pa.DataType) -> SourceType | None:
    inner = value_type(found)
    if is_string(inner):
        return "text"
    if pa.types.is_integer(inner):
        return "integer"
    if pa.types.is_floating(inner) or pa.types.is_decimal(inner):
        return "number"
    return "time" if pa.types.is_timestamp(inner) or pa.types.is_date(inner) else None


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
    found: list[_Field] = []
    for name, seen in types.items():
        kinds, shapes = {kind for kind, _ in seen}, {is_lists for _, is_lists in seen}
        kind = "number" if kinds == {"integer", "number"} else next(iter(kinds)) if len(kinds) == 1 else None
        found.append((name, kind if len(shapes) == 1 else None, True in shapes))
    return found


_PYTHON_TYPES: dict[type, SourceType] = {str: "text", int: "integer", float: "number"}


def _delimited(file: SourceFile, head: bytes) -> SourceSpec:
    """Return how delimited text is read, all of its columns as text."""
    if len(head) == _HEAD_BYTES:
        head = head[: head.rfind(b"\n") + 1]
    try:
        text, encoding = head.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        text, encoding = head.decode("latin-1"), "latin-1"
    tried = {mark: _records(text, mark) for mark in _DELIMITERS}
    widths = {mark: Counter(map(len, records)).most_common(1)[0] for mark, records in tried.items() if records}
    steady = [mark for mark, (width, times) in widths.items() if width > 1 and times >= 0.9 * len(tried[mark])]
    if not steady:
        raise FormatError(file.path, "found no delimiter, expected delimited text, JSON lines, Parquet or Arrow")
    delimiter = max(steady, key=lambda mark: (mark != " ", widths[mark][0]))
    first, *others = tried[delimiter]
    width = widths[delimiter][0]
    if len(first) != width:
        raise FormatError(f"{file.path}: line 1", f"found {len(first)} fields, expected {width} as in most lines")
    others = [record for record in others if len(record) == width]
    names = [field.strip() for field in first]
    has_header = len(set(names)) == len(names) and all(_IS_NAME.fullmatch(name) for name in names)
    has_header = has_header and bool(others)
    has_header = has_header and not any(name in {row[at].strip() for row in others} for at, name in enumerate(names))
    if not has_header:
        names = [f"column_{number}" for number in range(1, len(first) + 1)]
    return SourceSpec(
        format="delimited",
        columns=tuple(SourceColumn(name=name, type="text") for name in names),
        delimiter=delimiter,
        header=has_header,
        quote='"' in text,
        trim=True,
        encoding=encoding,  # type: ignore[arg-type]  # one of the two above
    )


def _records(text: str, delimiter: str) -> list[list[str]]:
    """Return the fields of the first lines that are not empty."""
    if len(delimiter) > 1:
        return [line.split(delimiter) for line in text.splitlines() if line][:_HEAD_LINES]
    reader = csv.reader(
        io.StringIO(text),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if '"' in text else csv.QUOTE_NONE,
        skipinitialspace=delimiter != " ",
    )
    try:
        return [record for record in itertools.islice(reader, _HEAD_LINES) if record]
    except csv.Error:
        return []


def _inferred(name: str, texts: pa.Array, delimiter: str, words: set[str]) -> _SampledColumn:
    """Return a column of delimited text in its narrowest type; `words` that mean missing values are added."""
    values = pc.unique(texts.drop_null())
    sure = [word for word in values.to_pylist() if word in _SURELY_MISSING]
    unsure = [word for word in values.to_pylist() if word in _MISSING_WORDS]
    numbers = values.filter(pc.invert(pc.is_in(values, pa.array(unsure, values.type))))
    kind = _number_type(name, numbers) if len(numbers) else None
    found = unsure if kind is not None else sure
    words.update(found)
    if found:
        texts = pc.if_else(pc.is_in(texts, pa.array(found, texts.type)), pa.scalar(None, texts.type), texts)
    if kind is None:
        return _inferred_text(name, texts, delimiter)
    spec = SourceColumn(name=name, type=kind)
    return _SampledColumn(spec, parse_texts(texts, "number" if kind == "number" else "integer")[0])


def _number_type(name: str, values: pa.Array) -> SourceType | None:
    """Return what type of numbers all of these texts are; None if they are none, or digits of a code."""
    if pc.any(pc.match_substring_regex(values, r"^-?0\d")).as_py():
        return None
    if _IS_TIME.search(name) and _time_format(values) is not None:
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


def _inferred_text(name: str, texts: pa.Array, delimiter: str | None = None) -> _SampledColumn:
    """Return a column of texts as times, hexadecimal digits, lists or texts."""
    values = pc.unique(texts.drop_null())
    form = _time_format(values) if len(values) else None
    if form is not None:
        seconds, _ = parse_times(texts, form)
        return _SampledColumn(SourceColumn(name=name, type="time", format=form), array_of(seconds, null_mask(texts)))
    if len(values) and pc.all(pc.match_substring_regex(values, "^[0-9a-fA-F]{8}$")).as_py():
        return _SampledColumn(SourceColumn(name=name, type="hex32"), texts)
    for separator in ("|", ";"):
        share = pc.sum(pc.match_substring(values, separator)).as_py() if len(values) else 0
        if delimiter not in (None, separator) and share and share >= 0.2 * len(values):
            lists = pc.split_pattern(texts, separator).cast(pa.large_list(pa.large_string()))
            if len(pc.unique(lists.flatten())) < len(values):
                return _SampledColumn(SourceColumn(name=name, type="text", separator=separator), lists)
    return _SampledColumn(SourceColumn(name=name, type="text"), texts)


def _time_format(values: pa.Array) -> str | None:
    """Return the format in which all of these texts are times."""
    for form in _TIME_FORMATS:
        if not parse_times(values[:_HEAD_LINES], form)[1].any() and not parse_times(values, form)[1].any():
            return form
    return None


def _find_label(columns: Sequence[_SampledColumn], name: str | None) -> tuple[_SampledColumn, LabelSpec, str]:
    """Return the label's column, its spec, and why it is one."""
    names = [column.name for column in columns]
    if name is not None:
        if name not in names:
            problem = f"got {quoted(name)}{did_you_mean(name, names)}, expected one of {', '.join(names)}"
            raise FieldError("", "label", problem)
        chosen = columns[names.index(name)]
        found = _label_of(chosen)
        if found is None:
            problem = f"got {quoted(name)}, expected a column of texts or numbers with several values in every row"
            raise FieldError("", "label", problem)
        return chosen, found[0], f"as you say; {found[1]}"
    lower = {column.name.lower(): column for column in reversed(columns)}
    named = [(lower[word], f"its name {word!r}") for word in _LABELS if word in lower]
    binary = [(column, "the first column of zeros and ones") for column in columns if _is_binary(column)]
    pairs = [(column, "the last column of two values") for column in reversed(columns) if column.distinct == 2]
    for column, reason in (*named, *binary, *pairs):
        found = _label_of(column)
        if found is not None:
            return column, found[0], f"guessed by {reason}; {found[1]}"
    raise FieldError("", "label", f"no column looks like one, expected one of {', '.join(names)}")


def _is_binary(column: _SampledColumn) -> bool:
    is_number = column.spec.type in ("integer", "number") and not column.is_list
    return is_number and column.distinct == 2 and set(pc.unique(column.items.drop_null()).to_pylist()) == {0, 1}


def _label_of(column: _SampledColumn) -> tuple[LabelSpec, str] | None:
    """Return a column as a label, and what its values mean; None if it can be none."""
    if column.missing or column.is_list or column.distinct < 2 or column.spec.type in ("hex32", "time"):
        return None
    if column.spec.type == "text":
        if column.distinct > _FEW_VALUES:
            return None
        counts = {item["values"]: item["counts"] for item in pc.value_counts(column.items).to_pylist()}
        words = [value for value in counts if value.lower() in _POSITIVE_WORDS]
        positive = words[0] if words else min(counts, key=lambda value: (counts[value], value))
        why = "a word for yes" if words else "the rarest value"
        return LabelSpec(name=column.name, positives=(positive,)), f"{positive!r} means 1: {why}"
    values = column.items.to_numpy(zero_copy_only=False).astype(np.float64)
    if values.min() >= 0 and values.max() <= 1:
        return LabelSpec(name=column.name, is_probability=True), "numbers from 0 to 1"
    levels = np.unique(values)[1:]
    shares = 1 - np.searchsorted(np.sort(values), levels) / len(values)
    level = float(levels[int(np.argmin(np.abs(shares - 0.5)))])
    return LabelSpec(name=column.name, at_least=level), f"at least {level:g} means 1: about half of the rows"


def _choice(column: _SampledColumn, rows: int) -> ColumnChoice:
    """Return what becomes of a column that is no label."""
    use, reason = _use(column, rows)
    return ColumnChoice(
        column=column.name,
        type=column.spec.type,
        format=column.spec.format,
        distinct=column.distinct,
        missing_share=column.missing / max(len(column.items), 1),
        use=use,
        reason=reason,
    )


def _use(column: _SampledColumn, rows: int) -> tuple[Use, str]:
    kind, distinct = column.spec.type, column.distinct
    if not column.present:
        return "left out", "always missing"
    if distinct == 1 and not column.missing:
        return "left out", "one value in all rows"
    if column.is_list and kind in ("number", "time"):
        return "left out", "lists of numbers"
    if kind == "time":
        form = "seconds since 1970" if column.spec.format is None else f"times like {column.spec.format!r}"
        return "date parts", f"{form}: {' and '.join(_PARTS[_are_days(column)])} become ids"
    is_unique = distinct == column.present >= _SURELY_REPEATED and not column.is_list
    if kind == "number":
        return "dense", _dense_reason(column)
    if kind == "integer" and not column.is_list and distinct > _FEW_VALUES and not _IS_ID.search(column.name):
        values = column.items.drop_null()
        if is_unique and _is_counter(values):
            return "left out", "numbers the rows"
        return "dense", _dense_reason(column)
    if is_unique:
        return "left out", "another value in every row"
    if distinct >= _MANY_VALUES and distinct >= _MANY_SHARE * column.present:
        return "hashed ids", f"{distinct:,} values, most of them rare: hashed into {_buckets(distinct):,} ids"
    count = _min_count(distinct, rows)
    shared = "" if count == 1 else f"; those that occur less than {count} times share an id"
    return "ids", f"{distinct:,} values{' in lists' if column.is_list else ''}{shared}"


def _is_counter(values: pa.Array) -> bool:
    steps = np.diff(values.to_numpy())
    return bool(len(steps)) and bool((steps == steps[0]).all())


def _is_skewed(column: _SampledColumn) -> bool:
    """Return whether numbers count something: none is negative, and few are far above the others."""
    values = column.items.drop_null().to_numpy().astype(np.float64)
    return bool(values.min() >= 0 and values.mean() > 3 * np.median(values) and values.max() > _FEW_VALUES)


def _dense_reason(column: _SampledColumn) -> str:
    if _is_skewed(column):
        return "numbers with a long tail: missing is 0, then the logarithm"
    return "numbers: missing is the median, then mean 0 and deviation 1"


def _are_days(column: _SampledColumn) -> bool:
    """Return whether times have no time of day."""
    return not (column.items.drop_null().to_numpy() % 86_400).any()


_PARTS: dict[bool, tuple[Literal["hour", "weekday", "month"], ...]] = {
    True: ("weekday", "month"),
    False: ("hour", "weekday"),
}


def _min_count(distinct: int, rows: int) -> int:
    if distinct <= _SURELY_REPEATED:
        return 1
    return 2 if rows < _MANY_VALUES else 5 if distinct < _MANY_VALUES else 15


def _buckets(distinct: int) -> int:
    """Return twice as many buckets as values, as a power of two."""
    return int(min(1 << math.ceil(math.log2(2 * distinct)), _MOST_BUCKETS))


def _steps(columns: Sequence[_SampledColumn], choices: Mapping[str, ColumnChoice], rows: int) -> tuple[Operator, ...]:
    steps: list[Operator] = []

    def used(use: Use) -> list[_SampledColumn]:
        return [column for column in columns if choices[column.name].use == use]

    for are_days, parts in _PARTS.items():
        times = tuple(column.name for column in used("date parts") if _are_days(column) is are_days)
        if times:
            dates = DateParts(columns=times, parts=parts)
            steps += [dates, Categorify(columns=dates.writes)]
    lists = tuple(column.name for column in used("ids") + used("hashed ids") if column.is_list)
    if lists:
        steps.append(ListSlice(columns=lists, stop=_LONGEST_LIST))
    counts = {column.name: _min_count(column.distinct, rows) for column in used("ids")}
    for count in sorted(set(counts.values())):
        names = tuple(name for name, found in counts.items() if found == count)
        steps.append(Categorify(columns=names, min_count=count))
    for column in used("hashed ids"):
        steps.append(HashBucket(columns=(column.name,), buckets=_buckets(column.distinct)))
    logs = tuple(column.name for column in used("dense") if _is_skewed(column))
    others = tuple(column.name for column in used("dense") if column.name not in logs)
    if logs:
        steps += [FillMissing(columns=logs, value=0.0), LogOp(columns=logs, shift=None)]
    if others:
        steps += [FillMissing(columns=others, median=True), Normalize(columns=others)]
    return tuple(steps)
