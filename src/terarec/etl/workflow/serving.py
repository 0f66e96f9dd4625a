"""Which steps a served record goes through, and which raw columns it brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from terarec.errors import ConfigError
from terarec.etl.columns import ColumnType
from terarec.etl.ops import ColumnTypes
from terarec.etl.workflow.plan import Plan, side_types


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What a record goes through.

    Attributes:
        steps: in order.
        inputs: raw column -> type, what they start from.
        types: step -> the columns before it.
    """

    steps: tuple[int, ...]
    inputs: Mapping[str, ColumnType]
    types: Mapping[int, ColumnTypes]


def serving_plan(plan: Plan, results: Sequence[str]) -> ServingPlan:
    """What leads to the columns `results`.

    Steps that choose rows are left out, as every record is kept and is one item of an exploded list already. What a
    grouped step makes of other rows the record brings along.

    Raises:
        ConfigError: a record would need two columns of one name.
    """
    needed, brought = set(results), dict[str, ColumnType]()
    steps: list[int] = []
    for step in reversed(range(len(plan.codes))):
        code = plan.codes[step]
        made = needed & set(code.writes)
        if code.stage == "rows" or not made:
            continue
        needed -= made
        if code.stage == "grouped":
            brought.update((name, plan.types[step + 1][name]) for name in made)
        else:
            steps.append(step)
            needed |= set(code.serving_reads)
    if needed & brought.keys():
        name = min(needed & brought.keys())
        raise ConfigError(
            f"column {name!r}: a record would need it as it is in the source and as a grouped step makes it; expected "
            "other names in the step's outputs"
        )
    exploded = {name for code in plan.codes if code.explodes for name in code.writes}
    raw = {name: plan.types[0][name] for name in plan.types[0] if name in needed}
    exact = _exact(plan, steps, results)
    raw |= {name: _as_number(found) for name, found in raw.items() if name not in exact}
    items = {name: ColumnType(found.kind) if name in exploded else found for name, found in raw.items()}
    bounded = {name: _bounded(plan, reversed(steps), name, found) for name, found in items.items()}
    in_order, inputs = tuple(reversed(steps)), {**bounded, **brought}
    return ServingPlan(in_order, inputs, _types(plan, in_order, inputs))


def _bounded(plan: Plan, steps: Iterable[int], name: str, found: ColumnType) -> ColumnType:
    """`found` with the length that the first step to replace the raw column `name` demands of its lists, if it does."""
    first = next((plan.codes[step] for step in steps if name in plan.codes[step].writes), None)
    if not found.is_list or first is None or first.max_list_length is None or name not in first.reads:
        return found
    return ColumnType(found.kind, True, first.max_list_length)


def _exact(plan: Plan, steps: Sequence[int], results: Sequence[str]) -> set[str]:
    """Source columns whose integers must come as such, for their ids, or for what they stand for."""
    exact = {name for name in results if name not in plan.spec.dense}
    for step in sorted(steps, reverse=True):
        code, made = plan.codes[step], exact & set(plan.codes[step].writes)
        exact -= made
        hands_on = any(plan.types[step + 1][name].kind == "integer" for name in made)
        if hands_on or not code.is_numeric:
            exact |= set(code.serving_reads)
    return exact | {column.name for column in plan.spec.source.columns if column.type == "time"}


def _as_number(found: ColumnType) -> ColumnType:
    """An integer of which only the number matters may come as any number, as tables with missing values hold it."""
    return dataclasses.replace(found, kind="number") if found.kind == "integer" else found


def _types(plan: Plan, steps: Sequence[int], inputs: Mapping[str, ColumnType]) -> dict[int, ColumnTypes]:
    types: dict[int, ColumnTypes] = {}
    found = dict(inputs)
    for step in steps:
        known = {**plan.types[step], **found}  # targets, which only training knows, have the types that they had there
        try:
            types[step] = {**known, **side_types(plan.spec, plan.codes[step], known)}
            found.update(plan.codes[step].output_types(types[step]))
        except ConfigError as error:
            kind = type(plan.spec.steps[step]).__name__
            raise ConfigError(f"steps[{step}] {kind}: cannot be done to a served record: {error}") from None
    return types
