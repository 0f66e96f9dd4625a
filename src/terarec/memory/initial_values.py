# SPDX-License-Identifier: Apache-2.0
"""Initial weights and states of rows: of whole tables, of rows in no tier, and of some columns of wider rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from terarec.kernels.rows import initialise_keys, initialise_rows
from terarec.kernels.slots import RowBatch
from terarec.memory.batch_parts import by_table
from terarec.spec import DynamicTableSpec, TableSpec

_INITIALISED_AT_ONCE = 1 << 20  # float32 numbers in memory while 16-bit rows are initialised


def initial_scale(spec: TableSpec) -> float:
    """Return the scale of a table's initial weights."""
    return spec.init_scale if spec.init_scale is not None else 1.0 / math.sqrt(spec.rows)


def initial_rows(spec: TableSpec, dtype: torch.dtype, seed: int) -> Tensor:
    """Return the initial weights dtype[rows, D] of a table."""
    rows = torch.empty(spec.rows, spec.width, dtype=dtype)
    initialise(rows, spec, seed)
    return rows


def initialise(weights: Tensor, spec: TableSpec, seed: int) -> None:
    """Set ``weights [rows, D]``, all zeros, to a table's initial weights; 16-bit ones are rounded from float32."""
    if spec.initializer == "zeros":
        return
    scale = initial_scale(spec)
    if weights.dtype == torch.float32:
        initialise_rows(weights.numpy(), table=spec.name, seed=seed, initializer=spec.initializer, scale=scale)
        return
    # In 16 bits: drawn as float32 in chunks and rounded, so that the weights are those of a float32 table, rounded.
    chunk = torch.empty(max(1, _INITIALISED_AT_ONCE // spec.width), spec.width)
    for first in range(0, spec.rows, chunk.shape[0]):
        part = chunk[: spec.rows - first]
        initialise_rows(
            part.numpy(), table=spec.name, seed=seed, initializer=spec.initializer, scale=scale, first_row=first
        )
        weights[first : first + part.shape[0]].copy_(part)


def write_columns(
    weights: Tensor,
    places: Tensor,
    keys: Tensor,
    columns: tuple[int, int],
    *,
    spec: TableSpec | DynamicTableSpec,
    seed: int,
) -> None:
    """Write some columns of the initial weights of a wider table.

    Args:
        weights: [V, D].
        places: int64[n], rows of `weights`.
        keys: int64[n], keys of these rows.
        columns: Width of the whole table, and the first of its columns here.
        spec: The table, with the scale of the whole one.
        seed: Seed of the initial weights.
    """
    width, first = columns
    # Random bits depend on the column in the whole row, so all columns are drawn.
    whole = torch.empty(keys.numel(), width, dtype=weights.dtype, device=weights.device)
    _draw(whole, torch.arange(keys.numel(), device=weights.device), keys, spec=spec, seed=seed)
    weights[places] = whole[:, first : first + weights.shape[1]]


def _draw(weights: Tensor, places: Tensor, keys: Tensor, *, spec: TableSpec | DynamicTableSpec, seed: int) -> None:
    scale = initial_scale(spec) if isinstance(spec, TableSpec) else spec.init_scale
    initialise_keys(weights, places, keys, table=spec.name, seed=seed, initializer=spec.initializer, scale=scale)


class InitialValues:
    """Initial weights, which depend on table, key and seed alone, and initial states.

    Attributes:
        seeds: Seed of each table's initial weights.
        fills: State -> its initial value.
        keys_of: Number of a table -> function that gives the keys by which rows are drawn, for tables whose keys here
            are other numbers; set by the code that assigned these numbers.
        columns: Number of a table -> width of the whole table and its first column here, where these are some columns.
    """

    def __init__(self, specs: Sequence[TableSpec | DynamicTableSpec], seed: int) -> None:
        self.seeds = [seed] * len(specs)
        self.fills: dict[str, float] = {}
        self.keys_of: dict[int, Callable[[Tensor], Tensor]] = {}
        self.columns: dict[int, tuple[int, int]] = {}
        self._specs = tuple(specs)

    def write(self, weights: Tensor, state: Mapping[str, Tensor], places: Tensor, batch: RowBatch) -> None:
        """Write the initial values of the rows of a batch to the ``places int64[n]`` of tensors."""
        for name, values in state.items():
            values[places] = self.fills[name]
        for table, mine in by_table(batch):
            spec, keys, seed = self._specs[table], batch.keys[mine], self.seeds[table]
            if table in self.columns:
                write_columns(weights, places[mine], keys, self.columns[table], spec=spec, seed=seed)
                continue
            drawn_by = self.keys_of[table](keys) if table in self.keys_of else keys
            _draw(weights, places[mine], drawn_by, spec=spec, seed=seed)
