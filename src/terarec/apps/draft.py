# SPDX-License-Identifier: Apache-2.0
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
from numpy.typing import NDArray

from terarec.apps.sample import SampledColumn, read_sample
from terarec.errors import ConfigError
from terarec.etl.ops import Categorify, DateParts, FillMissing, HashBucket, ListSlice, LogOp, Normalize, Operator
from terarec.spec import LabelSpec, Split, SplitByFraction, SplitByTime, WorkflowSpec
from terarec.spec.checks import FieldError, did_you_mean, quoted
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
_ID_WORDS = frozenset(
    {
        *(
            "user",
            "uid",
            "visitor",
            "customer",
            "client",
            "member",
            "person",
            "session",
            "cookie",
            "account",
            "household",
        ),
        *("item", "iid", "sku", "asin", "isbn", "product", "pid", "movie", "video", "song", "track", "artist", "book"),
        *("article", "news", "doc", "document", "ad", "adgroup", "campaign", "creative", "advertiser", "publisher"),
        *(
            "brand",
            "seller",
            "merchant",
            "shop",
            "store",
            "site",
            "app",
            "device",
            "city",
            "region",
            "country",
            "genre",
        ),
        *("query", "keyword", "tag", "author", "category", "genre", "hash", "gid", "cid", "sid", "aid", "vid", "mid"),
    }
)
"""Last words of the names of columns that hold ids, whatever their values look like."""
_LARGEST_NUMBER = 1 << 31
"""Integers from here on count nothing."""
_FULL_RANGE = 0.9
"""Share of the integers between the least and the largest that codes fill, and measured numbers do not."""
_FEW_UNLABELLED = 0.01
"""Share of rows without a value that a guessed label may have."""
_LEAK_AUC = 0.95
_CHANCE = 1e-6
_LEAST_OF_LABEL = 20
"""Rows of each label below which an AUC says nothing."""
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
        format_reasons: Decisions about the format of the files, each with its reason.
        dropped_rows: Rows of the sample that do not fit the format.
        choices: Use of each column.
    """

    spec: WorkflowSpec
    sample_rows: int
    label_reason: str
    split_reason: str
    format_reasons: tuple[str, ...]
    dropped_rows: int
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
    sample = read_sample(sources)
    source, columns, unread = sample.source, sample.columns, sample.unread
    if label in unread:
        problem = f"got {quoted(label)}, which holds {_UNREAD}"
        raise FieldError("", "label", f"{problem}, expected one of {', '.join(column.name for column in columns)}")
    rows = max(len(column.values) for column in columns)
    chosen, label_spec, label_reason = _find_label(columns, label)
    if chosen.missing:
        label_reason += (
            f"; missing in {chosen.missing:,} of {rows:,} rows, which terarec prepare leaves out with --bad-input skip"
        )
    others = [column for column in columns if column is not chosen]
    positives = _positives(chosen, label_spec)
    choices = {column.name: _choice(column, rows, positives) for column in others}
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
        reasons = "; ".join(f"{choice.column}: {choice.reason}" for choice in choices.values())
        raise ConfigError(sources[0], f"no column is left to learn from ({reasons}), expected one")
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
    columns_chosen = ColumnChoice(
        column=chosen.name,
        type=chosen.spec.type,
        format=chosen.spec.format,
        distinct=chosen.distinct,
        missing_share=chosen.missing / max(rows, 1),
        use="label",
        reason=label_reason,
    )
    listed = [columns_chosen if column is chosen else choices[column.name] for column in columns]
    listed += [
        ColumnChoice(column=item, type=None, distinct=0, missing_share=0.0, use="left out", reason=_UNREAD)
        for item in unread
    ]
    return Draft(
        spec=spec,
        sample_rows=rows,
        label_reason=label_reason,
        split_reason=split_reason,
        format_reasons=tuple(sample.reasons),
        dropped_rows=sample.dropped,
        choices=tuple(listed),
    )


def _find_label(columns: Sequence[SampledColumn], name: str | None) -> tuple[SampledColumn, LabelSpec, str]:
    """Return the label's column, its spec, and why it is one."""
    names = [column.name for column in columns]
    if name is not None:
        if name not in names:
            problem = f"got {quoted(name)}{did_you_mean(name, names)}, expected one of {', '.join(names)}"
            raise FieldError("", "label", problem)
        chosen = columns[names.index(name)]
        label = _label_of(chosen)
        if label is None:
            expected = f"a column of several numbers, or of 2 to {_FEW_VALUES} texts, one value a row"
            raise FieldError("", "label", f"got {quoted(name)}, expected {expected}")
        return chosen, label[0], f"as you say; {label[1]}"
    # Reversed, so that the first of several names that differ in case alone counts.
    lower = {column.name.lower(): column for column in reversed(columns)}
    named = [(lower[word], f"its name {word!r}") for word in _LABELS if word in lower]
    binary = [(column, "the first column of zeros and ones") for column in columns if _is_binary(column)]
    pairs = [(column, "the last column of two values") for column in reversed(columns) if column.distinct == 2]
    for column, reason in (*named, *binary, *pairs):
        label = _label_of(column)
        # A few damaged rows lack their label; a column that is often missing is something else.
        if label is not None and column.missing <= _FEW_UNLABELLED * len(column.values):
            return column, label[0], f"guessed by {reason}; {label[1]}"
    raise FieldError("", "label", f"no column looks like one, expected one of {', '.join(names)}")


def _is_binary(column: SampledColumn) -> bool:
    is_number = column.spec.type in ("integer", "number") and not column.is_list
    return is_number and column.distinct == 2 and set(pc.unique(column.items.drop_null()).to_pylist()) == {0, 1}


def _label_of(column: SampledColumn) -> tuple[LabelSpec, str] | None:
    """Return a column as a label, and the meaning of its values; None if it cannot be a label."""
    if column.is_list or column.distinct < 2 or column.spec.type in ("hex32", "time"):
        return None
    present = column.items.drop_null()
    if column.spec.type == "text":
        if column.distinct > _FEW_VALUES:
            return None
        counts = {item["values"]: item["counts"] for item in pc.value_counts(present).to_pylist()}
        words = [value for value in counts if value.lower() in _POSITIVE_WORDS]
        positive = words[0] if words else min(counts, key=lambda value: (counts[value], value))
        why = "a word for yes" if words else "the rarest value"
        return LabelSpec(name=column.name, positives=(positive,)), f"{positive!r} means 1: {why}"
    values = present.to_numpy(zero_copy_only=False).astype(np.float64)
    if values.min() >= 0 and values.max() <= 1:
        return LabelSpec(name=column.name, is_probability=True), "numbers from 0 to 1"
    levels = np.unique(values)[1:]
    shares = 1 - np.searchsorted(np.sort(values), levels) / len(values)
    # The level that divides the rows most evenly.
    level = float(levels[int(np.argmin(np.abs(shares - 0.5)))])
    return LabelSpec(name=column.name, at_least=level), f"at least {level:g} means 1: about half of the rows"


def _positives(column: SampledColumn, label: LabelSpec) -> NDArray[np.bool_]:
    """Return which rows are positive; of probabilities those of 0.5 or more."""
    if label.positives:
        return np.asarray(pc.is_in(column.items, pa.array(label.positives)).to_numpy(zero_copy_only=False), dtype=bool)
    values = column.items.to_numpy(zero_copy_only=False).astype(np.float64)
    positives: NDArray[np.bool_] = values >= (0.5 if label.at_least is None else label.at_least)
    return positives


def _choice(column: SampledColumn, rows: int, positives: NDArray[np.bool_]) -> ColumnChoice:
    """Return the use of a column that is not a label."""
    use, reason = _use(column, rows)
    leak = None if use == "left out" else _leak(column, positives)
    if leak is not None:
        use, reason = "left out", f"{leak}: it may be known only after the event; add it if it is known before"
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
    if column.time_formats:
        forms = " and ".join(map(repr, column.time_formats))
        return "left out", f"{forms} both fit all values: add it as a time of the format that is meant"
    if column.is_list and kind in ("number", "time"):
        return "left out", "lists of numbers"
    if kind == "time":
        form = "seconds since 1970" if column.spec.format is None else f"times like {column.spec.format!r}"
        form += f" ({column.time_evidence})" if column.time_evidence else ""
        return "date parts", f"{form}: {' and '.join(_PARTS[_are_days(column)])} become ids"
    is_unique = distinct == column.present >= _SURELY_REPEATED and not column.is_list
    if kind == "number":
        return "dense", _dense_reason(column)
    why = _id_reason(column) if kind == "integer" and not column.is_list else ""
    if why is None:
        if is_unique and _is_counter(column.items.drop_null()):
            return "left out", "numbers the rows"
        return "dense", _dense_reason(column)
    if is_unique:
        return "left out", "another value in every row"
    if distinct >= _MANY_VALUES and distinct >= _MANY_SHARE * column.present:
        return "hashed ids", f"{why}{distinct:,} values, most of them rare: hashed into {_buckets(distinct):,} ids"
    count = _min_count(distinct, rows)
    shared = "" if count == 1 else f"; those that occur less than {count} times share an id"
    return "ids", f"{why}{distinct:,} values{' in lists' if column.is_list else ''}{shared}"


def _id_reason(column: SampledColumn) -> str | None:
    """Return why integers are ids, before the other reasons; None if they are numbers."""
    if column.distinct <= _FEW_VALUES:
        return f"integers of at most {_FEW_VALUES} values: "
    if _IS_ID.search(column.name) or _last_word(column.name) in _ID_WORDS:
        return "an id by its name: "
    bounds = pc.min_max(column.items)
    least, most = bounds["min"].as_py(), bounds["max"].as_py()
    if most >= _LARGEST_NUMBER:
        return f"integers up to {most:,} are ids: "
    if column.distinct >= _SURELY_REPEATED and least >= 0 and column.distinct >= _FULL_RANGE * (most - least + 1):
        share = column.distinct / (most - least + 1)
        is_counter = column.distinct == column.present
        return None if is_counter else f"integers that fill {share:.0%} of {least:,} to {most:,} are ids: "
    return None


def _last_word(name: str) -> str:
    """Return ``user`` for ``last_user`` and ``lastUser``."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return words[-1].lower() if words else ""


def _leak(column: SampledColumn, positives: NDArray[np.bool_]) -> str | None:
    """Return how a column gives the label away; None if it does not."""
    share = float(positives.mean())
    if column.is_list or not 0 < share < 1:
        return None
    values = column.values
    present = np.asarray(values.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    if column.spec.type in ("number", "integer"):
        numbers = pc.fill_null(values, 0).to_numpy(zero_copy_only=False).astype(np.float64)
        set_values, word = present & (numbers != 0), "set, and not 0,"
    else:
        numbers, set_values, word = None, present, "set"
    count, missing = int(set_values.sum()), int((~set_values).sum())
    # By chance alone this many rows would all be positive in one of a million samples.
    if missing and count * math.log(share) < math.log(_CHANCE) and positives[set_values].all():
        return f"{word} in {count:,} rows, all of them positive"
    if column.spec.type == "time" or min(int(positives.sum()), int((~positives).sum())) < _LEAST_OF_LABEL:
        return None
    if numbers is None or column.distinct <= _FEW_VALUES:
        numbers = _rates_of_others(values, positives)
    area = _auc(np.where(present, numbers, -np.inf) if column.distinct > _FEW_VALUES else numbers, positives)
    area = max(area, 1 - area)
    return f"an AUC of {area:.3f} alone" if area > _LEAK_AUC else None


def _rates_of_others(values: pa.Array, positives: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return for each row the share of positive ones among the rows of its value in the other half of the sample."""
    codes = values.dictionary_encode(null_encoding="encode").indices.to_numpy()
    half = np.random.default_rng(0).permutation(len(codes)) % 2  # any order of the rows may say something
    rates = np.empty(len(codes))
    for side in (0, 1):
        others = half != side
        counts = np.bincount(codes[others], minlength=codes.max() + 1)
        sums = np.bincount(codes[others], positives[others], codes.max() + 1)
        mean = positives[others].mean()
        # Rare values stay near the mean of all.
        rates[half == side] = ((sums + mean) / (counts + 1))[codes[half == side]]
    return rates


def _auc(scores: NDArray[np.float64], positives: NDArray[np.bool_]) -> float:
    """Return the probability that a positive row has a higher score than another one; ties count half."""
    _, codes, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = ends - (counts - 1) / 2
    total, others = int(positives.sum()), int((~positives).sum())
    return float((ranks[codes][positives].sum() - total * (total + 1) / 2) / (total * others))


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
        names = tuple(name for name, count_of_name in counts.items() if count_of_name == count)
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
