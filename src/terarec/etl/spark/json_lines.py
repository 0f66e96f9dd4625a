"""Lines of JSON objects -> their fields."""

from __future__ import annotations

from operator import attrgetter

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from terarec.etl.source.text import MAX_LINE_BYTES
from terarec.etl.spark.expressions import TEXT
from terarec.etl.spark.fields import JudgedRows, field_of, literally, present
from terarec.etl.workflow.plan import source_types
from terarec.spec import SourceSpec

_CORRUPT, _RECORD = "__terarec_corrupt", "__terarec_record"
_STRINGS = "array<string>"


def json_fields(source: SourceSpec, frame: DataFrame) -> JudgedRows:
    """The columns of lines that are JSON objects.

    Values are taken as the text that spells them, so that integers of 64 bits keep all their digits.
    """
    names = [item.name for item in source.columns]
    schema = ", ".join(f"`{name.replace('`', '``')}` string" for name in [*names, _CORRUPT])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, "allowNonNumericNumbers": "false"}
    valid, is_long = F.is_valid_utf8(TEXT), F.octet_length(TEXT) > MAX_LINE_BYTES
    frame = frame.withColumn(_RECORD, F.from_json(F.col(TEXT), schema, options))
    parsed = F.col(_RECORD)
    broken = ~valid | parsed.getField(_CORRUPT).isNotNull() | ~F.ltrim(F.col(TEXT)).startswith("{")
    record = F.when(~broken & ~is_long, parsed)
    types = source_types(source)
    fields = []
    for item in source.columns:
        text = record.getField(item.name)
        if item.type == "number":  # Spark spells a number that no double holds so, quotes included
            text = F.when(text.isin('"Infinity"', '"-Infinity"'), F.btrim(text, F.lit('"'))).otherwise(text)
        raw = present(text, source)
        if types[item.name].is_list:
            assert item.separator is not None
            parts = F.when(text.startswith("["), F.from_json(text, _STRINGS)).otherwise(
                F.split(raw, literally(item.separator), -1)
            )
            raw = F.coalesce(F.transform(parts, lambda part: present(part, source)), F.array().cast(_STRINGS))
        fields.append(field_of(item, types[item.name], raw, valid))
    whole = F.when(is_long, "oversized_line").when(broken, "json")
    faults = [field.fault for field in sorted(fields, key=attrgetter("name"))]
    return JudgedRows(frame, fields, F.array_compact(F.array(whole, *faults)))
