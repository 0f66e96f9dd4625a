"""Labels, dense, categorical and key columns: what a workflow gives."""

from __future__ import annotations

from terarec.errors import ConfigError
from terarec.etl.operators import ColumnTypes
from terarec.etl.operators.values import value_of
from terarec.spec import Clip, DropLowCardinality, FillMissing, Rename, WorkflowSpec


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
    for step in spec.steps:
        made: dict[str, str] = {}
        if isinstance(step, FillMissing | Clip):
            made = dict(zip(step.outputs or step.columns, step.columns, strict=True))
        elif isinstance(step, Rename):
            made = {new: old for old, new in step.names.items()}
        kept = {new for new, old in made.items() if old in times}
        gone = set(step.names) if isinstance(step, Rename) else set(step.writes)
        times = (times - gone) | kept
    for name in spec.dense:
        if name in times:
            raise ConfigError(
                f"dense: column {name!r} is a time in seconds since 1970, which float32 rounds to 128 s; expected a "
                "step that rescales it before, such as Normalize, NormalizeMinMax, DifferenceLag or Bucketize"
            )


def _check_dropped(spec: WorkflowSpec) -> None:
    results = {*spec.dense, *spec.categorical, *spec.keys}
    for position, step in enumerate(spec.steps):
        if isinstance(step, DropLowCardinality):
            written = {name for later in spec.steps[position + 1 :] for name in later.writes}
            for name in step.columns:
                if name not in results or name in written:
                    raise ConfigError(
                        f"steps[{position}] DropLowCardinality: column {name!r} is not among dense, categorical and "
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
