"""What the steps that learn learn, by aggregates over the training rows. States are those of the local engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from terarec.etl import ops
from terarec.etl.columns import ARROW_TYPES
from terarec.etl.ops import SpillOptions, State
from terarec.etl.ops.categorical import Vocabularies
from terarec.etl.ops.joins import FittedGroups, JoinedGroups
from terarec.etl.ops.states import SAMPLE_SEED
from terarec.etl.spark.expressions import ROW, column, hashed
from terarec.etl.spark.steps.learnt import lookup_key
from terarec.etl.spark.steps.step import Step
from terarec.etl.statistics import SAMPLE_SIZE, Moments, NumberRange, NumberSample
from terarec.etl.values import ValueIds, lookup_kind

_ITEM, _PLACE, _PART = "item", "place", "part"
_SPARE = 1.25
"""Tickets are hashes: among n of them, so many more than wanted lie below the share kept, with a wide margin."""


def learn(frame: DataFrame, step: Step, memory: SpillOptions) -> State:
    """The state of `step`, fitted to `frame`: the training rows as they stand before it."""
    if isinstance(step.spec, ops.Categorify):
        return _vocabularies(frame, step)
    if isinstance(step.spec, ops.JoinGroupby):
        return _groups(frame, step)
    statistic = step.code.statistic(step.types, memory)
    partial = _PARTIALS[type(step.spec)](frame, step)
    statistic.merge(partial)
    state: State = statistic.finish()
    return state


def _items(frame: DataFrame, step: Step, name: str) -> DataFrame:
    """The values of a column that are not missing, each item of a list: columns `ROW`, `_PLACE` and `_ITEM`."""
    if step.types[name].is_list:
        found = frame.select(ROW, F.posexplode(column(name)).alias(_PLACE, _ITEM))
    else:
        found = frame.select(ROW, F.lit(0).alias(_PLACE), lookup_key(step, name).alias(_ITEM))
    return found.where(F.col(_ITEM).isNotNull())


def _moments(frame: DataFrame, step: Step) -> dict[str, Moments]:
    found = _figures(frame, step, lambda x: [F.count(x), F.min(x), F.max(x), F.avg(x), F.var_pop(x)])
    return {name: _moments_of(*figures) for name, figures in found.items()}


def _moments_of(count: int, low: float, high: float, mean: float, variance: float) -> Moments:
    if not count:
        return Moments()
    centre = Fraction(low) if low == high else Fraction(mean)
    spread = Fraction(0) if low == high else Fraction(variance)
    return Moments(count, centre * count, (spread + centre * centre) * count)


def _ranges(frame: DataFrame, step: Step) -> dict[str, NumberRange]:
    found = _figures(frame, step, lambda x: [F.min(x), F.max(x)])
    return {name: NumberRange() if low is None else NumberRange(low, high) for name, (low, high) in found.items()}


def _figures(frame: DataFrame, step: Step, figures: Callable[[Column], list[Column]]) -> dict[str, Sequence[Any]]:
    """Input column -> aggregates of its numbers, all columns without lists in one pass."""
    scalars = [name for name in step.spec.columns if not step.types[name].is_list]
    found: dict[str, Sequence[Any]] = {}
    if scalars:
        each = [figures(column(name).cast("double")) for name in scalars]
        (row,) = frame.agg(*(figure for group in each for figure in group)).collect()
        found = {name: row[place * len(each[0]) :][: len(each[0])] for place, name in enumerate(scalars)}
    for name in step.spec.columns:
        if step.types[name].is_list:
            (found[name],) = _items(frame, step, name).agg(*figures(F.col(_ITEM).cast("double"))).collect()
    return found


def _samples(frame: DataFrame, step: Step) -> dict[str, NumberSample]:
    found = {}
    for name in step.spec.columns:
        items = _items(frame, step, name).withColumn("ticket", hashed(F.col(ROW), SAMPLE_SEED))
        count = items.count()
        if count > SAMPLE_SIZE * _SPARE:
            bound = int(-(2**63) + 2**64 * (_SPARE * SAMPLE_SIZE / count))
            items = items.where(F.col("ticket") <= bound)
        table = items.select("ticket", ROW, _PLACE, F.col(_ITEM).cast("double").alias(_ITEM)).toArrow()
        tickets, rows, places, numbers = (table.column(number).to_numpy() for number in range(4))
        order = np.lexsort((places, rows, tickets))
        found[name] = NumberSample(tickets[order], numbers[order]).lowest()
    return found


def _vocabularies(frame: DataFrame, step: Step) -> Vocabularies:
    """The vocabularies of one step, counted together for each kind of values."""
    ids: dict[str, ValueIds] = {}
    counts: dict[str, pa.Array] = {}
    parts = list(dict.fromkeys(map(step.code.vocabulary, step.spec.columns)))
    kinds = {step.code.vocabulary(name): lookup_kind(step.types[name].kind) for name in step.spec.columns}
    for is_text in (True, False):
        chosen = [part for part in parts if (kinds[part] == "text") is is_text]
        counted = _count(frame, step, chosen) if chosen else None
        for number, part in enumerate(chosen):
            assert counted is not None
            kept = counted.filter(pc.field(_PART) == number)
            kept = kept.sort_by([("count", "descending"), (_ITEM, "ascending")]).slice(0, step.spec.max_size)
            values = kept.column(_ITEM).cast(ARROW_TYPES[kinds[part]]).combine_chunks()
            counts[part] = kept.column("count").combine_chunks()
            ids[part] = ValueIds(kinds[part], values, step.spec.hash_buckets)
    return Vocabularies({part: ids[part] for part in parts}, {part: counts[part] for part in parts})


def _count(frame: DataFrame, step: Step, parts: list[str]) -> pa.Table:
    """Columns part (number of the vocabulary), item and count: the values that may be kept."""
    arrays = []
    for name in step.spec.columns:
        part = step.code.vocabulary(name)
        if part in parts:
            values = column(name) if step.types[name].is_list else F.array(column(name))
            arrays.append(F.transform(values, _marker(parts.index(part))))
    items = frame.select(F.explode(F.concat(*arrays)).alias(_PLACE)).select(f"{_PLACE}.*")
    counted = items.where(F.col(_ITEM).isNotNull()).groupBy(_PART, _ITEM).agg(F.count("*").alias("count"))
    counted = counted.where(F.col("count") >= step.spec.min_count)
    if step.spec.max_size is not None:
        order = Window.partitionBy(_PART).orderBy(F.desc("count"), _ITEM)
        counted = counted.withColumn(_PLACE, F.row_number().over(order))
        counted = counted.where(F.col(_PLACE) <= step.spec.max_size).drop(_PLACE)
    return counted.select(_PART, _ITEM, "count").toArrow()


def _marker(part: int) -> Callable[[Column], Column]:
    return lambda x: F.struct(F.lit(part).alias(_PART), x.alias(_ITEM))


def _targets(frame: DataFrame, step: Step) -> tuple[dict[str, pa.Table], list[tuple[int, Fraction]]]:
    target = column(step.spec.target).cast("double")
    fold = F.pmod(hashed(F.col(ROW), step.spec.seed), F.lit(step.spec.folds)).cast("int")
    rows = frame.where(target.isNotNull()).withColumns({"fold": fold, "sum": target})
    figures = [F.count("*").alias("count"), F.sum("sum").alias("sum")]
    totals = {row["fold"]: (row["count"], Fraction(row["sum"])) for row in rows.groupBy("fold").agg(*figures).collect()}
    tables = {}
    for name in step.spec.columns:
        found = rows.select(lookup_key(step, name).alias("value"), "fold", "sum").groupBy("value", "fold").agg(*figures)
        tables[name] = _typed(found.toArrow(), step, name)
    return tables, [totals.get(number, (0, Fraction(0))) for number in range(step.spec.folds)]


def _groups(frame: DataFrame, step: Step) -> JoinedGroups:
    """The figures of the groups of each column; those of no numbers are missing."""
    functions = {"sum": F.sum, "mean": F.avg, "std": F.stddev_pop, "min": F.min, "max": F.max}
    columns = {}
    for name in step.spec.columns:
        asked = [F.count("*").cast("double")] if "count" in step.spec.statistics else []
        for value in step.spec.values:
            x = column(value).cast("double")
            asked += [functions[statistic](x) for statistic in step.spec.statistics if statistic != "count"]
        outputs = step.code.outputs_of(name)
        figures = [figure.alias(output) for figure, output in zip(asked, outputs, strict=True)]
        found = frame.withColumn("value", lookup_key(step, name)).groupBy("value").agg(*figures)
        table = _typed(found.toArrow(), step, name).sort_by([("value", "ascending")])
        filled = {output: pc.fill_null(table.column(output), math.nan) for output in outputs}
        columns[name] = FittedGroups(pa.table({"value": table.column("value"), **filled}))
    return JoinedGroups(columns)


def _typed(table: pa.Table, step: Step, name: str) -> pa.Table:
    """`table` with its column value in the type of the values of the input `name`."""
    values = table.column("value").cast(ARROW_TYPES[lookup_kind(step.types[name].kind)])
    # A new table: Spark's says of some columns that they have no nulls, which makes it of another type.
    return pa.table({**{field: table.column(field) for field in table.column_names}, "value": values})


def _distinct(frame: DataFrame, step: Step) -> dict[str, pa.Array]:
    enough = step.spec.min_distinct
    return {
        name: _items(frame, step, name).select(_ITEM).distinct().limit(enough).toArrow().column(0)
        for name in step.spec.columns
    }


_PARTIALS: dict[type[Any], Callable[[DataFrame, Step], Any]] = {
    ops.Bucketize: _samples,
    ops.DropLowCardinality: _distinct,
    ops.FillMissing: _samples,
    ops.LogOp: _ranges,
    ops.Normalize: _moments,
    ops.NormalizeMinMax: _ranges,
    ops.TargetEncoding: _targets,
}
