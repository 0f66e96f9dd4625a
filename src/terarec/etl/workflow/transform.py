# SPDX-License-Identifier: Apache-2.0
"""The transform of rows by the steps of a workflow, and the columns of the resulting data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import (
    REJECTED_SHOWN,
    ColumnType,
    RowFaultError,
    Rows,
    flat,
    list_offsets,
    missing_values,
    null_mask,
    numbers_of,
    numpy_values,
    write_numbers,
)
from terarec.etl.ops import Operator, State
from terarec.etl.ops.base import is_among, is_between
from terarec.etl.ops.states import Statistic
from terarec.etl.ops.user_steps import run_step
from terarec.etl.ops.values import rejected
from terarec.etl.workflow.plan import NO_CARDINALITY, Pass, Plan, ids_of, producer
from terarec.formats.block import ColumnBlock, Keys
from terarec.ragged import Ragged, map_values
from terarec.spec import (
    CategoricalColumn,
    DatasetSpec,
    DenseColumn,
    LabelColumn,
    LabelSpec,
    MetadataColumn,
    WorkflowSpec,
)
from terarec.spec.dataset import MISSING_KEY, DatasetStorage, MetadataType

PROBABILITY = "a number from 0 to 1, or positives (--positive)"
"""Accepted values of a label that is a probability."""
LABEL = "a label in every row (bad_input='skip', --bad-input skip, or a step KeepRows leaves others out)"
IN_FLOAT32 = "a number that float32 holds"
NUMBER = f"{IN_FLOAT32}; FillMissing gives missing ones a value"
"""Accepted values of a column of numbers."""
WEIGHT = "a number >= 0 that float32 holds"
"""Accepted values of the column of sample weights."""

WORKFLOW_DIRECTORY = "workflow"
"""Directory in a data set, next to ``dataset.json``, of the workflow that made it."""
_TYPES: dict[str, MetadataType] = {"text": "string", "integer": "int64", "number": "float64"}
"""Kind of a column -> type of the metadata column."""


def run_steps(
    plan: Plan,
    work: Pass,
    rows: Rows,
    states: Mapping[int, State],
    *,
    grouped: Mapping[int, Mapping[str, pa.Array]] | None = None,
    statistics: Mapping[int, Statistic] | None = None,
) -> tuple[Rows, dict[int, Any]]:
    """Run the steps of a pass after the split. Several threads may call it.

    Args:
        plan: Plan of the workflow.
        work: The pass.
        rows: Rows with their splits; only training rows where there are `statistics`.
        states: States of the fitted steps among ``work.steps``.
        grouped: Grouped step -> its outputs for these rows.
        statistics: Statistics of ``work.observes``; each observes the rows right before its step.

    Returns:
        The rows after the last step, and the partial result of each statistic.
    """
    partials: dict[int, Any] = {}
    # A step that is fitted in this pass need not run in it: its statistic observes the rows all the same.
    for step in sorted({*work.steps, *work.observes}):
        if step in work.observes and statistics is not None:
            partials[step] = statistics[step].observe(rows)
        if step not in work.steps:
            continue
        if step in work.grouped:
            rows = rows.with_columns((grouped or {})[step])
        elif plan.operators[step].stage == "grouped":
            # In the pass that gathers its inputs: a later step reads its outputs beside the columns that matter.
            types = plan.types[step + 1]
            outputs = {name: missing_values(types[name], rows.num_rows) for name in plan.operators[step].writes}
            rows = rows.with_columns(outputs)
        else:
            rows = run_step(plan.operators[step], rows, state_of(plan, step, states))
    return rows, partials


def state_of(plan: Plan, step: int, states: Mapping[int, State]) -> State | None:
    """Return the state of a step; None for one that is not to be fitted."""
    if plan.operators[step].is_fitted and step not in states:
        kind = type(plan.spec.steps[step]).__name__
        raise ConfigError(f"steps[{step}] {kind}", "is not fitted yet, expected a fitted workflow")
    return states.get(step)


def metadata_name(index: int) -> str:
    """Return the name of the `index`-th metadata column among the columns that steps read and write."""
    return f"__terarec_metadata{index}"


def with_metadata(rows: Rows, metadata: Sequence[str]) -> Rows:
    """Return `rows` as read, with additional copies of the columns `metadata` under names that no step uses."""
    if not metadata:
        return rows
    return rows.with_columns({metadata_name(index): rows.columns[name] for index, name in enumerate(metadata)})


def metadata_columns(spec: WorkflowSpec, source: Mapping[str, ColumnType]) -> tuple[MetadataColumn, ...]:
    """Return the metadata columns of the data set, of the types of the columns of the `source`."""
    return tuple(MetadataColumn(name=name, type=_TYPES[source[name].kind]) for name in spec.metadata)


def data_set(plan: Plan, states: Mapping[int, State], storage: DatasetStorage) -> DatasetSpec:
    """Return the data set of a fitted workflow, without shards and without columns that a step dropped."""
    spec, types = plan.spec, plan.types[-1]
    dropped = dropped_columns(plan, states)
    rows = cardinalities(plan, states)

    def categorical(name: str, number: int | None) -> CategoricalColumn:
        # Hotness 1 is one value a row, and no list.
        hotness = max(types[name].max_length or 0, 2) if types[name].is_list else 1
        is_given = number is not None

        def origin(operator: Operator, output: str) -> str | None:
            nonlocal is_given
            is_given &= not operator.has_missing_id
            return operator.origin(output)

        step, output = producer(plan.operators, name, origin)
        vocabulary = None if step is None else _vocabulary_name(plan, states, step, output)
        num_rare = 0
        if step is not None and vocabulary is not None:
            num_rare = plan.operators[step].reserved_ids(is_id=True) - 1  # but for that of missing values
        return CategoricalColumn(
            name=name,
            rows=number,
            hotness=hotness,
            vocabulary=vocabulary,
            given=True if step is None and is_given else None,
            rare_ids=num_rare if num_rare > 1 else None,
        )

    return DatasetSpec(
        name=spec.name,
        storage=storage,
        labels=tuple(LabelColumn(name=label.name) for label in spec.labels),
        dense=tuple(DenseColumn(name=name) for name in spec.dense if name not in dropped),
        categorical=(
            *(categorical(name, rows[name]) for name in spec.categorical if name not in dropped),
            *(categorical(name, None) for name in spec.keys if name not in dropped),
        ),
        workflow=WORKFLOW_DIRECTORY,
        weight=spec.weight,
        metadata=metadata_columns(spec, plan.types[0]),
    )


def _vocabulary_name(plan: Plan, states: Mapping[int, State], step: int, output: str) -> str | None:
    vocabularies = plan.operators[step].vocabularies(state_of(plan, step, states))
    first = next((name for name, ids in vocabularies.items() if ids is vocabularies.get(output)), None)
    return None if first is None else f"steps[{step}] {first}"


def cardinalities(plan: Plan, states: Mapping[int, State], upto: int | None = None) -> dict[str, int]:
    """Return the number of ids of every id column after the last step, or before step `upto`."""
    rows: dict[str, int] = {}
    for step, operator in enumerate(plan.operators[:upto]):
        numbers = operator.cardinalities(rows, states.get(step))
        for name in ids_of(operator, plan.types[step + 1]):
            if name not in numbers:
                raise ConfigError(f"steps[{step}] {type(operator).__name__}: column {name!r}", NO_CARDINALITY)
        rows = {**rows, **numbers}
    return rows


def dropped_columns(plan: Plan, states: Mapping[int, State]) -> frozenset[str]:
    """Return the columns that the states of the steps drop."""
    return frozenset(
        name for step, operator in enumerate(plan.operators) for name in operator.dropped(states.get(step))
    )


def column_block(plan: Plan, dataset: DatasetSpec, rows: Rows) -> ColumnBlock:
    """Return rows after the last step as the shards of a data set hold them.

    Raises:
        FormatError: A missing label, number or weight, a number that float32 does not hold, or a negative weight, with
            its column and row.
    """
    weight, metadata = plan.spec.weight, range(len(plan.spec.metadata))
    labels = [label_values(label, rows) for label in plan.spec.labels]
    return ColumnBlock(
        label=np.stack(labels, axis=1),
        dense=dense_values([column.name for column in dataset.dense], rows),
        keys=tuple(_keys(rows.columns[column.name]) for column in dataset.categorical),
        weight=None if weight is None else weight_values(weight, rows),
        metadata=tuple(rows.columns[metadata_name(index)] for index in metadata),
    )


def keys_of(rows: Rows, names: Sequence[str]) -> tuple[Keys, ...]:
    """Return the categorical and key columns `names` as served records have them: int64."""
    keys = (_keys(rows.columns[name]) for name in names)
    return tuple(map_values(column, lambda values: values.astype(np.int64, copy=False)) for column in keys)


def dense_values(names: Sequence[str], rows: Rows) -> NDArray[np.float32]:
    """Return the columns `names` as float32[n, F], column after column in memory, as most storages take them."""
    # What float32 does not hold becomes infinite, and is rejected with missing numbers below.
    dense = np.empty((len(names), rows.num_rows), dtype=np.float32)
    with np.errstate(over="ignore"):
        for values, name in zip(dense, names, strict=True):
            write_numbers(rows.columns[name], values)
    right = np.isfinite(dense)
    if not right.all():
        first = int(np.argmin(right.all(axis=1)))
        raise rejected(rows, names[first], ~right[first], NUMBER)
    return dense.T


def label_values(label: LabelSpec, rows: Rows) -> NDArray[np.float32]:
    """Return the values of a label, float32[n].

    Raises:
        FormatError: A missing one, a number that float32 does not hold, or one that is not a probability and has to be.
    """
    array = rows.columns[label.source]
    missing = null_mask(array)
    if missing is not None:
        ids = rows.ids[missing]
        got = ["got a missing value"] * min(len(ids), REJECTED_SHOWN)
        raise RowFaultError(label.source, ids, got, LABEL, kind="label")
    if label.positives:
        return is_among(array, label.positives).astype(np.float32)
    if label.at_least is not None:
        return is_between(array, label.at_least, None).astype(np.float32)
    with np.errstate(over="ignore"):
        # Numbers beyond float32 become infinite, and are rejected below.
        numbers = numbers_of(array).astype(np.float32)
    if np.isinf(numbers).any():
        raise rejected(rows, label.source, np.isinf(numbers), IN_FLOAT32)
    if label.is_probability and (outside := (numbers < 0) | (numbers > 1)).any():
        raise rejected(rows, label.source, outside, PROBABILITY)
    return numbers


def weight_values(name: str, rows: Rows) -> NDArray[np.float32]:
    """Return the sample weights of the column `name`, float32[n]."""
    with np.errstate(over="ignore"):
        weights = numbers_of(rows.columns[name]).astype(np.float32)
    right = (weights >= 0) & (weights < np.inf)
    if not right.all():
        raise rejected(rows, name, ~right, WEIGHT)
    return weights


def _keys(array: pa.Array) -> Keys:
    """Return ids, or integers as keys."""
    items, offsets = flat(array), list_offsets(array)
    values, missing = numpy_values(items), null_mask(items)
    if missing is not None:
        # Only keys have nulls: ids use 0 for a missing value.
        values = np.where(missing, MISSING_KEY, values)
    return values if offsets is None else Ragged(values, offsets)


def validate_rows(plan: Plan, states: Mapping[int, State], rows: Rows) -> None:
    """Check rows after the row steps as far as `plan.validation` can; `states` has those of steps on side tables."""
    if not rows.num_rows:
        return
    for step in plan.validation.steps:
        rows = run_step(plan.operators[step], rows, state_of(plan, step, states))
    for label in plan.validation.labels:
        label_values(label, rows)
    dense_values(plan.validation.dense, rows)
    if plan.validation.weight is not None:
        weight_values(plan.validation.weight, rows)
