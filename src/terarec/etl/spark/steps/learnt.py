"""Steps that look up what they learnt of a value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from terarec.etl.columns import TRAIN
from terarec.etl.spark.expressions import ROW, SPLIT, column, hashed, spark_type
from terarec.etl.spark.steps.step import Step
from terarec.etl.spark.tables import VALUE, Tables

MISSING, UNSEEN, SEEN = 0, 1, 2
"""Ids of values in states that hold figures of values: from `SEEN` on those of values seen in training."""

ID_SEED = 42
"""Of the hash of values that are not in a vocabulary."""

_ID, _MEANS, _IS_KNOWN = "__terarec_id", "__terarec_means", "__terarec_is_known"


def categorify(frame: DataFrame, step: Step, tables: Tables) -> DataFrame:
    """Value -> id by frequency."""
    outputs = {}
    for place, (name, output) in enumerate(step.spec.pairs):
        part = step.code.vocabulary(name)
        ids = step.state.ids[part]
        numbers = pa.array(np.arange(ids.first_id, ids.num_ids, dtype=np.int64))
        made = f"{_ID}_{place}"
        table = pa.table({VALUE: ids.values, made: numbers})
        known = f"{step.index}-{part}-{place}"
        chosen = _id_chooser(ids.hash_buckets)
        if step.types[name].is_list:
            frame, _ = tables.join_items(frame, known, name, table)
            ids_of = F.coalesce(F.zip_with(column(name), F.col(made), chosen), F.array().cast("array<bigint>"))
        else:
            frame = tables.join(frame, column(name), known, table)
            ids_of = chosen(column(name), F.col(made))
        # At once, so that rows do not carry values and what was found of them through all joins.
        frame = frame.withColumn(made, ids_of)
        outputs[output] = F.col(made)
    return frame.withColumns(outputs).drop(*(f"{_ID}_{place}" for place in range(len(outputs))))


def _id_chooser(buckets: int) -> Callable[[Column, Column], Column]:
    """The id of a value, given that of the vocabulary, null where it is not in there."""

    def chosen(x: Column, found: Column) -> Column:
        rare = F.pmod(hashed(x, ID_SEED), F.lit(buckets)) + 1
        return F.when(x.isNull(), F.lit(0)).otherwise(F.coalesce(found, rare)).cast("bigint")

    return chosen


def target_encoding(frame: DataFrame, step: Step, tables: Tables) -> DataFrame:
    """The mean of the target where the value occurs, of training rows without their own fold."""
    folds = step.spec.folds
    fold = F.pmod(hashed(F.col(ROW), step.spec.seed), F.lit(folds)).cast("int")
    view = F.when(F.col(SPLIT) == TRAIN, fold).otherwise(folds)
    outputs = {}
    for place, (name, output) in enumerate(step.spec.pairs):
        means = step.state.columns[name]
        made = f"{_MEANS}_{place}"
        lists = pa.array(list(means.encoded.T[SEEN:]), type=pa.list_(pa.float64()))
        frame = tables.join(
            frame, lookup_key(step, name), f"{step.index}-{place}", pa.table({VALUE: means.ids.values, made: lists})
        )
        default = F.when(lookup_key(step, name).isNull(), _doubles(means.encoded[:, MISSING]))
        found = F.coalesce(F.col(made), default.otherwise(_doubles(means.encoded[:, UNSEEN])))
        outputs[output] = F.get(found, view)
    return frame.withColumns(outputs).drop(*(f"{_MEANS}_{place}" for place in range(len(outputs))))


def join_groupby(frame: DataFrame, step: Step, tables: Tables) -> DataFrame:
    """Figures of the training rows that share the value."""
    for place, name in enumerate(step.spec.columns):
        groups = step.state.columns[name]
        made = {output: f"{_MEANS}_{number}" for number, output in enumerate(groups.statistics)}
        figures = {
            stored: pa.array(groups.statistics[output][SEEN:], type=pa.float64(), from_pandas=True)
            for output, stored in made.items()
        }
        known = pa.array(np.ones(len(groups.ids.values), dtype=np.bool_))
        table = pa.table({VALUE: groups.ids.values, _IS_KNOWN: known, **figures})
        key = lookup_key(step, name)
        frame = tables.join(frame, key, f"{step.index}-{place}", table)

        frame = frame.withColumns(
            {output: _figure(groups.statistics[output], stored, key) for output, stored in made.items()}
        )
        frame = frame.drop(_IS_KNOWN, *made.values())
    return frame


def _figure(figures: NDArray[np.float64], stored: str, key: Column) -> Column:
    """The figure that was joined as `stored`; those of missing and of unseen values stand before the others."""
    found = F.when(F.col(_IS_KNOWN).isNotNull(), F.col(stored))
    return found.when(key.isNull(), _double(figures[MISSING])).otherwise(_double(figures[UNSEEN]))


def join_table(frame: DataFrame, step: Step, tables: Tables) -> DataFrame:
    """Columns of a side table."""
    rows = step.state.rows
    made = {name: f"{_MEANS}_{place}" for place, name in enumerate(step.spec.columns)}
    columns = {stored: rows.column(name) for name, stored in made.items()}
    table = pa.table({VALUE: rows.column(step.spec.on), **columns})
    if step.types[step.spec.on].is_list:
        frame, _ = tables.join_items(frame, str(step.index), step.spec.on, table)
    else:
        frame = tables.join(frame, column(step.spec.on), str(step.index), table)
    outputs = {}
    for name, stored in made.items():
        empty = F.array().cast(spark_type(step.made[name]))
        outputs[name] = F.coalesce(F.col(stored), empty) if step.made[name].is_list else F.col(stored)
    return frame.withColumns(outputs).drop(*made.values())


def lookup_key(step: Step, name: str) -> Column:
    """The values of the input `name` by which it is looked up: id 0 is missing."""
    x = column(name)
    return F.when(x != 0, x) if step.types[name].kind == "id" else x


def _double(number: float) -> Column:
    return F.lit(None).cast("double") if np.isnan(number) else F.lit(float(number))


def _doubles(numbers: NDArray[np.float64]) -> Column:
    return F.array(*map(_double, numbers))
