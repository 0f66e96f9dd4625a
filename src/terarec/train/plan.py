# SPDX-License-Identifier: Apache-2.0
"""Memory of a run, estimated before anything is allocated, and tiers for tables that do not fit. See docs/tiers.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import torch
from torch import nn

from terarec.checkpoint.table_files import SHARD_BYTES
from terarec.data import read_spec
from terarec.data.sampling import SHUFFLE_GROUPS
from terarec.embedding.tables import RecordedTables, record_tables
from terarec.errors import NoSpaceError
from terarec.formats.block import default_group_rows
from terarec.kernels import memory
from terarec.memory.budget import INDEX_ALLOWANCE
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.spec import DatasetSpec, RunSpec, Tiers
from terarec.train.devices import free_bytes
from terarec.train.table_memory import KeyCounts, TableMemory, planned_tables

_DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2, "adamw": 2}
_TIER_SHARE = 0.9  # of the memory that is left, since writes and reads of files have buffers
_PREFETCHED = 2
# A budget of one byte leaves what tables in tiers take in any case, above all their indexes.
_NO_ROOM = Tiers(host="1", file="DIR")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Memory of a run.

    Attributes:
        tables: The tables, in the order in which the model makes them.
        dense_bytes: Bytes of the layers' parameters, gradients and optimizer states, on the device.
        batch_bytes: Bytes of the samples that are read ahead, in host memory, and of a batch's vectors and activations.
        program_bytes: Bytes that the program and its libraries take in host memory.
        tier_bytes: Bytes of host memory in which tiers in files read rows, and in which rows wait for the disk.
        checkpoint_bytes: Bytes of host memory that a checkpoint takes while it is written.
        device: "cpu" or "cuda".
        device_bytes: Bytes in the memory of the device; 0 on a CPU.
        host_bytes: Bytes in host memory.
        file_bytes: Maximum bytes on the disk.
        available_bytes: Host memory that is available.
        available_device_bytes: Memory of the device that is available; None where it is not known, and on a CPU.
        suggestion: Tiers with which the run fits into the available memory, in the form that ``--tiers`` takes; None
            where it fits as it is, or where no tiers would help.
        placement: The tables with the tiers of `suggestion`; none without it.
    """

    tables: tuple[TableMemory, ...]
    dense_bytes: int
    batch_bytes: int
    program_bytes: int
    tier_bytes: int
    checkpoint_bytes: int
    device: str
    device_bytes: int
    host_bytes: int
    file_bytes: int
    available_bytes: int
    available_device_bytes: int | None
    suggestion: str | None
    placement: tuple[TableMemory, ...]

    @property
    def is_over(self) -> bool:
        """Whether the run needs more memory of the host, or of the device, than there is."""
        return _is_over(self.host_bytes, self.available_bytes) or _is_over(
            self.device_bytes, self.available_device_bytes
        )

    def check(self, *, only_known: bool = False) -> None:
        """Raise `StorageError` if there is not enough memory; the message suggests what would fit."""
        counted = [table for table in self.tables if not only_known or table.rows_from == "table"]
        left_out = [table for table in self.tables if table not in counted]
        for where, field, total, available in (
            ("host", "host_bytes", self.host_bytes, self.available_bytes),
            ("device", "device_bytes", self.device_bytes, self.available_device_bytes),
        ):
            total -= sum(getattr(table, field) for table in left_out)
            if not _is_over(total, available):
                continue
            largest = max(counted, key=attrgetter(field), default=None)
            of_which = f", of which table {largest.name!r} takes {getattr(largest, field):,}" if largest else ""
            raise NoSpaceError(
                "memory",
                f"training needs {total:,} bytes of {where} memory{of_which}; {available:,} are available; "
                f"expected {self._what_would_do()}",
            )

    def _what_would_do(self) -> str:
        if self.suggestion is None:
            return "more memory"
        whole = sum(table.resident_share == 1 for table in self.placement)
        return (
            f"more memory, or tiers such as {self.suggestion!r}, the fastest of which holds {whole} of "
            f"{len(self.placement)} tables completely"
        )


def plan_run(
    spec: RunSpec,
    *,
    rows: Mapping[str, int] | None = None,
    host_bytes: int | None = None,
    device: torch.device | None = None,
    device_bytes: int | None = None,
    reads_keysets: bool = True,
    program_bytes: int | None = None,
    allow_import: Sequence[str] = (),
) -> MemoryPlan:
    """Estimate the memory of a run without allocating its tables.

    The model is built with one row a table, so its layers take their memory for a moment.

    Args:
        spec: The run.
        rows: Table -> expected rows, for dynamic tables and tables in tiers whose keys the data set does not count.
        host_bytes: Host memory to stay within; None for what is available.
        device: Device of the training; None for a CPU.
        device_bytes: Memory of the device to stay within; None for what is available.
        program_bytes: Bytes of host memory that the program takes in a training, see `program_bytes` of
            `terarec.train.rehearsal`; None for what this process has taken so far.
        reads_keysets: Whether to count the keys of a data set with keysets, which takes time where these are large.
        allow_import: Packages from which the model may come by name.

    Raises:
        ConfigError: A model that does not fit the data, or rows of a table that the model does not have.
        DataNotFoundError: ``spec.data`` is not a data set.
    """
    # Before the model is built, whose layers are counted apart.
    if program_bytes is None:
        program_bytes = memory.peak_bytes()
    dataset = read_spec(spec.data)
    num_outputs = build_objective(spec.objective).num_outputs(len(dataset.labels))
    # Building the model draws weights, which must not shift the random numbers of the training that follows.
    with torch.random.fork_rng(devices=()), record_tables() as records:
        model = build_model(spec.model, dataset, num_outputs=num_outputs, allow_import=allow_import)
    counts = KeyCounts(spec, dataset, reads_keysets=reads_keysets)
    on_gpu = device is not None and device.type != "cpu"
    place = partial(planned_tables, spec, counts=counts, sizes=rows or {}, is_gpu=on_gpu)
    tables = place(records)
    dense_bytes, batch_bytes = _dense_bytes(spec, model), _batch_bytes(spec, dataset, records, model)
    checkpoint_bytes, tier_bytes = _checkpoint_bytes(tables, records), _buffer_bytes(tables)
    in_device = dense_bytes if on_gpu else 0
    in_host = program_bytes + batch_bytes + tier_bytes + checkpoint_bytes + dense_bytes - in_device
    if host_bytes is None:
        # What this process holds already is in the estimate, too, and so has to be in what is available.
        host_bytes = (memory.available_bytes() or memory.total_bytes()) + program_bytes
    if device_bytes is None and device is not None and on_gpu:
        device_bytes = free_bytes(device)
    memory_plan = MemoryPlan(
        tables=tuple(tables),
        dense_bytes=dense_bytes,
        batch_bytes=batch_bytes,
        program_bytes=program_bytes,
        tier_bytes=tier_bytes,
        checkpoint_bytes=checkpoint_bytes,
        device="cuda" if on_gpu else "cpu",
        device_bytes=in_device + sum(table.device_bytes for table in tables),
        host_bytes=in_host + sum(table.host_bytes for table in tables),
        file_bytes=sum(table.file_bytes for table in tables),
        available_bytes=host_bytes,
        available_device_bytes=device_bytes if on_gpu else None,
        suggestion=None,
        placement=(),
    )
    if not memory_plan.is_over:
        return memory_plan
    device_room = None if memory_plan.available_device_bytes is None else memory_plan.available_device_bytes - in_device
    least = place(_with_tiers(records, _NO_ROOM))
    # Tables in files need buffers instead of copies of their rows for a checkpoint.
    others = in_host - tier_bytes - checkpoint_bytes + _buffer_bytes(least)
    tiers = _fitting_tiers(least, host_bytes - others, device_room)
    if tiers is None:
        return memory_plan
    placement = tuple(place(_with_tiers(records, tiers)))
    budgets = (f"{name}={getattr(tiers, name)}" for name in ("device", "host") if getattr(tiers, name) is not None)
    return replace(memory_plan, suggestion=f"{','.join(budgets)},file={tiers.file}", placement=placement)


def _is_over(needed: int, available: int | None) -> bool:
    return available is not None and needed > available


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
    # The windows that threads of the reader decode ahead, see `Reader`.
    groups = SHUFFLE_GROUPS if training.shuffle else 1
    samples = dataset.num_rows("train") if "train" in dataset.splits else 0
    window = min(samples, groups * default_group_rows(dataset)) * (4 * numbers + 4 * keys)
    width = sum(
        {table.name: table.width for table in record.tables}[feature.table]
        for record in records
        for feature in record.features
    )
    outputs = sum(layer.shape[0] for layer in model.parameters() if layer.dim() == 2)
    # In float32 with their gradients: vectors, and of each layer its product and its activation.
    batch = training.batch_size * (sample * (_PREFETCHED + 2) + 4 * 2 * (width + 2 * outputs))
    return window * (training.reader_threads + 1) + batch


def _checkpoint_bytes(tables: Sequence[TableMemory], records: Sequence[RecordedTables]) -> int:
    """Return the bytes of two pieces of the largest table whose rows are copied, one of which malloc keeps.

    Rows of static tables in memory are written in place, and those in files are linked.
    """
    tiers = {table.name: table.tiers for record in records for table in record.tables}
    copied = []
    for table in tables:
        of_table = tiers[table.name]
        if table.kind == "dynamic" if of_table is None else of_table.file is None:
            copied.append(table.rows * table.row_bytes)
    return 2 * min(SHARD_BYTES, max(copied, default=0))


def _buffer_bytes(tables: Sequence[TableMemory]) -> int:
    return sum(table.buffer_bytes for table in tables)


def _with_tiers(records: Sequence[RecordedTables], tiers: Tiers) -> list[RecordedTables]:
    return [replace(record, tables=tuple(replace(table, tiers=tiers) for table in record.tables)) for record in records]


def _fitting_tiers(tables: Sequence[TableMemory], host_bytes: int, device_bytes: int | None) -> Tiers | None:
    """Return tiers with a file with which the tables fit in this much memory; None if none do.

    Args:
        tables: The tables in tiers that have no room in memory: their indexes have to be there.
        host_bytes: Host memory for them.
        device_bytes: Memory of the device for them; None on a CPU.
    """
    indexes = sum(table.index_bytes for table in tables)
    allowance = min(indexes, INDEX_ALLOWANCE)
    host = (int(_TIER_SHARE * (host_bytes - allowance)) >> 20) if host_bytes > indexes else 0
    device = None if device_bytes is None else int(_TIER_SHARE * device_bytes) >> 20
    if host <= 0 or (device is not None and device <= 0):
        return None
    return Tiers(device=None if device is None else f"{device}MiB", host=f"{host}MiB", file="DIR")
