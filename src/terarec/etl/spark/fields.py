"""Raw text -> typed values, and what is wrong with it. The grammar is that of `terarec.kernels.delimited_types`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.etl.cleaning import FIRST_SECOND, LAST_SECOND, SPACE
from terarec.etl.columns import ColumnType
from terarec.etl.spark.expressions import each, spark_type
from terarec.etl.workflow.plan import source_types
from terarec.spec import SourceColumn, SourceSpec

_INTEGER = r"^-?[0-9]+(\.0+)?\z"
_NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\z"
_NAN = r"(?i)^-?nan\z"
_INFINITE = r"(?i)^-?inf(inity)?\z"
_HEX_DIGITS = 8
_DIRECTIVES = {
    "Y": r"(\d{4})",
    "m": r"(1[0-2]|0[1-9]|[1-9])",
    "d": r"(3[01]|[12]\d|0[1-9]|[1-9])",
    "H": r"(2[0-3]|[01]\d|\d)",
    "I": r"(1[0-2]|0[1-9]|[1-9])",
    "M": r"([0-5]\d|\d)",
    "S": r"([0-5]\d|\d)",
    "p": "([ap]m)",
}
"""What `datetime.strptime` reads, and `datetime` then holds."""
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the source as expressions on a row.

    Attributes:
        name: of the column.
        type: of its values.
        values: the typed values, null where missing or bad.
        is_bad: of the computed `values`, whether there is a fault; costs little, and is never null.
        fault: text, the kind of the first fault, null where there is none; costs much, and is asked of bad rows alone.
        read_late: a written time: the local engine takes it as text first, and that it is no time comes after all else.
    """

    name: str
    type: ColumnType
    values: Column
    is_bad: Callable[[Column], Column]
    fault: Callable[[], Column]
    read_late: bool


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """Rows and what to read of them.

    Attributes:
        frame: the rows, with what the expressions of `fields` have in common computed once.
        fields: the columns of the source.
        is_bad: whether there is a fault in the row besides those of its fields; never null.
        kinds: of the faults of a bad row, an array.
    """

    frame: DataFrame
    fields: Sequence[Field]
    is_bad: Column
    kinds: Callable[[], Column]


def read_fields(source: SourceSpec, texts: Sequence[Column], valid: Column) -> list[Field]:
    """The columns of `source`, each from the text of its field (null: missing); `valid`: see `field_of`."""
    types = source_types(source)
    return [
        field_of(column, types[column.name], _raw(text, source, column), valid)
        for column, text in zip(source.columns, texts, strict=True)
    ]


def field_of(column: SourceColumn, found: ColumnType, raw: Column, valid: Column) -> Field:
    """One column.

    Args:
        column: as the source has it.
        found: its type.
        raw: its text, or array of texts, in which what is missing is null.
        valid: whether the line is UTF-8. Cutting it into fields has put a replacement character for what is not.
    """

    def read(text: Column) -> Column:
        return typed_value(text, column, valid)

    def is_missing(text: Column) -> Column:
        return text.rlike(_NAN) if column.type == "number" else F.lit(False)

    return judged(column, found, raw, read, lambda text: fault_of_value(text, column, valid), is_missing)


def judged(
    column: SourceColumn,
    found: ColumnType,
    raw: Column,
    read: Callable[[Column], Column],
    fault_of: Callable[[Column], Column],
    is_missing: Callable[[Column], Column] = lambda item: F.lit(False),
) -> Field:
    """One column; a list with a bad item is empty.

    Args:
        column: as the source has it.
        found: its type.
        raw: what stands there, or an array of that.
        read: a value of it, null where it is missing or bad.
        fault_of: the kind of its fault, null where there is none.
        is_missing: whether what is there and was not read is missing, and no fault.
    """
    read_late = column.type == "time"
    values = each(found, raw, read).cast(spark_type(found))
    if not found.is_list:

        def is_bad(value: Column) -> Column:
            return raw.isNotNull() & value.isNull() & ~is_missing(raw)

        return Field(column.name, found, values, is_bad, lambda: fault_of(raw), read_late)
    faults = F.filter(F.transform(raw, fault_of), lambda kind: kind.isNotNull())
    fault = F.get(faults, F.lit(0))
    for kind in ("utf8", "text"):  # the local engine finds these before all others
        fault = F.when(F.array_contains(faults, kind), kind).otherwise(fault)
    values = F.when(fault.isNull(), values).otherwise(F.array().cast(spark_type(found)))
    return Field(column.name, found, values, lambda value: fault.isNotNull(), lambda: fault, read_late)


def kinds_of(fields: Sequence[Field]) -> list[Column]:
    """The kinds of the faults of fields, in the order in which the local engine finds them."""
    return [field.fault() for field in sorted(fields, key=lambda field: field.name)]


def _raw(text: Column, source: SourceSpec, column: SourceColumn) -> Column:
    there = present(text, source)
    if column.separator is None:
        return there
    items = F.split(there, literally(column.separator), -1)
    items = F.transform(items, lambda item: present(F.btrim(item, F.lit(SPACE)) if source.trim else item, source))
    return F.coalesce(items, F.array().cast("array<string>"))


def present(text: Column, source: SourceSpec) -> Column:
    """`text` as `Cleaning` leaves it, null where it is missing."""
    if source.trim and source.cleaning == "values":
        text = F.btrim(text, F.lit(SPACE))
    return F.when(~text.isin("", *source.missing), text)


def typed_value(text: Column, column: SourceColumn, valid: Column) -> Column:
    """The value that `text` spells in a line that is `valid` UTF-8, null where it is missing or bad."""
    if column.type == "text":
        return F.when(valid | ~text.contains(_REPLACEMENT), text)
    if column.type == "time" and column.format is not None:
        return seconds_of(text, column.format)
    if column.type == "time":
        return year_second_of(integer_of(text))
    return {"integer": integer_of, "hex32": hex_of, "number": number_of}[column.type](text)


def fault_of_value(text: Column, column: SourceColumn, valid: Column) -> Column:
    """The kind of fault of one value, null where there is none."""
    not_utf8 = F.when(~valid & text.contains(_REPLACEMENT), "utf8")
    if column.type == "text":
        return not_utf8
    bad = text.isNotNull() & typed_value(text, column, valid).isNull()
    if column.type == "number":
        infinite = text.rlike(_INFINITE) | text.rlike(_NUMBER)
        return F.when(bad & ~text.rlike(_NAN), F.when(infinite, "infinite").otherwise("number"))
    if column.type == "hex32":
        return F.when(bad, "hex")
    if column.format is not None:
        return F.coalesce(not_utf8, F.when(bad, "time"))
    kind = F.when(text.rlike(_INTEGER), "integer_range").otherwise("integer")
    return F.when(bad, F.when(integer_of(text).isNotNull(), "time").otherwise(kind))


def integer_of(text: Column) -> Column:
    """The 64-bit integer that `text` spells, else null."""
    digits = F.when(text.contains("."), F.regexp_replace(text, r"\.0+\z", "")).otherwise(text)
    integer = digits.try_cast("bigint")  # takes "+1" and " 1", too, but writes no number so
    return F.when((integer.cast("string") == digits) | text.rlike(_INTEGER), integer)


def year_second_of(integer: Column) -> Column:
    """An integer that is seconds since 1970, else null."""
    return F.when(integer.between(FIRST_SECOND, LAST_SECOND), integer)


def number_of(text: Column) -> Column:
    """The finite number that `text` spells, else null."""
    number = F.when(text.rlike(_NUMBER), text.try_cast("double"))
    return F.when(F.abs(number) < F.lit(float("inf")), number)


def hex_of(text: Column) -> Column:
    """The number that up to 8 hexadecimal digits spell, else null."""
    is_hex = (F.octet_length(text) <= _HEX_DIGITS) & F.unhex(text).isNotNull()
    return F.when(is_hex & (text != ""), F.conv(text, 16, 10).cast("bigint"))


def seconds_of(text: Column, layout: str) -> Column:
    """Seconds since 1970 in UTC of a time written in `layout`, else null."""
    pattern, names = _pattern(layout)
    part = {name: F.regexp_extract(text, pattern, place + 1) for place, name in enumerate(names)}
    hour = part.get("H", part.get("I", F.lit("0"))).try_cast("int")
    if "I" in part:
        hour = hour % 12
        if "p" in part:
            hour = hour + F.when(F.lower(part["p"]) == "pm", 12).otherwise(0)
    defaults = {"Y": "1900", "m": "1", "d": "1", "M": "0", "S": "0"}
    whole = {name: part.get(name, F.lit(value)).try_cast("int") for name, value in defaults.items()}
    day = F.try_make_timestamp(whole["Y"], whole["m"], whole["d"], hour, whole["M"], whole["S"].cast("decimal(16,6)"))
    return F.when(text.rlike(pattern) & (whole["Y"] > 0), F.unix_seconds(day.cast("timestamp")))


def _pattern(layout: str) -> tuple[str, list[str]]:
    """A regular expression for times in `layout`, and the directives of its groups."""
    parts = re.split("%([YmdHMSIp])", layout)
    names = parts[1::2]
    pattern = "".join(_DIRECTIVES[part] if place % 2 else _spaced(part) for place, part in enumerate(parts))
    return rf"(?i)^{pattern}\z", names


def _spaced(text: str) -> str:
    """A regular expression for `text` in which any white space stands for white space."""
    return r"\s+".join(map(literally, re.split(r"\s+", text)))


def literally(text: str) -> str:
    r"""A Java regular expression for `text`; ``\Q`` would end at an ``\E`` in it."""
    return "".join(re.escape(character) for character in text)
