"""Memory of a run, estimated before anything is allocated, and tiers for tables that do not fit. See docs/tiers.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from terarec.data import read_spec
from terarec.data.batch_stream import SHUFFLE_GROUPS
from terarec.embedding.recording import RecordedTables, record_tables
from terarec.errors import ConfigError, DataNotFoundError, StorageError
from terarec.formats import default_group_rows, read_part_keys, read_parts
from terarec.kernels import memory
from terarec.models import build_model
from terarec.nn.objectives import build_objective
from terarec.ops import state_dtype, state_shapes
from terarec.optim.rules import table_rules
from terarec.spec import DatasetSpec, DynamicTableSpec, RunSpec, TableSpec
from terarec.spec.quoting import did_you_mean
from terarec.storage.key_rows import USES, needed_uses
from terarec.storage.row_store import KEY_BYTES
from terarec.storage.slots import SLOT_BYTES

INDEX_BYTES = 20.1
"""Bytes of the hash index for a key: 20.0 to 20.6 measured from 300,000 to 3,000,000 keys."""
FILE_INDEX_BYTES = 16
"""Most bytes of host memory that a row file's index takes for a row."""
FILE_SPACE = 1.5
"""Most space of a row file in proportion to its rows."""
_DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2, "adamw": 2}
_TIER_SHARE = 0.9  # of the memory that is left, since writes and reads of files have buffers
_PREFETCHED = 2

RowsFrom = Literal["table", "keysets", "column", "samples", "given"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMemory:
    """What a table takes.

    Attributes:
        name: Its name.
        kind: "static" or "dynamic".
        rows: Rows that training gives memory or space: all of a static table in memory, else those of the keys in the
            data.
        rows_from: Source of `rows`: the "table" itself, the distinct keys of the "keysets", the ids of the "column", a
            bound by the number of "samples", or "given".
        width: Length D of a vector.
        row_bytes: Bytes of a row's weights and optimizer state.
        weight_bytes: Bytes of the weights of all these rows.
        state_bytes: Bytes of their optimizer state.
        index_bytes: Bytes of indexes and of what is tracked of each row, in host memory.
        device_bytes: Bytes in the memory of the device.
        host_bytes: Bytes in host memory, with the indexes.
        file_bytes: Most bytes on the disk.
        resident_share: Share of the rows that the fastest tier holds at once.
    """

    name: str
    kind: str
    rows: int
    rows_from: RowsFrom
    width: int
    row_bytes: int
    weight_bytes: int
    state_bytes: int
    index_bytes: int
    device_bytes: int
    host_bytes: int
    file_bytes: int
    resident_share: float


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
    counts = _KeyCounts(spec, dataset, reads_keysets=reads_keysets)
    on_gpu = device is not None and device.type != "cpu"
    tables = _planned_tables(spec, records, counts, rows or {}, is_gpu=on_gpu)
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


class _KeyCounts:
    """Distinct keys of columns in the training data, as far as they are known without reading it."""

    def __init__(self, spec: RunSpec, dataset: DatasetSpec, *, reads_keysets: bool) -> None:
        self._columns = {column.name: column for column in dataset.categorical}
        self._samples = dataset.num_rows("train") if "train" in dataset.splits else 0
        self._keysets: list[Mapping[str, NDArray[np.int64]]] = []
        directory = Path(spec.data)
        if not reads_keysets:
            return
        with suppress(DataNotFoundError):  # most data sets have no keysets
            self._keysets = [read_part_keys(directory, "train", part) for part in read_parts(directory, "train")]

    def of(self, columns: Sequence[str]) -> tuple[int, RowsFrom]:
        """Return how many distinct keys some columns have together, or a bound, and where the number is from."""
        known = [self._columns[name] for name in columns if name in self._columns]
        if self._keysets and known:
            pieces = [keys[column.name] for keys in self._keysets for column in known if column.name in keys]
            return len(np.unique(np.concatenate(pieces))) if pieces else 0, "keysets"
        seen = sum(self._samples * column.hotness for column in known)
        ids = [column.rows for column in known]
        if known and None not in ids:
            most = max(rows for rows in ids if rows is not None)
            return (most, "column") if most <= seen or not seen else (seen, "samples")
        return seen, "samples"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Rows of a table, and the bytes of each."""

    spec: TableSpec | DynamicTableSpec
    count: int
    source: RowsFrom
    weight_bytes: int
    state_bytes: int
    index_bytes: float

    @property
    def row_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes


def _planned_tables(
    spec: RunSpec, records: Sequence[RecordedTables], counts: _KeyCounts, given: Mapping[str, int], *, is_gpu: bool
) -> list[TableMemory]:
    rules = table_rules({"default": spec.sparse_optimizer, **spec.row_optimizers})
    tables: list[_Rows] = []
    for record in records:
        for table in record.tables:
            rule = rules[table.optimizer].row_rule
            state_bytes = sum(
                int(np.prod(shape)) * state_dtype(name).itemsize
                for name, shape in state_shapes(rule.kind, 1, table.width, mode=rule.mode)
            )
            readers = [feature.name for feature in record.features if feature.table == table.name]
            count, source = _rows_of(table, given, counts, readers)
            tables.append(
                _Rows(
                    spec=table,
                    count=count,
                    source=source,
                    weight_bytes=table.width * getattr(torch, table.dtype).itemsize,
                    state_bytes=state_bytes,
                    index_bytes=_index_bytes(table),
                )
            )
    known = [table.spec.name for table in tables]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"rows: got table {name!r}{did_you_mean(name, known)}, expected one of {', '.join(map(repr, known))}"
            )
    shares = _resident_shares(tables)
    return [_table_memory(table, share, is_gpu=is_gpu) for table, share in zip(tables, shares, strict=True)]


def _rows_of(
    table: TableSpec | DynamicTableSpec, given: Mapping[str, int], counts: _KeyCounts, readers: Sequence[str]
) -> tuple[int, RowsFrom]:
    if isinstance(table, TableSpec) and table.tiers is None:
        return table.rows, "table"  # all of them have memory, whatever the data
    most = table.rows if isinstance(table, TableSpec) else table.max_rows
    count, source = (given[table.name], "given") if table.name in given else counts.of(readers)
    if most is not None and most <= count:
        return most, "table"
    return count, source  # type: ignore[return-value]  # mypy widens the literals of the conditional expression


def _index_bytes(table: TableSpec | DynamicTableSpec) -> float:
    """Return the bytes for each row of a table besides weights and state, in host memory."""
    in_file = FILE_INDEX_BYTES if table.tiers is not None and table.tiers.file is not None else 0
    if isinstance(table, TableSpec):
        return in_file
    tracked = sum(USES[name].itemsize for name in (tuple(USES) if table.track_uses else needed_uses(table.evict)))
    return INDEX_BYTES + tracked + in_file


def _resident_shares(tables: Sequence[_Rows]) -> list[float]:
    """Return the share of each table's rows for which the fastest tier has room."""
    shares = [1.0] * len(tables)
    for tiers in {table.spec.tiers for table in tables if table.spec.tiers is not None}:
        mine = [number for number, table in enumerate(tables) if table.spec.tiers == tiers]
        full = sum(tables[number].count * (tables[number].row_bytes + SLOT_BYTES) for number in mine)
        for number in mine:
            shares[number] = min(1.0, tiers.fast_bytes / full) if full else 1.0
    return shares


def _table_memory(table: _Rows, share: float, *, is_gpu: bool) -> TableMemory:
    tiers, rows = table.spec.tiers, table.count
    index_bytes = int(rows * table.index_bytes)
    in_fast = int(rows * (table.row_bytes + (SLOT_BYTES if tiers is not None else 0)) * share)
    in_host = in_file = 0
    if tiers is not None:
        below = tiers.host_bytes_below
        if below is not None:
            in_host = int(min(1.0, below / max(1, tiers.fast_bytes)) * in_fast) if share < 1 else 0
        if tiers.file is not None:
            in_file = int(FILE_SPACE * rows * (table.row_bytes + KEY_BYTES))
    return TableMemory(
        name=table.spec.name,
        kind=table.spec.kind,
        rows=rows,
        rows_from=table.source,
        width=table.spec.width,
        row_bytes=table.row_bytes,
        weight_bytes=rows * table.weight_bytes,
        state_bytes=rows * table.state_bytes,
        index_bytes=index_bytes,
        device_bytes=in_fast if is_gpu else 0,
        host_bytes=index_bytes + in_host + (0 if is_gpu else in_fast),
        file_bytes=in_file,
        resident_share=share,
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
