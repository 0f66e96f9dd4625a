"""The short way of most columns of a served record: numbers as one matrix, categories by one lookup each.

One record of Criteo, 13 numbers with FillMissing, Clip and LogOp and 26 categories, goes this way with no `Column`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from terarec.etl.columns import ColumnType
from terarec.etl.operators import NumberStepCode, State
from terarec.etl.workflow.plan import Plan
from terarec.etl.workflow.serving import ServingPlan
from terarec.kernels.cpu.encoding import numbers_of_list
from terarec.kernels.encoding_types import RefusedValueError
from terarec.spec import Rename

_INTEGERS = frozenset({int, type(None)})
_INTEGER_BOUND = 2.0**63


@dataclass(frozen=True, slots=True)
class NumberGroup:
    """Columns of numbers that go through the same formulas.

    Attributes:
        places: of the columns in the result.
        at: the same as an index, a slice where they are one after another, which NumPy takes faster.
        names: of the raw columns.
        is_integer: whether these hold integers. As float64 they give what they give as int64: each formula on integers
            keeps the order of two numbers, and its bounds are numbers of float64.
        formulas: each with its figures, float64[c, 1].
    """

    places: Sequence[int]
    at: slice | list[int]
    names: tuple[str, ...]
    is_integer: bool
    formulas: tuple[tuple[NumberStepCode[Any], tuple[NDArray[np.float64], ...]], ...]

    def numbers(self, columns: Mapping[str, list[Any]], num_records: int) -> NDArray[np.float64]:
        """float64[c, n]; raises `RefusedValueError` for a value that is no such number."""
        values = list(chain.from_iterable([columns[name] for name in self.names]))
        if self.is_integer and not _INTEGERS.issuperset(map(type, values)):
            raise RefusedValueError(0)
        numbers = numbers_of_list(values).reshape(len(self.names), num_records)
        if self.is_integer and np.count_nonzero(np.abs(numbers) >= _INTEGER_BOUND):
            raise RefusedValueError(0)
        for code, figures in self.formulas:
            numbers = code.formula(numbers, *figures)
        return numbers


class Lookup(NamedTuple):
    """A category: its place in the result, the raw column `name` and what makes ids of its values."""

    place: int
    name: str
    find: Callable[[list[Any]], NDArray[np.int64]]


def number_groups(
    plan: Plan, serving: ServingPlan, states: Mapping[int, State], results: Sequence[str]
) -> list[NumberGroup]:
    """Those of `results` that are one raw number each, gone through formulas alone."""
    places: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    traced: dict[int, tuple[str, list[str]]] = {}
    for place, result in enumerate(results):
        trace = _number_trace(plan, serving, result)
        if trace is not None:
            steps, names = trace
            is_integer = serving.inputs[names[-1]].kind == "integer"
            places.setdefault((is_integer, steps), []).append(place)
            traced[place] = names[-1], names[:-1]
    return [
        NumberGroup(
            members,
            _index(members),
            tuple(traced[place][0] for place in members),
            is_integer,
            tuple(
                _formula(plan, states, step, [traced[place][1][position] for place in members])
                for position, step in reversed(list(enumerate(steps)))
            ),
        )
        for (is_integer, steps), members in places.items()
    ]


def lookups(plan: Plan, serving: ServingPlan, states: Mapping[int, State], results: Sequence[str]) -> list[Lookup]:
    """Lookups of those of `results` that are ids of one raw value each."""
    found: list[Lookup] = []
    for place, result in enumerate(results):
        step, name = _last_step(plan, serving, result, len(plan.codes))
        if step is None:
            continue
        earlier, raw = _last_step(plan, serving, name, step)
        if earlier is not None or raw not in serving.inputs or serving.inputs[raw].is_list:
            continue
        find = plan.codes[step].list_lookup(name, states.get(step))
        if find is not None and not _is_written_time(plan, raw):
            found.append(Lookup(place, raw, find))
    return found


def _number_trace(plan: Plan, serving: ServingPlan, result: str) -> tuple[tuple[int, ...], list[str]] | None:
    """The steps that make `result`, the last one first, with their inputs, and behind these the raw column."""
    steps: list[int] = []
    names: list[str] = []
    step: int | None = len(plan.codes)
    name = result
    while True:
        assert step is not None
        step, name = _last_step(plan, serving, name, step)
        names.append(name)
        if step is None:
            is_number = serving.inputs.get(name) in (ColumnType("number"), ColumnType("integer"))
            return (tuple(steps), names) if is_number and not _is_written_time(plan, name) else None
        if not isinstance(plan.codes[step], NumberStepCode):
            return None
        steps.append(step)


def _last_step(plan: Plan, serving: ServingPlan, name: str, before: int) -> tuple[int | None, str]:
    """The last step before `before` that makes the column `name` and the input that it makes it of.

    None and the raw column where no step makes it; `Rename` is seen through. Where a step makes it of several columns,
    or in another way than one by one, the input is "".
    """
    for step in reversed(serving.steps):
        spec = plan.spec.steps[step]
        if step >= before or name not in spec.writes:
            continue
        if isinstance(spec, Rename):
            name = next(old for old, new in spec.names.items() if new == name)
            continue
        outputs = getattr(spec, "outputs", ()) or getattr(spec, "columns", ())
        inputs = getattr(spec, "columns", ())
        is_mapped = len(outputs) == len(inputs) and name in outputs
        return step, inputs[outputs.index(name)] if is_mapped else ""
    return None, name


def _is_written_time(plan: Plan, name: str) -> bool:
    column = plan.spec.source.column(name)
    return column is not None and column.format is not None


def _index(places: list[int]) -> slice | list[int]:
    first, stop = places[0], places[-1] + 1
    return slice(first, stop) if places == list(range(first, stop)) else places


def _formula(
    plan: Plan, states: Mapping[int, State], step: int, names: Sequence[str]
) -> tuple[NumberStepCode[Any], tuple[NDArray[np.float64], ...]]:
    code = plan.codes[step]
    assert isinstance(code, NumberStepCode)
    figures = zip(*(code.figures(name, states.get(step)) for name in names), strict=True)
    return code, tuple(np.array(figure, dtype=np.float64)[:, None] for figure in figures)
