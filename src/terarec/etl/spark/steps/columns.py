"""Steps that name, cut and compute columns, or choose rows."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.errors import ConfigError
from terarec.etl.ops.lists import ITEM_BITS
from terarec.etl.ops.values import value_of
from terarec.etl.spark.expressions import ROW, SPARK_TYPES, column
from terarec.etl.spark.fields import hex_of, integer_of, literally, number_of
from terarec.etl.spark.steps.step import Step
from terarec.spec.named_code import imported

_READERS = {"integer": integer_of, "hex32": hex_of, "number": number_of}


def lambda_op(step: Step) -> Mapping[str, Column]:
    """Call the function for Spark's columns.

    Raises:
        ConfigError: it returned something else than it should.
    """
    name = step.spec.spark_function
    result = imported(name)(*(column(read) for read in step.spec.columns))
    made = result if isinstance(result, tuple) else (result,)
    if len(made) != len(step.spec.outputs) or not all(isinstance(found, Column) for found in made):
        raise ConfigError(f"{name}: returned {result!r}, expected {len(step.spec.outputs)} columns of Spark")
    spark_type = SPARK_TYPES[step.spec.output_type]
    return {
        output: _present(found.cast(spark_type), spark_type)
        for output, found in zip(step.spec.outputs, made, strict=True)
    }


def _present(values: Column, spark_type: str) -> Column:
    """`values`, null where they are missing."""
    if spark_type == "double":
        return F.when(~F.isnan(values), values)
    return F.when(values != "", values) if spark_type == "string" else values


def split_text(step: Step) -> Mapping[str, Column]:
    """The parts of a text."""
    made = {}
    for place, (output, kind) in enumerate(zip(step.spec.outputs, step.spec.types, strict=True)):
        part = text_part(step, place)
        made[output] = part if kind == "text" else typed_part(part, kind)
    return made


def text_part(step: Step, place: int) -> Column:
    """The part at `place` of what `SplitText` splits, null where it is missing."""
    (name,) = step.spec.columns
    part = F.get(F.split(F.coalesce(column(name), F.lit("")), literally(step.spec.separator), -1), F.lit(place))
    return F.when(part != "", part)


def typed_part(part: Column, kind: str) -> Column:
    """The value that a part of a text spells, null where it is none."""
    return _READERS[kind](part)


def rename(frame: DataFrame, step: Step) -> DataFrame:
    """The same columns under other names."""
    names = step.spec.names
    kept = [column(name) for name in frame.columns if name not in names and name not in names.values()]
    return frame.select(*kept, *(column(old).alias(new) for old, new in names.items()))


def keep_rows(frame: DataFrame, step: Step) -> DataFrame:
    """The rows whose value is wanted."""
    spec, x = step.spec, column(step.spec.column)
    if spec.values:
        kind = step.types[spec.column].kind
        return frame.where(x.isin(*(value_of(kind, value) for value in spec.values)))
    if spec.at_least is not None:
        frame = frame.where(x >= F.lit(spec.at_least))
    return frame if spec.at_most is None else frame.where(x <= F.lit(spec.at_most))


def explode(frame: DataFrame, step: Step) -> DataFrame:
    """A row for every item of lists."""
    first, *others = step.spec.columns
    zipped = F.arrays_zip(
        column(first).alias("i0"), *(column(name).alias(f"i{place + 1}") for place, name in enumerate(others))
    )
    place, item = "__terarec_place", "__terarec_item"
    exploded = frame.select("*", F.posexplode(zipped).alias(place, item))
    kept = [column(name) for name in frame.columns if name != ROW and name not in step.spec.columns]
    made = [F.col(item)[f"i{number}"].alias(name) for number, name in enumerate(step.spec.columns)]
    return exploded.select((F.shiftleft(F.col(ROW), ITEM_BITS) + F.col(place)).alias(ROW), *kept, *made)
