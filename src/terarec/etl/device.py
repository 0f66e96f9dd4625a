"""The transform of a fitted workflow on a device: raw rows in Arrow batches, such as Parquet gives, to batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
import torch
from torch import Tensor

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import ColumnType
from terarec.etl.ops import Operator
from terarec.etl.ops.base import value_of
from terarec.etl.tensors import DeviceColumn, TensorBlock, TensorDevice
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.plan import columns_needed, results_read
from terarec.etl.workflow.transform import IN_FLOAT32, LABEL, NUMBER, PROBABILITY, WEIGHT, state_of
from terarec.ragged import Ragged, flat_values
from terarec.spec import MISSING_KEY, DatasetSpec, LabelSpec


class DeviceTransform:
    """Transforms raw rows as `Workflow` does, on a device, into batches to train or to predict on.

    Results equal those on the CPU bit for bit, but for logarithms: those of float64 may differ in the last place. No
    operator works on text there.

    Args:
        workflow: A fitted workflow whose steps have `Operator.runs_on_tensors`.
        device: Device of the batches.
        implementation: Implementation of the hash indexes of vocabularies; see `terarec.kernels.registry`.

    Attributes:
        columns: Raw columns that it reads -> type.

    Raises:
        ConfigError: The workflow is not fitted, or has a step or a column of text that does not run on tensors; names
            it.
        KernelError: `implementation` does not run on the device.
    """

    def __init__(self, workflow: Workflow, device: torch.device | str, *, implementation: str = "auto") -> None:
        self._workflow = workflow
        self._dataset: DatasetSpec = workflow.dataset_spec()
        self._device = TensorDevice(device, implementation)
        operators = workflow.plan.operators
        self._steps: list[int] = []
        needed = columns_needed(operators, results_read(workflow.spec), self._reads)
        # The walk was backwards.
        self._steps.sort()
        for step in self._steps:
            if not operators[step].runs_on_tensors:
                raise ConfigError(
                    f"steps[{step}] {type(operators[step]).__name__}",
                    f"does not run on a device, expected only {', '.join(_operators_on_tensors())}",
                )
        source = workflow.plan.types[0]
        self.columns: Mapping[str, ColumnType] = {name: source[name] for name in source if name in needed}
        for name, found in self.columns.items():
            if found.kind == "text":
                raise ConfigError(f"column {name!r}", f"holds {found}, expected integer, number or hex32 on a device")
        self._functions = [
            operators[step].tensor_function(state_of(workflow.plan, step, workflow.states), self._device)
            for step in self._steps
        ]

    def _reads(self, step: int, made: set[str]) -> Iterable[str]:
        operator = self._workflow.plan.operators[step]
        if not made and operator.stage != "rows":
            return ()
        self._steps.append(step)
        return operator.reads

    def __call__(self, rows: pa.RecordBatch) -> Batch:
        """Transform B raw rows.

        Args:
            rows: Batch with `columns`, of the types of the workflow's source, and with its metadata columns; null is
                missing. `terarec.etl.columns.Rows.batch` is one for any source.

        Returns:
            A batch whose tensors are on the device.

        Raises:
            FormatError: A column is absent or of another type, or a value is rejected, with its column and row.
        """
        return self.transform(self.load(rows), {name: rows.column(name) for name in self._workflow.spec.metadata})

    def load(self, rows: pa.RecordBatch) -> TensorBlock:
        """Return the columns of B raw rows on the device; arguments and errors as for a call."""
        return TensorBlock({name: self._column(rows, name) for name in self.columns}, rows.num_rows)

    def transform(self, block: TensorBlock, metadata: Mapping[str, pa.Array] | None = None) -> Batch:
        """Transform B raw rows that are on the device; it waits for the device once.

        Args:
            block: Columns that `load` returned.
            metadata: Metadata columns of the batch.

        Raises:
            FormatError: A value is rejected, with its column and row.
        """
        block = TensorBlock(block.columns, block.num_rows)  # with checks of its own
        for function in self._functions:
            block = block.with_columns(function(block))
        spec, names = self._workflow.spec, [column.name for column in self._dataset.dense]
        label = torch.stack([_label(found, block, self._device.device) for found in spec.labels], dim=1)
        dense = [_float32(name, block, NUMBER) for name in names]
        batch = Batch(
            dense=torch.stack(dense, dim=1) if dense else label.new_empty((block.num_rows, 0)),
            label=label,
            sparse=self._sparse(block),
            weight=None if spec.weight is None else _weight(spec.weight, block),
            metadata=metadata or {},
        )
        # Last: nothing before it waits for the device.
        block.raise_rejected()
        return batch

    def _column(self, rows: pa.RecordBatch, name: str) -> DeviceColumn:
        if name not in rows.schema.names:
            raise FormatError(f"column {name!r}", f"not in the batch, expected {', '.join(self.columns)}")
        expected, array = self.columns[name], rows.column(name)
        try:
            column = self._device.column(array, expected.kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise FormatError(f"column {name!r}", f"got {array.type}, expected values of {expected.kind}") from None
        if isinstance(column, Ragged) is not expected.is_list:
            raise FormatError(f"column {name!r}", f"got {array.type}, expected {expected}")
        return column

    def _sparse(self, block: TensorBlock) -> Jagged:
        """Return the keys of all features, feature after feature."""
        names = [column.name for column in self._dataset.categorical]
        columns = [block.columns[name] for name in names]
        keys = [
            column.values.masked_fill(column.missing, MISSING_KEY)
            if name in self._workflow.spec.keys and column.missing is not None
            else column.values
            for name, column in zip(names, [flat_values(column) for column in columns], strict=True)
        ]
        num_bags, device = len(names) * block.num_rows, self._device.device
        if not any(isinstance(column, Ragged) for column in columns):
            # Every bag holds one key.
            offsets = torch.arange(num_bags + 1, device=device)
        else:
            offsets = torch.zeros(num_bags + 1, dtype=torch.int64, device=device)
            lengths = [
                column.offsets.diff() if isinstance(column, Ragged) else torch.ones_like(column.values)
                for column in columns
            ]
            torch.cumsum(torch.cat(lengths), 0, out=offsets[1:])
        return Jagged(names=tuple(names), keys=torch.cat(keys) if keys else offsets[:0], offsets=offsets)


def _operators_on_tensors() -> list[str]:
    """Return the names of all operators that run on tensors."""
    return sorted(
        operator.__name__
        for operator in Operator.members().values()
        if issubclass(operator, Operator) and operator.runs_on_tensors
    )


def _float32(name: str, block: TensorBlock, expected: str) -> Tensor:
    values = flat_values(block.columns[name]).numbers().to(torch.float32)
    block.reject(name, ~values.isfinite(), expected)
    return values


def _weight(name: str, block: TensorBlock) -> Tensor:
    values = flat_values(block.columns[name]).numbers().to(torch.float32)
    block.reject(name, ~((values >= 0) & (values < torch.inf)), WEIGHT)
    return values


def _label(label: LabelSpec, block: TensorBlock, device: torch.device) -> Tensor:
    """Return the values of a label, float32[B]; see `terarec.etl.workflow.transform.label_values`."""
    column = flat_values(block.columns[label.source])
    block.reject(label.source, column.is_missing(), LABEL, kind="label")
    if label.positives:
        positives = [value_of(column.type, value) for value in label.positives]
        return torch.isin(column.values, torch.tensor(positives, device=device)).to(torch.float32)
    if label.at_least is not None:
        return (column.numbers() >= label.at_least).to(torch.float32)
    values = column.numbers().to(torch.float32)
    block.reject(label.source, values.isinf(), IN_FLOAT32)
    if label.is_probability:
        block.reject(label.source, (values < 0) | (values > 1), PROBABILITY)
    return values
