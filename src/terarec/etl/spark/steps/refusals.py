"""Values that a step or the data set refuses, as conditions on a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl import ops
from terarec.etl.columns import Kind
from terarec.etl.ops.categorical import accepted_id
from terarec.etl.ops.columns import accepted_part
from terarec.etl.ops.lists import MAX_ITEMS, accepted_length
from terarec.etl.ops.numeric import accepted_number
from terarec.etl.ops.values import accepted_list
from terarec.etl.spark.expressions import ROW, column, refuse
from terarec.etl.spark.steps.columns import text_part, typed_part
from terarec.etl.spark.steps.step import Step
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.transform import IN_FLOAT32, LABEL, NUMBER, PROBABILITY, WEIGHT
from terarec.spec import LabelSpec
from terarec.spec.quoting import quoted


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is refused of a column.

    Attributes:
        column: its name.
        is_refused: of a row; never null.
        got: the first such value as text, null where it is missing.
        expected: what is accepted.
        shown: `got` -> how a message has it.
        kind: of the fault.
    """

    column: str
    is_refused: Column
    got: Column
    expected: str
    shown: Callable[[str | None], str]
    kind: str = "refused"


def first_refusal(refusals: Sequence[Refusal], number: int = 0) -> Column:
    """The number of the first refusal of a row, counted from `number`, and what it got; null where there is none."""
    each = [
        F.when(refusal.is_refused, F.struct(F.lit(number + place).alias("number"), refusal.got.alias("got")))
        for place, refusal in enumerate(refusals)
    ]
    return F.coalesce(*each, F.lit(None).cast("struct<number: int, got: string>"))


def refuse_rows(refusals: Sequence[Refusal], values: Column) -> Column:
    """`values`, and an error in rows of which something is refused."""
    for refusal in reversed(refusals):
        told = F.concat(
            F.lit(f"column {refusal.column!r}, row "), F.col(ROW).cast("string"), F.lit(": got "),
            F.coalesce(refusal.got, F.lit("a missing value")), F.lit(f", expected {refusal.expected}"),
        )  # fmt: skip
        values = refuse(refusal.is_refused, told, values)
    return values


def step_refusals(step: Step) -> list[Refusal]:
    """What a step refuses, of the columns before it."""
    found = _REFUSALS.get(type(step.spec))
    return [] if found is None else found(step)


def label_refusals(label: LabelSpec, plan: Plan) -> list[Refusal]:
    """What is refused of a label, of the columns after the last step."""
    x, shown = column(label.source), _shower(plan.types[-1][label.source].kind)
    missing = Refusal(
        label.source, x.isNull(), F.lit(None).cast("string"), LABEL, lambda got: "a missing value", "label"
    )
    if label.positives or label.at_least is not None:
        return [missing]
    number = x.cast("float")
    refusals = [missing, _refusal(label.source, F.abs(number) == float("inf"), IN_FLOAT32, shown)]
    if label.is_probability:
        refusals.append(_refusal(label.source, (number < 0) | (number > 1), PROBABILITY, shown))
    return refusals


def dense_refusal(name: str, kind: Kind) -> Refusal:
    """What is refused of a column of numbers of the data set."""
    number = column(name).cast("float")
    return _refusal(name, number.isNull() | (F.abs(number) == float("inf")), NUMBER, _shower(kind))


def weight_refusal(name: str, kind: Kind) -> Refusal:
    """What is refused of the column of sample weights."""
    number = column(name).cast("float")
    return _refusal(name, number.isNull() | (number < 0) | (number == float("inf")), WEIGHT, _shower(kind))


def _log_op(step: Step) -> list[Refusal]:
    shift = step.spec.shift
    if shift is None:
        return []
    is_low, accepted = lambda x: x.cast("double") <= -shift, accepted_number(shift)
    return [_of_values(step, name, is_low, accepted) for name in step.spec.columns]


def _given_ids(step: Step) -> list[Refusal]:
    refusals = []
    most = step.spec.max_length
    for name, rows in zip(step.spec.columns, step.spec.rows, strict=True):
        if step.types[name].is_list and most is not None:
            refusals.append(_of_length(name, F.size(column(name)) > most, accepted_list(most)))
        if rows is not None:
            refusals.append(_of_values(step, name, _outside(rows), accepted_id(rows)))
    return refusals


def _outside(rows: int) -> Callable[[Column], Column]:
    return lambda x: x.isNull() | (x < 0) | (x >= rows)


def _split_text(step: Step) -> list[Refusal]:
    (name,) = step.spec.columns
    refusals = []
    for place, kind in enumerate(step.spec.types):
        if kind != "text":
            part = text_part(step, place)
            is_bad = part.isNotNull() & typed_part(part, kind).isNull()
            refusals.append(_refusal(name, is_bad, accepted_part(step.spec, place), _shower("text")))
    return refusals


def _explode(step: Step) -> list[Refusal]:
    first, *others = step.spec.columns
    size = F.size(column(first))
    refusals = [_of_length(name, F.size(column(name)) != size, accepted_length(first)) for name in others]
    return [*refusals, _of_length(first, size > MAX_ITEMS, accepted_list(MAX_ITEMS))]


_REFUSALS: dict[type[Any], Callable[[Step], list[Refusal]]] = {
    ops.Explode: _explode,
    ops.GivenIds: _given_ids,
    ops.LogOp: _log_op,
    ops.SplitText: _split_text,
}


def _of_values(step: Step, name: str, is_bad: Callable[[Column], Column], expected: str) -> Refusal:
    """A refusal of values, or of the first such item of a list."""
    x, shown = column(name), _shower(step.types[name].kind)
    if not step.types[name].is_list:
        return _refusal(name, is_bad(x), expected, shown)
    return Refusal(
        name, _surely(F.exists(x, is_bad)), F.get(F.filter(x, is_bad), F.lit(0)).cast("string"), expected, shown
    )


def _of_length(name: str, is_bad: Column, expected: str) -> Refusal:
    size = F.size(column(name)).cast("string")
    return Refusal(name, _surely(is_bad), size, expected, lambda got: f"a list of {got}")


def _refusal(name: str, is_bad: Column, expected: str, shown: Callable[[str | None], str]) -> Refusal:
    return Refusal(name, _surely(is_bad), column(name).cast("string"), expected, shown)


def _surely(condition: Column) -> Column:
    return F.coalesce(condition, F.lit(False))


def _shower(kind: Kind) -> Callable[[str | None], str]:
    """How a message has a value of `kind`, as the local engine does."""

    def shown(got: str | None) -> str:
        if kind == "number":
            return "nan" if got is None else repr(float(got))
        return quoted(got) if kind == "text" else str(got)

    return shown
