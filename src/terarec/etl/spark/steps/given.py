"""Ids and keys that the source holds already."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl.operators.given_ids import accepted_id, accepted_list
from terarec.etl.spark.expressions import ROW, column, each, refuse
from terarec.etl.spark.steps.step import Step


def given_ids(step: Step) -> Mapping[str, Column]:
    """The same numbers, checked."""
    made: dict[str, Column] = {}
    most = step.spec.max_length
    for output, name, rows in zip(step.spec.writes, step.spec.columns, step.spec.rows, strict=True):
        values = column(name)
        if step.types[name].is_list and most is not None:
            told = _told(
                name, F.lit("a list of "), F.size(values).cast("string"), F.lit(f", expected {accepted_list(most)}")
            )
            values = refuse(F.size(values) > most, told, values)
        made[output] = values if rows is None else each(step.types[name], values, _checker(name, rows))
    return made


def _checker(name: str, rows: int) -> Callable[[Column], Column]:
    def checked(x: Column) -> Column:
        shown = F.coalesce(x.cast("string"), F.lit("None"))
        told = _told(name, shown, F.lit(f", expected {accepted_id(rows)}"))
        return refuse(x.isNull() | (x < 0) | (x >= rows), told, x)

    return checked


def _told(name: str, *problem: Column) -> Column:
    return F.concat(F.lit(f"column {name!r}, row "), F.col(ROW).cast("string"), F.lit(": got "), *problem)
