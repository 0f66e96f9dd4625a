"""Memory of a run, estimated before anything is allocated, and tiers for tables that do not fit. See docs/tiers.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from terarec.data import read_spec
from terarec.data.batch_stream import SHUFFLE_GROUPS
from terarec.embedding.recording import RecordedTables, record_tables
from terarec.errors import StorageError
from terarec.formats import default_group_rows
from terarec.kernels import memory
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.spec import DatasetSpec, RunSpec
from terarec.train.table_memory import FILE_INDEX_BYTES, KeyCounts, TableMemory, planned_tables

_DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2, "adamw": 2}
_TIER_SHARE = 0.9  # of the memory that is left, since writes and reads of files have buffers
_PREFETCHED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What a run takes.

    Attributes:
        tables: The tables, in the order in which the model makes them.
        dense_bytes: Bytes of the layers' parameters, gradients and optimizer states, on the device.
        batch_bytes: Bytes of the samples that are read ahead, in host memory, and of a batch's vectors and activations.
        program_bytes: Bytes that the program and its libraries take in host memory.
        device: "cpu" or "cuda".
        device_bytes: Bytes in the memory of the device; 0 on a CPU.
        host_bytes: Bytes in host memory.
        file_bytes: Most bytes on the disk.
        available_bytes: Host memory that is available.
        suggestion: Tiers with which the run fits into the available host memory, in the form that ``--tiers`` takes;
            None where it fits as it is, or where no tiers would help.
    """

    tables: tuple[TableMemory, ...]
    dense_bytes: int
    batch_bytes: int
    program_bytes: int
    device: str
    device_bytes: int
    host_bytes: int
    file_bytes: int
    available_bytes: int
    suggestion: str | None

    @property
    def is_over(self) -> bool:
        """Whether the run needs more host memory than there is."""
        return self.host_bytes > self.available_bytes

    def check(self, *, only_known: bool = False) -> None:
        """Raise `StorageError` if the host memory does not suffice; the message says what would fit.

        Args:
            only_known: Whether tables whose rows depend on the data are left out.
        """
        counted = [table for table in self.tables if not only_known or table.rows_from == "table"]
        total = self.host_bytes - sum(table.host_bytes for table in self.tables if table not in counted)
        if total <= self.available_bytes:
            return
        largest = max(counted, key=lambda table: table.host_bytes, default=None)
        of_which = f", of which table {largest.name!r} takes {largest.host_bytes:,}" if largest else ""
        would_do = f"more memory, or tiers such as {self.suggestion!r}" if self.suggestion else "more memory"
        raise StorageError(
            f"training needs {total:,} bytes of host memory{of_which}; {self.available_bytes:,} are available; "
            f"expected {would_do}"
        )


def plan_run(
    spec: RunSpec,
    *,
    rows: Mapping[str, int] | None = None,
    host_bytes: int | None = None,
    device: torch.device | None = None,
    reads_keysets: bool = True,
    allow_import: Sequence[str] = (),
) -> MemoryPlan:
    """Estimate the memory of a run without allocating its tables.

    The model is built with one row a table, so its layers take their memory for a moment.

    Args:
        spec: The run.
        rows: Table -> expected rows, for dynamic tables and tables in tiers whose keys the data set does not count.
        host_bytes: Host memory to stay within; None for what is available.
        device: Device of the training; None for a CPU.
        reads_keysets: Whether to count the keys of a data set with keysets, which takes time where these are large.
        allow_import: Packages from which the model may come by name.

    Raises:
        ConfigError: A model that does not fit the data, or rows of a table that the model does not have.
        DataNotFoundError: ``spec.data`` is no data set.
    """
    program_bytes = memory.peak_bytes()
    dataset = read_spec(spec.data)
    num_outputs = build_objective(spec.objective).num_outputs(len(dataset.labels))
    with torch.random.fork_rng(devices=()), record_tables() as records:
        model = build_model(spec.model, dataset, num_outputs=num_outputs, allow_import=allow_import)
    counts = KeyCounts(spec, dataset, reads_keysets=reads_keysets)
    on_gpu = device is not None and device.type != "cpu"
    tables = planned_tables(spec, records, counts, rows or {}, is_gpu=on_gpu)
    dense_bytes, batch_bytes = _dense_bytes(spec, model), _batch_bytes(spec, dataset, records, model)
    device_bytes = sum(table.device_bytes for table in tables) + (dense_bytes if on_gpu else 0)
    in_host = program_bytes + batch_bytes + (0 if on_gpu else dense_bytes)
    total = in_host + sum(table.host_bytes for table in tables)
    if host_bytes is None:
        host_bytes = (memory.available_bytes() or memory.total_bytes()) + program_bytes
    return MemoryPlan(
        tables=tuple(tables),
        dense_bytes=dense_bytes,
        batch_bytes=batch_bytes,
        program_bytes=program_bytes,
        device="cuda" if on_gpu else "cpu",
        device_bytes=device_bytes,
        host_bytes=total,
        file_bytes=sum(table.file_bytes for table in tables),
        available_bytes=host_bytes,
        suggestion=_suggestion(tables, host_bytes - in_host) if total > host_bytes else None,
    )


def _dense_bytes(spec: RunSpec, model: nn.Module) -> int:
    """Return the bytes of parameters, gradients and optimizer states; 2 states for an optimizer of torch's own."""
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return parameters * (2 + _DENSE_STATES.get(spec.dense_optimizer.kind, 2))


def _batch_bytes(spec: RunSpec, dataset: DatasetSpec, records: Sequence[RecordedTables], model: nn.Module) -> int:
    """Return the bytes of samples that are read ahead, and of a batch's vectors, activations and their gradients."""
    training = spec.training
    keys = sum(column.hotness for column in dataset.categorical)
    numbers = len(dataset.labels) + len(dataset.dense)
    sample = 4 * numbers + 16 * keys  # int64 keys, and offsets of bags
    groups = SHUFFLE_GROUPS if training.shuffle else 1
    samples = dataset.num_rows("train") if "train" in dataset.splits else 0
    window = min(samples, groups * default_group_rows(dataset)) * (4 * numbers + 4 * keys)
    width = sum(
        {table.name: table.width for table in record.tables}[feature.table]
        for record in records
        for feature in record.features
    )
    outputs = sum(layer.shape[0] for layer in model.parameters() if layer.dim() == 2)
    batch = training.batch_size * (sample * (_PREFETCHED + 2) + 4 * 2 * (width + 2 * outputs))
    return window * (training.reader_threads + 1) + batch


def _suggestion(tables: Sequence[TableMemory], host_bytes: int) -> str | None:
    """Return tiers with which the tables take at most `host_bytes` of host memory, their indexes included."""
    rows = sum(table.rows for table in tables)
    indexes = sum(table.index_bytes for table in tables) + FILE_INDEX_BYTES * rows
    budget = int(_TIER_SHARE * (host_bytes - indexes)) >> 20
    return f"host={budget}MiB,file=DIR" if budget > 0 else None
