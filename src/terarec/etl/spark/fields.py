"""Raw text -> typed values, and what is wrong with it. The grammar is that of `terarec.kernels.delimited_types`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl.columns import ColumnType
from terarec.etl.spark.expressions import each, spark_type
from terarec.etl.workflow.plan import source_types
from terarec.spec import SourceColumn, SourceSpec

_INTEGER = r"^-?[0-9]+\z"
_NUMBER = r"^-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\z"
_NAN = r"(?i)^-?nan\z"
_INFINITE = r"(?i)^-?inf(inity)?\z"
_HEX = r"^[0-9a-fA-F]{1,8}\z"
_DIRECTIVES = {"Y": r"(\d{4})", **dict.fromkeys("mdHMSI", r"(\d{1,2})"), "p": "([AaPp][Mm])"}
_REPLACEMENT = "\ufffd"
_SPACES = " \t\n\x0b\x0c\r"


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the source as expressions on a row.

    Attributes:
        name: of the column.
        type: of its values.
        values: the typed values, null where missing or bad.
        fault: text, the kind of the first fault, null where there is none.
        text: what stands in the file, to be shown with a fault.
    """

    name: str
    type: ColumnType
    values: Column
    fault: Column
    text: Column


def read_fields(source: SourceSpec, texts: Sequence[Column], valid: Column) -> list[Field]:
    """The columns of `source`, each from the text of its field (null: missing); `valid`: see `field_of`."""
    types = source_types(source)
    return [
        field_of(column, types[column.name], _raw(text, source, column), text, valid)
        for column, text in zip(source.columns, texts, strict=True)
    ]


def field_of(column: SourceColumn, found: ColumnType, raw: Column, text: Column, valid: Column) -> Field:
    """One column.

    Args:
        column: as the source has it.
        found: its type.
        raw: its text, or array of texts, in which what is missing is null.
        text: what stands in the file.
        valid: whether the line is UTF-8. Cutting it into fields has put a replacement character for what is not.
    """
    values = each(found, raw, lambda item: _typed(item, column, valid)).cast(spark_type(found))
    if found.is_list:
        faults = F.filter(F.transform(raw, lambda item: _fault(item, column, valid)), lambda kind: kind.isNotNull())
        return Field(column.name, found, values, F.get(faults, F.lit(0)), text)
    return Field(column.name, found, values, _fault(raw, column, valid), text)


def _raw(text: Column, source: SourceSpec, column: SourceColumn) -> Column:
    there = present(text, source)
    if column.separator is None:
        return there
    items = F.transform(F.split(there, literally(column.separator), -1), lambda item: present(item, source))
    return F.coalesce(items, F.array().cast("array<string>"))


def present(text: Column, source: SourceSpec) -> Column:
    """`text`, null where it is missing."""
    trimmed = F.btrim(text, F.lit(_SPACES)) if source.trim else text
    return F.when(~trimmed.isin("", *source.missing), trimmed)


def _typed(text: Column, column: SourceColumn, valid: Column) -> Column:
    if column.type == "text":
        return F.when(valid | ~text.contains(_REPLACEMENT), text)
    if column.type == "time" and column.format is not None:
        return seconds_of(text, column.format)
    return {"integer": integer_of, "time": integer_of, "hex32": hex_of, "number": number_of}[column.type](text)


def _fault(text: Column, column: SourceColumn, valid: Column) -> Column:
    """The kind of fault of one value, null where there is none."""
    if column.type == "text":
        return F.when(~valid & text.contains(_REPLACEMENT), "utf8")
    bad = text.isNotNull() & _typed(text, column, valid).isNull()
    if column.type == "number":
        infinite = text.rlike(_INFINITE) | text.rlike(_NUMBER)
        return F.when(bad & ~text.rlike(_NAN), F.when(infinite, "infinite").otherwise("number"))
    if column.type == "hex32":
        return F.when(bad, "hex")
    if column.format is not None:
        return F.when(bad, "time")
    return F.when(bad, F.when(text.rlike(_INTEGER), "integer_range").otherwise("integer"))


def integer_of(text: Column) -> Column:
    """The 64-bit integer that `text` spells, else null."""
    return F.when(text.rlike(_INTEGER), text.try_cast("bigint"))


def number_of(text: Column) -> Column:
    """The finite number that `text` spells, else null."""
    number = F.when(text.rlike(_NUMBER), text.try_cast("double"))
    return F.when(F.abs(number) < F.lit(float("inf")), number)


def hex_of(text: Column) -> Column:
    """The number that up to 8 hexadecimal digits spell, else null."""
    return F.when(text.rlike(_HEX), F.conv(text, 16, 10).cast("bigint"))


def seconds_of(text: Column, layout: str) -> Column:
    """Seconds since 1970 in UTC of a time written in `layout`, else null."""
    pattern, names = _pattern(layout)
    part = {name: F.regexp_extract(text, pattern, place + 1) for place, name in enumerate(names)}
    hour = part.get("H", part.get("I", F.lit("0"))).try_cast("int")
    if "I" in part:
        hour = F.when(hour.between(1, 12), hour % 12)
        if "p" in part:
            hour = hour + F.when(F.lower(part["p"]) == "pm", 12).otherwise(0)
    defaults = {"Y": "1900", "m": "1", "d": "1", "M": "0", "S": "0"}
    whole = {name: part.get(name, F.lit(value)).try_cast("int") for name, value in defaults.items()}
    day = F.try_make_timestamp(whole["Y"], whole["m"], whole["d"], hour, whole["M"], whole["S"].cast("decimal(16,6)"))
    return F.when(text.rlike(pattern), F.unix_seconds(day.cast("timestamp")))


def _pattern(layout: str) -> tuple[str, list[str]]:
    """A regular expression for times in `layout`, and the directives of its groups."""
    parts = re.split("%([YmdHMSIp])", layout)
    names = parts[1::2]
    pattern = "".join(_DIRECTIVES[part] if place % 2 else literally(part) for place, part in enumerate(parts))
    return rf"^{pattern}\z", names


def literally(text: str) -> str:
    r"""A Java regular expression for `text`; ``\Q`` would end at an ``\E`` in it."""
    return "".join(re.escape(character) for character in text)
