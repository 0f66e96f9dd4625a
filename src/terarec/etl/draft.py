"""Draft of a workflow for unknown logs: types, roles and steps by a sample of their first rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from terarec.errors import ConfigError
from terarec.etl.ops import Categorify, DateParts, FillMissing, HashBucket, ListSlice, LogOp, Normalize, Operator
from terarec.etl.sample import SampledColumn, read_sample
from terarec.spec import FieldError, LabelSpec, Split, SplitByFraction, SplitByTime, WorkflowSpec
from terarec.spec.checks import did_you_mean, quoted
from terarec.spec.workflow import SourceType

Use = Literal["label", "dense", "ids", "hashed ids", "date parts", "left out"]

_VALID_SHARE = 0.1
_FEW_VALUES = 12
_SURELY_REPEATED = 100
"""A column whose values all differ identifies rows, if there are this many values."""
_MANY_VALUES = 10_000
_MANY_SHARE = 0.3
_MOST_BUCKETS = 1 << 22
_LONGEST_LIST = 50
_UNREAD = "truth values, objects or values of several types"
_LABELS = (
    *("label", "target", "click", "clicked", "is_click", "clk", "conversion", "converted", "is_conversion", "purchase"),
    *("purchased", "bought", "buy", "liked", "y", "class", "income", "outcome", "rating", "overall", "stars", "score"),
)
_POSITIVE_WORDS = ("yes", "true", "y", "t", "positive", "purchase", "click")
_IS_ID = re.compile(r"(^|[_ .])(?i:id|ids|code|zip|type|category|cat|key|number|no)$|[a-z](Id|ID|Code|Type)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChoice:
    """The decision of a draft for a column.

    Attributes:
        column: Its name.
        type: Its type in the files; None where the source reads no such values.
        format: Format of its times; None for other types and for seconds.
        distinct: Different values in the sample.
        missing_share: Share of missing values in the sample.
        use: Use of its values in the data set.
        reason: Reason for it.
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
        label_reason: Reason for the choice of the label, and the meaning of its values.
        split_reason: Reason for the choice of the split.
        choices: Use of each column.
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
    source, columns, unread = read_sample(sources)
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
    # Without a header a column is known by its position, so none may be left out.
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


def _find_label(columns: Sequence[SampledColumn], name: str | None) -> tuple[SampledColumn, LabelSpec, str]:
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
    # Reversed, so that the first of several names that differ in case alone counts.
    lower = {column.name.lower(): column for column in reversed(columns)}
    named = [(lower[word], f"its name {word!r}") for word in _LABELS if word in lower]
    binary = [(column, "the first column of zeros and ones") for column in columns if _is_binary(column)]
    pairs = [(column, "the last column of two values") for column in reversed(columns) if column.distinct == 2]
    for column, reason in (*named, *binary, *pairs):
        found = _label_of(column)
        if found is not None:
            return column, found[0], f"guessed by {reason}; {found[1]}"
    raise FieldError("", "label", f"no column looks like one, expected one of {', '.join(names)}")


def _is_binary(column: SampledColumn) -> bool:
    is_number = column.spec.type in ("integer", "number") and not column.is_list
    return is_number and column.distinct == 2 and set(pc.unique(column.items.drop_null()).to_pylist()) == {0, 1}


def _label_of(column: SampledColumn) -> tuple[LabelSpec, str] | None:
    """Return a column as a label, and the meaning of its values; None if it cannot be a label."""
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
    # The level that divides the rows most evenly.
    level = float(levels[int(np.argmin(np.abs(shares - 0.5)))])
    return LabelSpec(name=column.name, at_least=level), f"at least {level:g} means 1: about half of the rows"


def _choice(column: SampledColumn, rows: int) -> ColumnChoice:
    """Return the use of a column that is not a label."""
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


def _use(column: SampledColumn, rows: int) -> tuple[Use, str]:
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


def _is_skewed(column: SampledColumn) -> bool:
    """Return whether numbers count something: none is negative, and few are far above the others."""
    values = column.items.drop_null().to_numpy().astype(np.float64)
    return bool(values.min() >= 0 and values.mean() > 3 * np.median(values) and values.max() > _FEW_VALUES)


def _dense_reason(column: SampledColumn) -> str:
    if _is_skewed(column):
        return "numbers with a long tail: missing is 0, then the logarithm"
    return "numbers: missing is the median, then mean 0 and deviation 1"


def _are_days(column: SampledColumn) -> bool:
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


def _steps(columns: Sequence[SampledColumn], choices: Mapping[str, ColumnChoice], rows: int) -> tuple[Operator, ...]:
    steps: list[Operator] = []

    def used(use: Use) -> list[SampledColumn]:
        return [column for column in columns if choices[column.name].use == use]

    for are_days, parts in _PARTS.items():
        times = tuple(column.name for column in used("date parts") if _are_days(column) is are_days)
        if times:
            dates = DateParts(columns=times, parts=parts)
            steps += [dates, Categorify(columns=dates.writes)]
    lists = tuple(column.name for column in used("ids") + used("hashed ids") if column.is_list)
    # Before vocabularies are fitted, so that only items that are kept get ids.
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
