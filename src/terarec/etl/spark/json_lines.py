"""Lines of JSON objects -> their fields."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.etl.columns import ColumnType
from terarec.etl.source.json_fields import WELL_FORMED
from terarec.etl.source.text import MAX_LINE_BYTES
from terarec.etl.spark.expressions import TEXT
from terarec.etl.spark.fields import (
    Field,
    JudgedRows,
    fault_of_value,
    judged,
    kinds_of,
    literally,
    present,
    typed_value,
)
from terarec.etl.workflow.plan import source_types
from terarec.spec import SourceColumn, SourceSpec

_CORRUPT, _PARSED, _RECORD = "__terarec_corrupt", "__terarec_parsed", "__terarec_record"
_SPELLED, _VARIANTS, _BROKEN, _LONG = "__terarec_spelled", "__terarec_variants", "__terarec_broken", "__terarec_long"
_STRINGS = "array<string>"
_OPTIONS = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, "allowNonNumericNumbers": "false"}


def json_fields(source: SourceSpec, frame: DataFrame) -> JudgedRows:
    """The columns of lines that are JSON objects.

    A line is parsed twice: values as the text that spells them, so that integers of 64 bits keep all their digits; and
    as variants, which tell a number from one in quotes.
    """
    is_broken = ~F.is_valid_utf8(TEXT) | F.col(_PARSED).getField(_CORRUPT).isNotNull()
    is_broken = is_broken | (F.col(TEXT).contains("\\u") & ~F.col(TEXT).rlike(f"(?s)\\A{WELL_FORMED.pattern}\\z"))
    is_broken = is_broken | ~F.ltrim(F.col(TEXT)).startswith("{")
    frame = frame.withColumns(
        {
            _PARSED: F.from_json(F.col(TEXT), _schema(source, "string"), _OPTIONS),
            _LONG: F.octet_length(TEXT) > MAX_LINE_BYTES,
        }
    )
    frame = frame.withColumn(_BROKEN, is_broken & ~F.col(_LONG))
    whole = ~F.col(_BROKEN) & ~F.col(_LONG)
    variants = F.from_json(F.when(whole, F.col(TEXT)), _schema(source, "variant"), _OPTIONS)
    frame = frame.withColumns({_SPELLED: F.when(whole, F.col(_PARSED)), _VARIANTS: variants})
    types = source_types(source)
    fields = [_field(item, types[item.name], source) for item in source.columns]
    line = F.when(F.col(_LONG), "oversized_line").when(F.col(_BROKEN), "json")

    def kinds() -> Column:
        return F.array_compact(F.array(line, *kinds_of(fields)))

    return JudgedRows(frame, fields, line.isNotNull(), kinds)


def _schema(source: SourceSpec, kind: str) -> str:
    fields = [f"`{item.name.replace('`', '``')}` {kind}" for item in source.columns]
    return ", ".join([*fields, f"{_CORRUPT} string"])


def _field(item: SourceColumn, found: ColumnType, source: SourceSpec) -> Field:
    """A column whose raw values are structs of a text and of what is wrong with its form, null where missing."""
    text, variant = (F.col(name).getField(item.name) for name in (_SPELLED, _VARIANTS))
    raw = _list(text, variant, item, source) if found.is_list else _value(text, variant, item, source)

    def read(value: Column) -> Column:
        return typed_value(F.when(value["fault"].isNull(), value["text"]), item, F.lit(True))

    def fault_of(value: Column) -> Column:
        return F.coalesce(value["fault"], fault_of_value(value["text"], item, F.lit(True)))

    return judged(item, found, raw, read, fault_of)


def _value(text: Column, variant: Column, item: SourceColumn, source: SourceSpec) -> Column:
    """One value: text has to be in quotes, and a number must not be."""
    is_quoted = _kind(variant) == "STRING"
    text = F.when(is_quoted, present(text, source)).otherwise(text)
    if item.type in ("text", "hex32") or item.format is not None:
        return F.when(text.isNotNull(), _raw(text, F.when(~is_quoted, "text")))
    kind = "number" if item.type == "number" else "integer"
    # Spark spells a number that no double holds in quotes.
    spelled = F.when(text.isin('"Infinity"', '"-Infinity"'), F.btrim(text, F.lit('"'))).otherwise(text)
    if kind == "integer":
        # As the local engine has them: floats that are integers, whatever their spelling.
        number = spelled.try_cast("double")
        is_whole = (F.abs(number) < 2**53) & (F.floor(number) == number)
        whole = F.when(is_whole, number.cast("bigint").cast("string")).otherwise("-")
        spelled = F.when(spelled.rlike("[.eE]"), whole).otherwise(spelled)
    return F.when(text.isNotNull(), _raw(spelled, F.when(is_quoted, kind)))


def _list(text: Column, variant: Column, item: SourceColumn, source: SourceSpec) -> Column:
    """A list of values, or a text of them."""
    assert item.separator is not None
    kind = _kind(variant)
    none = F.lit(None).cast("string")
    parts = F.split(present(text, source), literally(item.separator), -1)
    written = F.transform(parts, lambda part: F.when(present(part, source).isNotNull(), _raw(part, none)))
    variants = F.try_variant_get(variant, "$", "array<variant>")
    items = F.zip_with(F.from_json(text, _STRINGS), variants, lambda part, of: _item(part, of, item, source))
    raw = F.when(kind.startswith("ARRAY"), items).when(kind == "STRING", written)
    raw = raw.when(text.isNotNull(), F.array(_raw(text, F.lit("json"))))
    return F.coalesce(raw, F.array().cast("array<struct<text: string, fault: string>>"))


def _item(text: Column, variant: Column, item: SourceColumn, source: SourceSpec) -> Column:
    value = _value(text, variant, item, source)
    return F.when(value["fault"].isNotNull() | present(value["text"], source).isNotNull(), value)


def _kind(variant: Column) -> Column:
    """The type of a value in Spark's words; VARIANT for what it cannot hold, such as an object with a key twice."""
    return F.coalesce(F.schema_of_variant(variant), F.lit("VARIANT"))


def _raw(text: Column, fault: Column) -> Column:
    return F.struct(text.alias("text"), fault.alias("fault"))
