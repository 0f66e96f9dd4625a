"""Lines of JSON objects -> their fields."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl.spark.expressions import TEXT
from terarec.etl.spark.fields import Field, field_of, literally, present
from terarec.etl.workflow.plan import source_types
from terarec.spec import SourceSpec

_CORRUPT = "__terarec_corrupt"
_STRINGS = "array<string>"


def json_fields(source: SourceSpec) -> tuple[list[Field], Column]:
    """The columns of lines that are JSON objects, and the kind of fault of a whole line, null for a good one.

    Values are taken as the text that spells them, so that integers of 64 bits keep all their digits.
    """
    names = [item.name for item in source.columns]
    schema = ", ".join(f"`{name.replace('`', '``')}` string" for name in [*names, _CORRUPT])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    record = F.from_json(F.col(TEXT), schema, options)
    types = source_types(source)
    fields = []
    for item in source.columns:
        text = record.getField(item.name)
        raw = present(text, source)
        if types[item.name].is_list:
            assert item.separator is not None
            parts = F.when(text.startswith("["), F.from_json(text, _STRINGS)).otherwise(
                F.split(raw, literally(item.separator), -1)
            )
            raw = F.coalesce(F.transform(parts, lambda part: present(part, source)), F.array().cast(_STRINGS))
        fields.append(field_of(item, types[item.name], raw, text, F.is_valid_utf8(TEXT)))
    broken = record.getField(_CORRUPT).isNotNull() | ~F.ltrim(F.col(TEXT)).startswith("{")
    return fields, F.when(broken, "json")
