"""What a feature workflow is: the content of ``workflow.json``. Described in docs/workflows.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from terarec.spec import checks
from terarec.spec.nearest import did_you_mean
from terarec.spec.operators import JoinTable, Operator
from terarec.spec.quoting import quoted
from terarec.spec.split import Split

SourceType = Literal["text", "integer", "number", "hex32", "time"]
SourceFormat = Literal["delimited", "json_lines", "parquet", "arrow"]
SourceEncoding = Literal["utf-8", "latin-1"]
SourceCleaning = Literal["values", "fields"]
_DIRECTIVES = re.compile(r"%.?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceColumn:
    """A column as the files hold it.

    Attributes:
        type: "text", "integer" (64 bits), "number" (float64), "hex32" (up to 8 hexadecimal digits), or "time" (becomes
            an integer, seconds since 1970 in UTC).
        separator: the field is a list of values of that type with this text between them; files that have lists of
            their own (JSON lines, Parquet, Arrow) may hold those instead. None: one value.
        format: how a "time" is written, with %Y %m %d %H %M %S %I %p and other characters as they are; None for
            integer seconds, of the years 1 to 9999, so that milliseconds are refused.
    """

    name: str
    type: SourceType
    separator: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            checks.fail(self, "name", "the name of a column")
        checks.one_of(self, "type", ("text", "integer", "number", "hex32", "time"))
        if self.separator == "":
            checks.fail(self, "separator", "a text that is not empty")
        if self.format is not None:
            if self.type != "time":
                checks.fail(self, "format", f"none, as the column's type is {self.type!r} and not 'time'")
            directives = _DIRECTIVES.findall(self.format)
            if not directives or any(item[1:] not in set("YmdHMSIp") for item in directives):
                checks.fail(self, "format", "the directives %Y %m %d %H %M %S %I %p and other characters")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    r"""How files are read.

    Attributes:
        columns: those that are read. Delimited text without a header: all fields of a line, in order. Else found by
            name, and others are passed over.
        delimiter: what stands between the fields of delimited text, one character or several.
        header: the first line of each delimited file names its columns.
        quote: fields of delimited text may stand between double quotes, a quote inside being written twice; line ends
            may stand inside.
        trim: white space (ASCII) around a value is left out.
        missing: words that mean a missing value, after trimming.
        cleaning: where `trim` and `missing` hold. "values": for every raw value, whether it comes from a file of any
            format, between quotes or not, or in a record that is served. "fields", as in workflows before version 2:
            `trim` for fields of delimited text without quotes, `missing` for files, and neither for records.
        encoding: of delimited text, "utf-8" or "latin-1" (ISO 8859-1).
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
        checks.one_of(self, "format", ("delimited", "json_lines", "parquet", "arrow"))
        if not self.columns:
            checks.refuse(self, "columns", "got no column, expected at least one")
        checks.distinct(self, "columns", tuple(column.name for column in self.columns))
        good = isinstance(self.delimiter, str) and bool(self.delimiter) and self.delimiter.isascii()
        if not good or any(mark in self.delimiter for mark in '"\r\n'):
            checks.fail(self, "delimiter", "ASCII characters, at least one, none of them a quote or a line end")
        checks.one_of(self, "encoding", get_args(SourceEncoding))
        checks.one_of(self, "cleaning", get_args(SourceCleaning))
        if self.encoding != "utf-8" and self.format != "delimited":
            checks.fail(self, "encoding", f"'utf-8', as the format is {self.format!r} and not 'delimited'")
        for switch in ("header", "quote", "trim"):
            checks.one_of(self, switch, (False, True))
        for column in self.columns:
            if self.format == "delimited" and column.separator and self.delimiter in column.separator:
                checks.refuse(self, "columns", f"separator of {column.name!r} holds the delimiter {self.delimiter!r}")

    def column(self, name: str) -> SourceColumn | None:
        """The column `name`, None if there is none."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSpec:
    """A target, stored as float32.

    Attributes:
        name: in the data set.
        column: the column that it is made from; None for the one of its name.
        positives: values that mean 1, as texts; others mean 0.
        at_least: numbers from this on mean 1, lower ones 0. With neither, the label is the number itself.
        is_probability: such a number is refused unless it is from 0 to 1.
    """

    name: str
    column: str | None = None
    positives: tuple[str, ...] = ()
    at_least: float | None = None
    is_probability: bool = False

    def __post_init__(self) -> None:
        checks.name(self)
        checks.one_of(self, "is_probability", (False, True))
        if self.at_least is not None:
            checks.finite_float(self, "at_least")
            if self.positives:
                checks.refuse(self, "", "got positives and at_least, expected at most one of them")

    @property
    def source(self) -> str:
        """The column that the label is made from."""
        return self.column or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowSpec:
    """How raw logs become a data set.

    Attributes:
        source: the files of rows.
        tables: side tables that `JoinTable` steps name.
        steps: in order; each reads what stands before it.
        split: None: all rows are for training.
        labels: at least one.
        dense: number (or integer) columns, as they stand after all steps.
        categorical: id columns, scalar or lists.
        keys: integer columns whose values are the keys of dynamic tables.
        weight: number (or integer) column of sample weights, as it stands after all steps; None for none.
        metadata: columns of the source that the data set holds as they were read, whatever steps do to them: ids of
            users, or slices of an evaluation.
        version: the user's own count of this workflow's versions.
    """

    name: str
    source: SourceSpec
    tables: Mapping[str, SourceSpec] = field(default_factory=dict)
    steps: tuple[Operator, ...] = ()
    split: Split | None = None
    labels: tuple[LabelSpec, ...]
    dense: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    weight: str | None = None
    metadata: tuple[str, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        checks.name(self)
        checks.positive_int(self, "version")
        if not self.labels:
            checks.refuse(self, "labels", "got no label, expected at least one")
        names = (*(label.name for label in self.labels), *self.dense, *self.categorical, *self.keys)
        if len(names) == len(self.labels):
            checks.refuse(self, "", "got no dense, categorical or key column, expected at least one")
        checks.distinct(self, "", names if self.weight is None else (*names, self.weight))
        checks.distinct(self, "metadata", self.metadata)
        for name in self.metadata:
            self._check_metadata(name)
        for index, step in enumerate(self.steps):
            if isinstance(step, JoinTable) and step.table not in self.tables:
                known = ", ".join(map(repr, self.tables)) or "none"
                checks.refuse(self, f"steps[{index}].table", f"got {step.table!r}, expected one of tables: {known}")

    def _check_metadata(self, name: str) -> None:
        column = self.source.column(name)
        if column is None:
            there = tuple(found.name for found in self.source.columns)
            hint = did_you_mean(name, there)
            expected = f"a column of the source: {', '.join(there)}"
            checks.refuse(self, "metadata", f"got {quoted(name)}{hint}, expected {expected}")
        if column.separator is not None or column.type == "hex32":
            held = column.type if column.separator is None else f"lists of {column.type}"
            checks.refuse(
                self, "metadata", f"column {name!r} holds {held}, expected one text, integer, number or time a row"
            )
