"""Steps that make ids and texts without learning."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl.columns import Kind
from terarec.etl.ops.categorical import SEPARATOR
from terarec.etl.spark.expressions import column, hashed
from terarec.etl.spark.steps.step import Step


def hash_bucket(step: Step) -> Mapping[str, Column]:
    """1 + hash mod buckets."""

    def bucket(x: Column) -> Column:
        return F.when(x.isNull(), F.lit(0)).otherwise(F.pmod(hashed(x, step.spec.seed), F.lit(step.spec.buckets)) + 1)

    return step.map(lambda name, kind, x: bucket(x).cast("bigint"))


def cross(step: Step) -> Mapping[str, Column]:
    """The values joined by the unit separator."""
    parts: list[Column] = []
    for name in step.spec.columns:
        parts += [F.lit(SEPARATOR), F.coalesce(_text(column(name), step.types[name].kind), F.lit(""))]
    any_present = functools.reduce(operator.or_, (column(name).isNotNull() for name in step.spec.columns))
    return {step.spec.output: F.when(any_present, F.concat(*parts[1:]))}


def _text(x: Column, kind: Kind) -> Column:
    if kind == "hex32":
        return F.lpad(F.lower(F.hex(x)), 8, "0")
    return x.cast("string")
