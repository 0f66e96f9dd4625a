# SPDX-License-Identifier: Apache-2.0
"""Feature workflows: the content of workflow.json, see docs/workflows.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, TypeAlias

from terarec.spec import checks
from terarec.spec.checks import did_you_mean, quoted
from terarec.spec.registry import OperatorSpec
from terarec.spec.times import ACCEPTED_ISO, iso_time


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByFraction:
    """Last rows in source order: the share `valid`, and after it, as the very last, the share `test`.

    Attributes:
        valid: Share of the rows for validation.
        test: Share of the rows for the test.
    """

    kind: ClassVar[str] = "by_fraction"
    valid: float = 0.1
    test: float = 0.0

    def __post_init__(self) -> None:
        _shares(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByHash:
    """Rows at random: by the hash of the row id.

    Attributes:
        valid: Share of the rows for validation.
        test: Share of the rows for the test.
        seed: Seed of the hash.
    """

    kind: ClassVar[str] = "by_hash"
    valid: float = 0.1
    test: float = 0.0
    seed: checks.NonNegativeInt64 = 0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _shares(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByUser:
    """All rows of a user together: by the hash of the value of `column`.

    Attributes:
        column: Column of the user, after the row steps.
        valid: Share of the users for validation.
        test: Share of the users for the test.
        seed: Seed of the hash.
    """

    kind: ClassVar[str] = "by_user"
    column: checks.ColumnName
    valid: float = 0.1
    test: float = 0.0
    seed: checks.NonNegativeInt64 = 0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        _shares(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByTime:
    """The latest rows: from thresholds on, or shares of the rows ordered by time; equal times stay together.

    Attributes:
        column: An integer or number column, mostly seconds since 1970.
        valid_from: Rows from this time on are "valid": a number as the column holds them, or a text in ISO 8601 such as
            "2024-05-01" or "2024-05-01T12:30:00+02:00", which means its seconds since 1970.
        test_from: Rows from this time on are "test".
        train_from: Rows before this time, or without a time, are in no part, but in the histories of later ones; with
            thresholds alone.
        valid: Share of the rows, instead of the thresholds.
        test: Share of the rows, the latest of all.
    """

    kind: ClassVar[str] = "by_time"
    column: checks.ColumnName
    valid_from: float | str | None = None
    test_from: float | str | None = None
    train_from: float | str | None = None
    valid: float = 0.0
    test: float = 0.0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for threshold in ("valid_from", "test_from", "train_from"):
            _time(self, threshold)
        has_thresholds = self.valid_from is not None or self.test_from is not None
        # Both or neither of the two ways.
        if has_thresholds is bool(self.valid or self.test):
            checks.reject(self, "", "expected either thresholds (valid_from, test_from) or shares (valid, test)")
        first, last, train = self.bound("valid_from"), self.bound("test_from"), self.bound("train_from")
        if first is not None and last is not None and last <= first:
            checks.fail(self, "test_from", f"a time after valid_from, {self.valid_from!r}")
        end = last if first is None else first
        if train is not None and (end is None or train >= end):
            checks.fail(self, "train_from", "a time before valid_from and test_from, one of which is given")
        if not has_thresholds:
            _shares(self)

    def bound(self, name: Literal["valid_from", "test_from", "train_from"]) -> Fraction | None:
        """Return a threshold as the exact number that it means; None if there is none."""
        bound = getattr(self, name)
        if not isinstance(bound, str):
            # By its decimals: the float nearest to 0.002 is above it.
            return None if bound is None else Fraction(repr(bound))
        seconds, nanoseconds = iso_time(bound)
        return seconds + Fraction(nanoseconds, 10**9)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOneOut:
    """The last row of each user is for the test, the one before it for validation, and the others are for training.

    Rows of one user are in the order of `order`, and equal ones in that of the files. A user with fewer than `min_rows`
    is in the training part, as are rows that lack the user or the order.

    Attributes:
        column: Column of the user, after the row steps.
        order: An integer or number column, mostly a time.
        min_rows: Number of rows, 3 or more, from which on a user has rows for validation and test.
        train: "all" training rows of a user, or the "last" one alone, for models of sequences, which learn to predict
            every item of its history; the others are left out.
    """

    kind: ClassVar[str] = "leave_one_out"
    column: checks.ColumnName
    order: checks.ColumnName
    min_rows: Annotated[int, checks.whole(3)] = 3
    train: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.order == self.column:
            checks.fail(self, "order", f"another column than that of the user, {self.column!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitByFiles:
    """The last files: `valid` of them, and after these, as the very last, `test` of them.

    Attributes:
        valid: Number of files for validation.
        test: Number of files for the test.
        valid_fraction: Share of the other files' rows, the last ones, for validation instead of files.
    """

    kind: ClassVar[str] = "by_files"
    valid: checks.NonNegativeInt = 1
    test: checks.NonNegativeInt = 0
    valid_fraction: checks.Share = 0.0

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not self.valid and not self.test:
            checks.reject(self, "", "got 0 files for both, expected at least one for valid or test")
        if self.valid_fraction == 1:
            checks.fail(self, "valid_fraction", "less than 1: the training part must not be empty")
        if self.valid_fraction and self.valid:
            checks.fail(self, "valid_fraction", f"0 with {self.valid} files for validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class OneSplit(checks.Checked):
    """All rows in one split: for files that a fitted workflow transforms, whatever split it was fitted with.

    Attributes:
        split: Name of the split.
    """

    kind: ClassVar[str] = "one_split"
    split: Literal["train", "valid", "test"]


Split: TypeAlias = SplitByFraction | SplitByHash | SplitByUser | SplitByTime | LeaveOneOut | SplitByFiles | OneSplit


def _shares(split: SplitByFraction | SplitByHash | SplitByUser | SplitByTime) -> None:
    for share in ("valid", "test"):
        checks.finite_float(split, share, low=0.0, high=1.0)
    if not 0.0 < split.valid + split.test < 1.0:
        checks.reject(split, "", f"got valid {split.valid} and test {split.test}, expected a sum between 0 and 1")


def _time(split: SplitByTime, name: str) -> None:
    bound = getattr(split, name)
    if not isinstance(bound, str):
        if bound is not None:
            checks.finite_float(split, name)
        return
    try:
        iso_time(bound)
    except ValueError:
        checks.fail(split, name, f"a number, or {ACCEPTED_ISO}")


SourceType = Literal["text", "integer", "number", "hex32", "time"]
SourceFormat = Literal["delimited", "json_lines", "parquet", "arrow"]
SourceEncoding = Literal["utf-8", "latin-1"]
SourceCleaning = Literal["values", "fields"]
ISO_FORMAT = "ISO8601"
"""Format of times that are written as in ISO 8601, each with or without a time of day, parts of a second and offset."""
# A lone % at the end is found, too, so that it is rejected and not taken for a character.
_DIRECTIVES = re.compile(r"%.?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceColumn:
    """Column of the source files.

    Attributes:
        name: Name in the header or in the records, and to steps.
        type: "text", "integer" (64 bits), "number" (float64), "hex32" (up to 8 hexadecimal digits), or "time" (becomes
            an integer, seconds since 1970 in UTC).
        separator: Text between the values of a list of that type in one field; files that have lists of
            their own (JSON lines, Parquet, Arrow) may hold those instead. None: one value.
        format: Format of a "time", with %Y %m %d %H %M %S %f %z %I %p and other characters as they are, or "ISO8601";
            None for integer seconds, of the years 1 to 9999, so that milliseconds are rejected. %f takes up to nine
            digits. A time without an offset is in UTC.
    """

    name: str
    type: SourceType
    separator: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not isinstance(self.name, str) or not self.name:
            checks.fail(self, "name", "the name of a column")
        if self.separator == "":
            checks.fail(self, "separator", "a text that is not empty")
        if self.format is not None:
            if self.type != "time":
                checks.fail(self, "format", f"none, as the column's type is {self.type!r} and not 'time'")
            directives = _DIRECTIVES.findall(self.format)
            is_known = bool(directives) and all(item[1:] in set("YmdHMSfzIp") for item in directives)
            if self.format != ISO_FORMAT and not (
                is_known and all(directives.count(item) < 2 for item in ("%f", "%z"))
            ):
                accepted = f"the directives %Y %m %d %H %M %S %f %z %I %p and other characters, or {ISO_FORMAT}"
                checks.fail(self, "format", accepted)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    r"""Source files and how they are read.

    Attributes:
        format: Format of the files.
        columns: Columns to read. Delimited text without a header: all fields of a line, in order. Else found by
            name, and others are passed over.
        delimiter: Text between the fields of delimited text, one character or several.
        header: Whether the first line of each delimited file names its columns.
        quote: Whether fields of delimited text may be in double quotes, a quote inside being written twice; line ends
            may be inside.
        trim: Whether white space (ASCII) around a value is removed.
        missing: Words that mean a missing value, after trimming.
        cleaning: Scope of `trim` and `missing`. "values": for every raw value, whether it comes from a file of any
            format, between quotes or not, or in a record that is served. "fields": `trim` for
            fields of delimited text without quotes, `missing` for files, and neither for records.
        encoding: Encoding of delimited text, "utf-8" or "latin-1" (ISO 8859-1).
    """

    format: SourceFormat
    columns: tuple[SourceColumn, ...]
    delimiter: str = "\t"
    header: bool = False
    quote: bool = False
    trim: bool = False
    missing: tuple[str, ...] = ("",)
    encoding: SourceEncoding = "utf-8"
    cleaning: SourceCleaning = "values"

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not self.columns:
            checks.reject(self, "columns", "got no column, expected at least one")
        checks.distinct(self, "columns", tuple(column.name for column in self.columns))
        # ASCII has the same bytes in both encodings, and the parser compares bytes.
        good = isinstance(self.delimiter, str) and bool(self.delimiter) and self.delimiter.isascii()
        if not good or any(mark in self.delimiter for mark in '"\r\n'):
            checks.fail(self, "delimiter", "ASCII characters, at least one, none of them a quote or a line end")
        if self.encoding != "utf-8" and self.format != "delimited":
            checks.fail(self, "encoding", f"'utf-8', as the format is {self.format!r} and not 'delimited'")
        for column in self.columns:
            if self.format == "delimited" and column.separator and self.delimiter in column.separator:
                checks.reject(self, "columns", f"separator of {column.name!r} holds the delimiter {self.delimiter!r}")

    def column(self, name: str) -> SourceColumn | None:
        """Return the column `name`, None if there is none."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSpec:
    """Target, stored as float32.

    Attributes:
        name: Name in the data set.
        column: Column of its values; None for the one of its name.
        positives: Values that mean 1, as texts; others mean 0.
        at_least: Numbers from this on mean 1, lower ones 0. With neither, the label is the number itself.
        is_probability: Whether such a number must be from 0 to 1.
    """

    name: checks.Name
    column: str | None = None
    positives: tuple[str, ...] = ()
    at_least: checks.Finite | None = None
    is_probability: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if self.at_least is not None and self.positives:
            checks.reject(self, "", "got positives and at_least, expected at most one of them")

    @property
    def source(self) -> str:
        """Source column of the label."""
        return self.column or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowSpec:
    """Preparation of a data set from raw logs.

    Attributes:
        name: Name of the data set.
        source: The files of rows.
        tables: Side tables that `JoinTable` steps name.
        steps: Steps in order; each reads the results of earlier ones.
        split: None: all rows are for training.
        labels: Labels, at least one.
        dense: Number (or integer) columns, as they are after all steps.
        categorical: Id columns, scalar or lists.
        keys: Integer columns whose values are the keys of dynamic tables.
        weight: Number (or integer) column of sample weights, as it is after all steps; None for none.
        metadata: Columns of the source that the data set holds as they were read, whatever steps do to them: ids of
            users, or slices of an evaluation.
        version: The user's own count of this workflow's versions.
    """

    name: checks.Name
    source: SourceSpec
    tables: Mapping[str, SourceSpec] = field(default_factory=dict)
    steps: tuple[OperatorSpec, ...] = ()
    split: Split | None = None
    labels: tuple[LabelSpec, ...]
    dense: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    weight: str | None = None
    metadata: tuple[str, ...] = ()
    version: checks.PositiveInt = 1

    def __post_init__(self) -> None:
        checks.check_fields(self)
        if not self.labels:
            checks.reject(self, "labels", "got no label, expected at least one")
        names = (*(label.name for label in self.labels), *self.dense, *self.categorical, *self.keys)
        # A model needs an input.
        if len(names) == len(self.labels):
            checks.reject(self, "", "got no dense, categorical or key column, expected at least one")
        checks.distinct(self, "", names if self.weight is None else (*names, self.weight))
        checks.distinct(self, "metadata", self.metadata)
        # Those of the data set, which is described when all of the work is done.
        for field_name in ("dense", "categorical", "keys", "metadata"):
            other = "" if field_name == "metadata" else "; Rename gives a column another one"
            for name in getattr(self, field_name):
                if not checks.is_name(name):
                    checks.reject(self, field_name, f"got {quoted(name)}, expected {checks.NAME}{other}")
        if self.weight is not None:
            checks.name(self, "weight")
        for name in self.metadata:
            self._check_metadata(name)
        for index, step in enumerate(self.steps):
            table = step.side_table
            if table is not None and table not in self.tables:
                known = ", ".join(map(repr, self.tables)) or "none"
                checks.reject(self, f"steps[{index}].table", f"got {table!r}, expected one of tables: {known}")

    def _check_metadata(self, name: str) -> None:
        column = self.source.column(name)
        if column is None:
            there = tuple(one.name for one in self.source.columns)
            hint = did_you_mean(name, there)
            expected = f"a column of the source: {', '.join(there)}"
            checks.reject(self, "metadata", f"got {quoted(name)}{hint}, expected {expected}")
        # A metadata column has one of three types, one value a row.
        if column.separator is not None or column.type == "hex32":
            own = column.type if column.separator is None else f"lists of {column.type}"
            checks.reject(
                self, "metadata", f"column {name!r} holds {own}, expected one text, integer, number or time a row"
            )
