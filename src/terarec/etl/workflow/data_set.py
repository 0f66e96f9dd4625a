"""The columns after a workflow's last step -> a data set's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.etl.columns import REFUSED_SHOWN, Block, Column, RowFaultError, to_arrow
from terarec.etl.ops import State
from terarec.etl.ops.values import rejected, value_of
from terarec.etl.workflow.metadata import metadata_columns, metadata_name
from terarec.etl.workflow.plan import Plan
from terarec.formats import ColumnBlock, Keys
from terarec.spec import MISSING_KEY, CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, LabelSpec

PROBABILITY = "a number from 0 to 1, or positives (--positive)"
"""What a label accepts that has to be a probability."""
LABEL = "a label in every row (--bad-input skip, or a step KeepRows, leaves others out)"
IN_FLOAT32 = "a number that float32 holds"
NUMBER = f"{IN_FLOAT32}; FillMissing gives missing ones a value"
"""What a column of numbers accepts."""
WEIGHT = "a number >= 0 that float32 holds"
"""What the column of sample weights accepts."""

WORKFLOW_DIRECTORY = "workflow"
"""Where a data set has the workflow that made it, beside ``dataset.json``."""


def data_set(plan: Plan, states: Mapping[int, State], storage: Literal["parquet", "raw"]) -> DatasetSpec:
    """The data set of a fitted workflow, without shards; columns that `DropLowCardinality` dropped are left out."""
    spec, types = plan.spec, plan.types[-1]
    dropped = dropped_columns(plan, states)
    rows = cardinalities(plan, states)

    def categorical(name: str, number: int | None) -> CategoricalColumn:
        # Hotness 1 is one value a row, and no list.
        hotness = max(types[name].max_length or 0, 2) if types[name].is_list else 1
        return CategoricalColumn(name=name, rows=number, hotness=hotness)

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


def cardinalities(plan: Plan, states: Mapping[int, State]) -> dict[str, int]:
    """Number of ids of every id column after the last step."""
    rows: dict[str, int] = {}
    for step, code in enumerate(plan.codes):
        rows = {**rows, **code.cardinalities(rows, states.get(step))}
    return rows


def dropped_columns(plan: Plan, states: Mapping[int, State]) -> frozenset[str]:
    """Return the columns that the states of the steps drop."""
    return frozenset(name for step, code in enumerate(plan.codes) for name in code.dropped(states.get(step)))


def column_block(plan: Plan, dataset: DatasetSpec, block: Block) -> ColumnBlock:
    """The rows of a block after the last step as a data set's shards hold them.

    Raises:
        FormatError: a missing label, number or weight, a number that float32 does not hold, or a negative weight, with
            its column and row.
    """
    weight, metadata = plan.spec.weight, range(len(plan.spec.metadata))
    labels = [label_values(label, block) for label in plan.spec.labels]
    return ColumnBlock(
        label=np.stack(labels, axis=1),
        dense=dense_values([column.name for column in dataset.dense], block),
        keys=tuple(_keys(plan, block, column.name) for column in dataset.categorical),
        weight=None if weight is None else weight_values(weight, block),
        metadata=tuple(to_arrow(block.columns[metadata_name(index)]) for index in metadata),
    )


def keys_of(plan: Plan, block: Block, names: Sequence[str]) -> tuple[Keys, ...]:
    """The categorical and key columns `names` as records that are served have them: int64."""
    keys = (_keys(plan, block, name) for name in names)
    return tuple(
        (_as_int64(column[0]), column[1]) if isinstance(column, tuple) else _as_int64(column) for column in keys
    )


def dense_values(names: Sequence[str], block: Block) -> NDArray[np.float32]:
    """The columns `names` as float32[n, F], column after column in memory, as they come and most storages take them.

    Raises:
        FormatError: a missing number, or one that float32 does not hold.
    """
    dense = np.empty((len(names), block.num_rows), dtype=np.float32)
    with np.errstate(over="ignore"):
        for values, name in zip(dense, names, strict=True):
            values[:] = block.columns[name].numbers()
    right = np.isfinite(dense)
    if not right.all():
        first = int(np.argmin(right.all(axis=1)))
        raise rejected(block, names[first], ~right[first], NUMBER)
    return dense.T


def label_values(label: LabelSpec, block: Block) -> NDArray[np.float32]:
    """float32[n].

    Raises:
        FormatError: a missing one, a number that float32 does not hold, or one that is no probability and has to be.
    """
    column = block.columns[label.source]
    missing = column.is_missing()
    if missing.any():
        rows = block.rows[missing]
        got = ["got a missing value"] * min(len(rows), REFUSED_SHOWN)
        raise RowFaultError(label.source, rows, got, LABEL, kind="label")
    if label.positives:
        return _is_among(column, label.positives).astype(np.float32)
    if label.at_least is not None:
        return (column.numbers() >= label.at_least).astype(np.float32)
    with np.errstate(over="ignore"):
        numbers = column.numbers().astype(np.float32)
    if np.isinf(numbers).any():
        raise rejected(block, label.source, np.isinf(numbers), IN_FLOAT32)
    if label.is_probability and (outside := (numbers < 0) | (numbers > 1)).any():
        raise rejected(block, label.source, outside, PROBABILITY)
    return numbers


def weight_values(name: str, block: Block) -> NDArray[np.float32]:
    """float32[n], the sample weights of the column `name`.

    Raises:
        FormatError: one that is missing, negative, or beyond what float32 holds.
    """
    with np.errstate(over="ignore"):
        weights = block.columns[name].numbers().astype(np.float32)
    right = (weights >= 0) & (weights < np.inf)
    if not right.all():
        raise rejected(block, name, ~right, WEIGHT)
    return weights


def _is_among(column: Column, values: tuple[str, ...]) -> NDArray[np.bool_]:
    if column.type == "text":
        wanted = pa.array(values, type=pa.large_string())
        return np.asarray(pc.is_in(column.values, value_set=wanted).to_numpy(zero_copy_only=False))
    return np.isin(column.values, [value_of(column.type, value) for value in values])


def _keys(plan: Plan, block: Block, name: str) -> Keys:
    column = block.columns[name]
    values = column.values
    if name in plan.spec.keys and column.missing is not None:
        values = np.where(column.missing, MISSING_KEY, values)
    return values if column.offsets is None else (values, column.offsets)


def _as_int64(keys: NDArray[Any]) -> NDArray[np.int64]:
    return keys.astype(np.int64, copy=False)
