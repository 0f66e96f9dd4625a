"""Steps on lists."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl.ops.values import value_of
from terarec.etl.spark.expressions import column, literal
from terarec.etl.spark.steps.step import Step


def list_slice(step: Step) -> Mapping[str, Column]:
    """items[start:stop]."""

    def sliced(items: Column) -> Column:
        size = F.size(items)
        first = _position(step.spec.start, size)
        last = size if step.spec.stop is None else _position(step.spec.stop, size)
        return F.slice(items, first + 1, F.greatest(last - first, F.lit(0)))

    return _whole(step, sliced)


def pad(step: Step) -> Mapping[str, Column]:
    """Cut, or filled up at the end."""
    made = {}
    length = step.spec.length
    for name, output in step.spec.pairs:
        kind = step.types[name].kind
        padding = F.array_repeat(literal(kind, value_of(kind, step.spec.value)), length)
        made[output] = F.slice(F.concat(column(name), padding), 1, length)
    return made


def _whole(step: Step, function: object) -> Mapping[str, Column]:
    assert callable(function)
    return {output: function(column(name)) for name, output in step.spec.pairs}


def _position(position: int, size: Column) -> Column:
    """Where `position` is in lists of these sizes, as Python has it."""
    if position < 0:
        return F.greatest(size + position, F.lit(0))
    return F.least(size, F.lit(position))
