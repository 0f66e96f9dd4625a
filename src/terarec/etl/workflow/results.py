"""Labels, dense, categorical and key columns: what a workflow gives."""

from __future__ import annotations

from terarec.errors import ConfigError
from terarec.etl.ops import ColumnTypes, Operator
from terarec.etl.ops.base import operators
from terarec.etl.ops.values import value_of
from terarec.spec import WorkflowSpec


def results_read(spec: WorkflowSpec) -> tuple[str, ...]:
    """The distinct columns that labels, dense, categorical and key columns and weights are made from."""
    labels = (label.source for label in spec.labels)
    weight = () if spec.weight is None else (spec.weight,)
    return tuple(dict.fromkeys((*labels, *spec.dense, *spec.categorical, *spec.keys, *weight)))


def check_results(spec: WorkflowSpec, types: ColumnTypes) -> None:
    """Raise unless the columns after the last step are what the workflow says.

    Raises:
        ConfigError: a column that is not there, or of another type.
    """
    for label in spec.labels:
        numbers = ("number", "integer")
        accepted = ("text", "integer", "hex32") if label.positives else numbers
        _check(types, f"label {label.name!r}", label.source, accepted)
        for value in label.positives:
            value_of(types[label.source].kind, value)
    for name in spec.dense:
        _check(types, "dense", name, ("number", "integer"))
    for name in spec.categorical:
        _check(types, "categorical", name, ("id",), lists=True)
    for name in spec.keys:
        _check(types, "keys", name, ("integer",), lists=True)
    if spec.weight is not None:
        _check(types, "weight", spec.weight, ("number", "integer"))
    _check_dropped(spec)


def check_times(spec: WorkflowSpec) -> None:
    """Raise if a dense column is a time as the source has it.

    float32 holds seconds since 1970 to 128 s only, so a step has to rescale them first, which works on float64.

    Raises:
        ConfigError: names the column.
    """
    times = {column.name for column in spec.source.columns if column.type == "time"}
    for step in operators(spec.steps):
        kept = {name for name in step.writes if _time_of(step, name) in times}
        times = (times - {*step.writes, *step.renames}) | kept
    for name in spec.dense:
        if name in times:
            raise ConfigError(
                f"dense: column {name!r} is a time in seconds since 1970, which float32 rounds to 128 s; expected a "
                "step that rescales it before, such as Normalize, NormalizeMinMax, DifferenceLag or Bucketize"
            )


def _time_of(step: Operator, name: str) -> str | None:
    """Return the input whose times the output `name` still holds."""
    return step.input_of(name) if step.keeps_integers else step.origin(name)


def _check_dropped(spec: WorkflowSpec) -> None:
    results = {*spec.dense, *spec.categorical, *spec.keys}
    for position, step in enumerate(operators(spec.steps)):
        written = {name for later in spec.steps[position + 1 :] for name in later.writes}
        for name in step.may_drop:
            if name not in results or name in written:
                raise ConfigError(
                    f"steps[{position}] {type(step).__name__}: column {name!r} is not among dense, categorical and "
                    "keys, or a later step makes it; expected columns that are results as they stand there"
                )


def _check(types: ColumnTypes, what: str, name: str, accepted: tuple[str, ...], *, lists: bool = False) -> None:
    found = types.get(name)
    if found is None:
        there = ", ".join(map(repr, types))
        raise ConfigError(f"{what}: column {name!r} does not exist after the last step; there are {there}")
    if found.kind not in accepted or (found.is_list and not lists):
        expected = " or ".join(accepted) + ("" if lists else ", one a row")
        raise ConfigError(f"{what}: column {name!r} holds {found}, expected {expected}")
    if found.is_list and found.max_length is None:
        raise ConfigError(f"{what}: column {name!r} holds lists of any length, expected ListSlice or Pad before")
