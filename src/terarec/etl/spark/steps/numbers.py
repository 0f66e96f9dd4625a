"""Steps on numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl.columns import Kind
from terarec.etl.ops.values import value_of
from terarec.etl.spark.expressions import column, each, literal
from terarec.etl.spark.steps.step import Step

Columns = Mapping[str, Column]


def fill_missing(step: Step) -> Columns:
    """Missing values become a value."""
    made: dict[str, Column] = {}
    for position, (name, output) in enumerate(step.spec.pairs):
        kind = step.types[name]
        learnt = step.spec.median
        fill = step.state.columns[name]["median"] if learnt else value_of(kind.kind, step.spec.value)
        made[output] = each(kind, column(name), _filler(literal(kind.kind, fill)))
        if step.spec.indicator:
            made[step.spec.indicators[position]] = each(kind, column(name), lambda x: x.isNull().cast("double"))
    return made


def _filler(fill: Column) -> Callable[[Column], Column]:
    return lambda x: F.coalesce(x, fill)


def clip(step: Step) -> Columns:
    """min(max(x, low), high)."""

    def clipped(x: Column, kind: Kind) -> Column:
        bounded = x
        if step.spec.low is not None:
            bounded = F.greatest(bounded, F.lit(value_of(kind, step.spec.low)))
        if step.spec.high is not None:
            bounded = F.least(bounded, F.lit(value_of(kind, step.spec.high)))
        return F.when(x.isNotNull(), bounded)  # Spark's greatest and least pass over null

    return step.map(lambda name, kind, x: clipped(x, kind.kind))


def log_op(step: Step) -> Columns:
    """ln(x + shift)."""

    def logged(name: str, x: Column) -> Column:
        shift = step.state.columns[name]["shift"] if step.spec.shift is None else step.spec.shift
        if step.spec.shift is None:
            return F.when(x.isNotNull(), F.log(F.greatest(x.cast("double"), F.lit(1.0 - shift)) + shift))
        return F.log(x.cast("double") + shift)

    return step.map(lambda name, kind, x: logged(name, x))


def normalize(step: Step) -> Columns:
    """(x - mean) / deviation."""

    def normal(name: str, x: Column) -> Column:
        figures = step.state.columns[name]
        return (x.cast("double") - F.lit(figures["mean"])) / F.lit(figures["deviation"])

    return step.map(lambda name, kind, x: normal(name, x))


def normalize_min_max(step: Step) -> Columns:
    """(x - min) / (max - min)."""

    def scaled(name: str, x: Column) -> Column:
        low, high = (float(step.state.columns[name][figure]) for figure in ("minimum", "maximum"))
        if low == high:
            return F.when(x.isNotNull(), F.lit(0.0))
        return (x.cast("double") - low) / (high - low)

    return step.map(lambda name, kind, x: scaled(name, x))


def bucketize(step: Step) -> Columns:
    """1 + the number of boundaries that are <= x."""

    def bucket(name: str, x: Column) -> Column:
        boundaries = step.spec.boundaries or step.state.columns[name]["boundaries"]
        number = x.cast("double")
        if not boundaries:
            return F.when(x.isNull(), 0).otherwise(1).cast("bigint")
        reached = F.filter(F.array(*map(F.lit, boundaries)), lambda boundary: boundary <= number)
        return F.when(x.isNull(), 0).otherwise(F.size(reached) + 1).cast("bigint")

    return step.map(lambda name, kind, x: bucket(name, x))
