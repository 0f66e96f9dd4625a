"""The transform of a fitted workflow on a device: raw rows in Arrow batches, such as Parquet gives, to batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa
import torch
from torch import Tensor

from terarec.batch import Batch, Jagged
from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import ColumnType, from_arrow, is_list
from terarec.etl.ops import Operator
from terarec.etl.ops.base import value_of
from terarec.etl.tensors import DeviceColumn, TensorBlock, TensorColumn, TensorDevice
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.plan import columns_needed, results_read
from terarec.etl.workflow.transform import IN_FLOAT32, LABEL, NUMBER, PROBABILITY, WEIGHT, state_of
from terarec.ragged import Ragged, flat_values
from terarec.spec import MISSING_KEY, DatasetSpec, LabelSpec


class DeviceTransform:
    """Transforms raw rows as `Workflow` does, on a device, into batches to train or to predict on.

    Results equal those on the CPU bit for bit, except for logarithms: those of float64 may differ in the last place. No
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
        # Here and not in each transform: constants of the host are copied to the device, which a recording cannot do.
        self._positives = [self._positive_values(label) for label in workflow.spec.labels]
        self._offsets = torch.arange(1, device=self._device.device)
        self._recordings = _Recordings(self._run, self._device.device)

    def _positive_values(self, label: LabelSpec) -> Tensor | None:
        if not label.positives:
            return None
        kind = self.columns[label.source].kind
        return torch.tensor([value_of(kind, value) for value in label.positives], device=self._device.device)

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
        columns = self._device.columns([self._array(rows, name) for name in self.columns])
        return TensorBlock(dict(zip(self.columns, columns, strict=True)), rows.num_rows)

    def _array(self, rows: pa.RecordBatch, name: str) -> pa.Array:
        if name not in rows.schema.names:
            raise FormatError(f"column {name!r}", f"not in the batch, expected {', '.join(self.columns)}")
        expected, array = self.columns[name], rows.column(name)
        try:
            found = from_arrow(array, expected.kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise FormatError(f"column {name!r}", f"got {array.type}, expected values of {expected.kind}") from None
        if is_list(found) is not expected.is_list:
            raise FormatError(f"column {name!r}", f"got {array.type}, expected {expected}")
        return found

    def transform(self, block: TensorBlock, metadata: Mapping[str, pa.Array] | None = None) -> Batch:
        """Transform B raw rows that are on the device; it waits for the device once.

        A GPU records the work on the second block of the same shape, and repeats it for the further ones.

        Args:
            block: Columns that `load` returned.
            metadata: Metadata columns of the batch.

        Raises:
            FormatError: A value is rejected, with its column and row.
        """
        result = self._recordings.repeat(block) if self._device.device.type == "cuda" else self._run(block)
        # Last: nothing before it waits for the device.
        result.block.raise_rejected(result.failed)
        sparse = self._sparse(result)
        return Batch(
            dense=result.dense, label=result.label, sparse=sparse, weight=result.weight, metadata=metadata or {}
        )

    def _run(self, block: TensorBlock) -> _Result:
        block = TensorBlock(block.columns, block.num_rows)  # with checks of its own
        for function in self._functions:
            block = block.with_columns(function(block))
        spec = self._workflow.spec
        labels = [_label(label, values, block) for label, values in zip(spec.labels, self._positives, strict=True)]
        label = torch.stack(labels, dim=1)
        dense = [_float32(column.name, block, NUMBER) for column in self._dataset.dense]
        keys = [self._keys(column.name, block) for column in self._dataset.categorical]
        return _Result(
            block=block,
            dense=torch.stack(dense, dim=1) if dense else label.new_empty((block.num_rows, 0)),
            label=label,
            keys=torch.cat(keys) if keys else self._offsets[:0],
            weight=None if spec.weight is None else _weight(spec.weight, block),
            failed=block.failed_checks(),
        )

    def _keys(self, name: str, block: TensorBlock) -> Tensor:
        column = flat_values(block.columns[name])
        if name in self._workflow.spec.keys and column.missing is not None:
            return column.values.masked_fill(column.missing, MISSING_KEY)
        return column.values

    def _sparse(self, result: _Result) -> Jagged:
        """Return the keys of all features, feature after feature."""
        names = tuple(column.name for column in self._dataset.categorical)
        columns = [result.block.columns[name] for name in names]
        num_bags = len(names) * result.block.num_rows
        if not any(isinstance(column, Ragged) for column in columns):
            # Every bag holds one key.
            if self._offsets.shape[0] <= num_bags:
                # Kept for later batches, to which a caller's inference mode must not apply.
                with torch.inference_mode(False):
                    self._offsets = torch.arange(num_bags + 1, device=self._device.device)
            offsets = self._offsets[: num_bags + 1]
        else:
            offsets = torch.zeros(num_bags + 1, dtype=torch.int64, device=self._device.device)
            lengths = [
                column.offsets.diff() if isinstance(column, Ragged) else torch.ones_like(column.values)
                for column in columns
            ]
            torch.cumsum(torch.cat(lengths), 0, out=offsets[1:])
        return Jagged(names=names, keys=result.keys, offsets=offsets)


@dataclass(frozen=True, slots=True)
class _Result:
    """Tensors of a transformed block.

    Attributes:
        block: Columns of all steps.
        dense: float32[B, F].
        label: float32[B, L].
        keys: int64[N], feature-major.
        weight: float32[B]; None without weights.
        failed: Which checks of the block failed; None without checks.
    """

    block: TensorBlock
    dense: Tensor
    label: Tensor
    keys: Tensor
    weight: Tensor | None
    failed: Tensor | None

    def copied(self) -> _Result:
        """Return the result with copies of the tensors of a batch."""
        weight = None if self.weight is None else self.weight.clone()
        return replace(self, dense=self.dense.clone(), label=self.label.clone(), keys=self.keys.clone(), weight=weight)


Shape: TypeAlias = tuple[int, tuple[tuple[str, bool], ...]]
"""Rows of a block, and for each column its name and whether it has missing values."""

_MOST_RECORDINGS = 4
_LOGGER = logging.getLogger(__name__)


class _Recordings:
    """CUDA graphs of the transform, one for each shape of blocks that occurred twice.

    The transform of Criteo's columns is some 400 short kernels. Launched one by one they took 6 ms for 65,536 rows,
    recorded they take 2 (H100).

    Args:
        run: The transform.
        device: Its device.
    """

    def __init__(self, run: Callable[[TensorBlock], _Result], device: torch.device) -> None:
        self._run = run
        self._device = device
        self._records = True
        self._seen: set[Shape] = set()
        self._recorded: dict[Shape, tuple[torch.cuda.CUDAGraph, list[Tensor], _Result]] = {}

    def repeat(self, block: TensorBlock) -> _Result:
        """Transform a block on a GPU."""
        columns = [(name, column) for name, column in block.columns.items() if isinstance(column, TensorColumn)]
        # The length of a column of lists differs from block to block.
        if len(columns) < len(block.columns) or not self._records:
            return self._run(block)
        shape = (block.num_rows, tuple((name, column.missing is not None) for name, column in columns))
        # The first block compiles kernels, which cannot be recorded.
        if shape not in self._seen or not block.num_rows:
            self._seen.add(shape)
            return self._run(block)
        # A recording takes longer than many transforms, so that none is dropped for another.
        if shape not in self._recorded and len(self._recorded) == _MOST_RECORDINGS:
            return self._run(block)
        tensors = [tensor for _, column in columns for tensor in (column.values, column.missing) if tensor is not None]
        with torch.cuda.device(self._device):
            if shape not in self._recorded:
                stream = torch.cuda.current_stream()
                try:
                    self._recorded[shape] = self._record(block, tensors)
                except RuntimeError as error:
                    # torch leaves its own stream as the current one when a recording fails.
                    torch.cuda.set_stream(stream)
                    self._records = False
                    reason = str(error).splitlines()[0]
                    _LOGGER.warning("the transform runs step by step, as it cannot be recorded: %s", reason)
                    return self._run(block)
            graph, inputs, result = self._recorded[shape]
            torch._foreach_copy_(inputs, tensors)
            graph.replay()
            return result.copied()

    # The tensors of a recording serve all later blocks, so a caller's inference mode must not apply to them.
    @torch.inference_mode(False)
    def _record(self, block: TensorBlock, tensors: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor], _Result]:
        inputs = [tensor.clone() for tensor in tensors]
        parts = iter(inputs)
        columns: dict[str, DeviceColumn] = {}
        for name, column in block.columns.items():
            assert isinstance(column, TensorColumn)
            values = next(parts)
            columns[name] = TensorColumn(column.type, values, None if column.missing is None else next(parts))
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate in the meantime, such as one that trains.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self._run(TensorBlock(columns, block.num_rows))
        return graph, inputs, result


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


def _label(label: LabelSpec, positives: Tensor | None, block: TensorBlock) -> Tensor:
    """Return the values of a label, float32[B]; see `terarec.etl.workflow.transform.label_values`."""
    column = flat_values(block.columns[label.source])
    block.reject(label.source, column.is_missing(), LABEL, kind="label")
    if positives is not None:
        return torch.isin(column.values, positives).to(torch.float32)
    if label.at_least is not None:
        return (column.numbers() >= label.at_least).to(torch.float32)
    values = column.numbers().to(torch.float32)
    block.reject(label.source, values.isinf(), IN_FLOAT32)
    if label.is_probability:
        block.reject(label.source, (values < 0) | (values > 1), PROBABILITY)
    return values
