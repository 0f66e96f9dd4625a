"""`Arena`: one block of memory with the rows of many static tables of one width, and their optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels import memory
from terarec.kernels.rows import allocate_rows, initialise_rows
from terarec.ops import state_dtype
from terarec.spec import TableSpec
from terarec.storage.changes import ChangedRows, DirectWrites, discard_changes
from terarec.storage.store import check_has_memory, shared_row_type

_INITIALISED_AT_ONCE = 1 << 20  # float32 numbers in memory while 16-bit rows are initialised


class Arena:
    """Rows of several tables, table after table.

    Attributes:
        specs: The tables, all of one width, element type and optimizer.
        width: Length D of a vector.
        dtype: Element type of the weights: float32, bfloat16 or float16.
        optimizer: Name of the optimizer that updates the tables.
        num_rows: Rows V of all tables together.
        generation: 0, since no row changes its key (see `DynamicArena`).
        num_defaults: 0, the number of default rows (see `DynamicArena`).
        table_names: The tables' names.
        table_base: Arena row of each table's first row.
        table_rows: Rows of each table.
        weights: dtype[V, D].
        state: Name -> optimizer state float32[V, D] or [V]; empty until `attach_state`.
        attached: Token of the row optimizer that the state belongs to.
        changes: Rows that changed since a checkpoint; None until a table asks for them.
        direct: Writes to weights and states that are no updates.

    Args:
        specs: The tables.
        seed: Seed of the first weights, which depend on table name, row and seed only; 16-bit weights are those of a
            float32 table, rounded to nearest.

    Raises:
        ConfigError: No table, or tables of several widths, element types or optimizers.
        StorageError: Not enough memory; nothing is allocated.
    """

    def __init__(self, specs: Sequence[TableSpec], *, seed: int = 0) -> None:
        self.specs = tuple(specs)
        self.width, self.dtype, self.optimizer = shared_row_type(specs)
        self.table_names = tuple(spec.name for spec in specs)
        self.table_rows = tuple(spec.rows for spec in specs)
        self.table_base = (0, *accumulate(self.table_rows))[:-1]
        self.num_rows = sum(self.table_rows)
        self.generation = self.num_defaults = 0
        self.state: dict[str, Tensor] = {}
        self._fills: Mapping[str, float] = {}
        self.attached: object = None
        self.changes: ChangedRows | None = None
        self.direct = DirectWrites()
        self.weights = self._allocate("weights", (self.num_rows, self.width), torch.device("cpu"), self.dtype)
        for spec, base in zip(self.specs, self.table_base, strict=True):
            _initialise(self.weights[base : base + spec.rows], spec, seed)

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.weights.device

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.weights, *self.state.values()))

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Allocate an optimizer's state in place of any former one.

        Args:
            shapes: Name and shape of each state tensor, as ``ops.row_update.state_shapes`` returns them.
            fills: State -> its initial value; 0 for other states.

        Raises:
            StorageError: Not enough memory.
        """
        discard_changes(self)
        self.state = {}
        self._fills = dict(fills or {})
        for name, shape in shapes:
            self.state[name] = self._allocate(f"optimizer state {name!r}", shape, self.device, state_dtype(name))
            if fill := (fills or {}).get(name, 0.0):
                self.state[name].fill_(fill)

    def restart(self, table: int, seed: int) -> None:
        """Give the rows of table number `table` the first weights of `seed`, and initial state."""
        discard_changes(self)
        spec, base = self.specs[table], self.table_base[table]
        for name, held in self.state.items():
            held[base : base + spec.rows] = self._fills.get(name, 0.0)
        held = self.weights[base : base + spec.rows]
        if spec.initializer == "zeros":
            held.zero_()
        elif held.device.type == "cpu":
            _initialise(held, spec, seed)
        else:
            held.copy_(_first_rows(spec, held.dtype, seed))

    def move(self, device: torch.device) -> None:
        """Move weights and state to `device`.

        Raises:
            ConfigError: A device without memory.
            StorageError: Not enough memory there.
        """
        if device == self.device:
            return
        check_has_memory(device)
        tensors = {"weights": self.weights, **self.state}
        moved = {
            name: self._allocate(name, tuple(held.shape), device, held.dtype).copy_(held)
            for name, held in tensors.items()
        }
        self.weights = moved.pop("weights")
        self.state = moved
        if self.changes is not None:
            self.changes.move(device)

    def _allocate(
        self, purpose: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return zeros dtype[shape], on huge pages in host memory."""
        wanted = math.prod(shape) * dtype.itemsize
        purpose = f"{purpose} {str(dtype).removeprefix('torch.')}{list(shape)} of {_list_tables(self.table_names)}"
        if device.type == "cpu":
            memory.require(wanted, purpose)
            if dtype == torch.float32:
                return torch.from_numpy(allocate_rows(shape))
            floats = allocate_rows((-(-wanted // torch.float32.itemsize),))  # NumPy has no bfloat16
            return torch.from_numpy(floats).view(dtype)[: math.prod(shape)].view(shape)
        try:
            return torch.zeros(shape, device=device, dtype=dtype)
        except torch.OutOfMemoryError as error:
            raise StorageError(
                purpose, f"{wanted:,} bytes requested on {device}, which has too little memory"
            ) from error


def _list_tables(names: Sequence[str]) -> str:
    """Return the tables by name; of many, the first three and their number."""
    if len(names) == 1:
        return f"table {names[0]!r}"
    shown = ", ".join(repr(name) for name in names[:3])
    return f"tables {shown}" if len(names) <= 3 else f"{len(names)} tables ({shown}, ...)"


def first_scale(spec: TableSpec) -> float:
    """Return the scale of a table's first weights."""
    return spec.init_scale if spec.init_scale is not None else 1.0 / math.sqrt(spec.rows)


def _first_rows(spec: TableSpec, dtype: torch.dtype, seed: int) -> Tensor:
    rows = torch.empty(spec.rows, spec.width, dtype=dtype)
    _initialise(rows, spec, seed)
    return rows


def _initialise(weights: Tensor, spec: TableSpec, seed: int) -> None:
    if spec.initializer == "zeros":
        return
    scale = first_scale(spec)
    if weights.dtype == torch.float32:
        initialise_rows(weights.numpy(), table=spec.name, seed=seed, initializer=spec.initializer, scale=scale)
        return
    chunk = torch.empty(max(1, _INITIALISED_AT_ONCE // spec.width), spec.width)
    for first in range(0, spec.rows, chunk.shape[0]):
        part = chunk[: spec.rows - first]
        initialise_rows(
            part.numpy(), table=spec.name, seed=seed, initializer=spec.initializer, scale=scale, first_row=first
        )
        weights[first : first + part.shape[0]].copy_(part)
