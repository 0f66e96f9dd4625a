"""Steps that look at other rows of the same group."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from terarec.etl.spark.expressions import ROW, column, field_getter
from terarec.etl.spark.steps.step import Step

_RANK = "__terarec_rank"


def difference_lag(frame: DataFrame, step: Step) -> DataFrame:
    """Differences: x less the x of ``lag`` rows before."""
    group, order = column(step.spec.group), column(step.spec.order)
    placed = group.isNotNull() & order.isNotNull()
    # Rows without a place are a group of their own each, so that they do not meet in one task.
    window = Window.partitionBy(group, placed, F.when(~placed, F.col(ROW))).orderBy(order, F.col(ROW))
    return frame.withColumns(
        {
            output: F.when(placed, column(name) - F.lag(column(name), step.spec.lag).over(window))
            for name, output in step.spec.pairs
        }
    )


def history(frame: DataFrame, step: Step) -> DataFrame:
    """The values of the last rows of a strictly lower order, oldest first."""
    group, order = column(step.spec.group), column(step.spec.order)
    placed = group.isNotNull() & order.isNotNull()
    parts = (group, placed, F.when(~placed, F.col(ROW)))
    ranked = frame.withColumn(_RANK, F.dense_rank().over(Window.partitionBy(*parts).orderBy(order)).cast("bigint"))
    # Each of the last max_length orders has a row at least: earlier ones cannot be in the list.
    earlier = Window.partitionBy(*parts).orderBy(_RANK).rangeBetween(-step.spec.max_length, -1)
    items = [column(name).alias(f"i{place}") for place, name in enumerate(step.spec.columns)]
    seen = F.array_sort(F.collect_list(F.struct(_RANK, ROW, *items)).over(earlier))
    first = F.greatest(F.size(seen) - step.spec.max_length, F.lit(0)) + 1
    last = F.slice(seen, first, step.spec.max_length)
    made = {output: F.transform(last, field_getter(f"i{place}")) for place, output in enumerate(step.spec.writes)}
    return ranked.withColumns(made).drop(_RANK)
