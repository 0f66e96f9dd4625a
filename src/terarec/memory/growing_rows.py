# SPDX-License-Identifier: Apache-2.0
"""Rows that grow in number: `GrowingTensor`, and the weights and optimizer state of an arena in one memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.errors import ConfigError, NoSpaceError, StorageError
from terarec.kernels import memory
from terarec.kernels.rows import initialise_keys, reserve_rows
from terarec.memory.initial_values import write_columns
from terarec.ops.row_update import state_dtype
from terarec.spec import DynamicTableSpec

# NumPy types of the memory that tensors share; NumPy has no bfloat16.
_NUMPY_TYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}


class GrowingTensor:
    """A tensor ``[rows, ...]`` to which rows of zeros can be appended.

    In host memory it keeps its address: it reserves as much address space as the machine has memory, and commits
    memory as rows are appended. On other devices growing allocates and copies.

    Args:
        row_shape: Shape of a row, ``()`` for a number.
        dtype: Element type, one of `_NUMPY_TYPES`.
        device: Device of the rows.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._row_shape = row_shape
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self.tensor = torch.empty(0, *row_shape, dtype=dtype, device=device)
        self._reserved = None
        if device.type == "cpu":
            most = memory.total_bytes() // max(1, self.row_bytes)
            self._reserved = reserve_rows((most, *row_shape), _NUMPY_TYPES[dtype])

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows; the new ones are zero.

        Raises:
            StorageError: Not enough memory; nothing has changed.
        """
        if self._reserved is not None:
            self._reserved.grow(rows)
            # The view is for bfloat16, which lies in the memory as int16.
            self.tensor = torch.from_numpy(self._reserved.array(rows)).view(self.tensor.dtype)
            return
        try:
            grown = self.tensor.new_zeros(rows, *self._row_shape)
        except torch.OutOfMemoryError as error:
            raise NoSpaceError("rows", f"{rows * self.row_bytes:,} bytes requested on {self.tensor.device}") from error
        grown[: self.tensor.shape[0]] = self.tensor
        self.tensor = grown

    def discard(self, begin: int, end: int) -> None:
        """Give the host memory of the rows ``begin <= row < end`` back until they are written; values are lost."""
        # The memory of a device goes with the tensor alone.
        if self._reserved is not None:
            self._reserved.discard(begin, end)

    def to(self, device: torch.device) -> GrowingTensor:
        """Return a copy on `device`."""
        return _copied(self._row_shape, self.tensor, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingTensor:
        twin = self.to(self.tensor.device)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # Reserved address space cannot be pickled. A tensor would be moved to shared memory on its way to another
        # process, and so out of that address space.
        copy = self.tensor.cpu()
        rows = copy.view(torch.int16) if copy.dtype == torch.bfloat16 else copy
        return _rebuilt, (self._row_shape, rows.numpy(), copy.dtype, self.tensor.device)


def _rebuilt(row_shape: tuple[int, ...], rows: NDArray[Any], dtype: torch.dtype, device: torch.device) -> GrowingTensor:
    return _copied(row_shape, torch.from_numpy(rows).view(dtype), device)


def _copied(row_shape: tuple[int, ...], rows: Tensor, device: torch.device) -> GrowingTensor:
    copied = GrowingTensor(row_shape, rows.dtype, device)
    copied.grow(rows.shape[0])
    copied.tensor.copy_(rows)
    return copied


class GrowingRows:
    """Weights and optimizer state of all rows of an arena of dynamic tables, in the order of the rows.

    Attributes:
        num_rows: Rows V that have memory.
    """

    def __init__(self, specs: Sequence[DynamicTableSpec], *, seed: int) -> None:
        self.num_rows = 0
        self._columns: dict[int, tuple[int, int]] = {}
        self._specs = tuple(specs)
        self._seed = seed
        self._weights = GrowingTensor((specs[0].width,), getattr(torch, specs[0].dtype), torch.device("cpu"))
        self._state: dict[str, GrowingTensor] = {}
        self._fills: dict[str, float] = {}

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._weights.tensor.device

    @property
    def weights(self) -> Tensor:
        """Weights [V, D]; in host memory always at one address."""
        return self._weights.tensor

    @property
    def state(self) -> dict[str, Tensor]:
        """Name -> optimizer state [V, D] or [V]; empty until `attach_state`."""
        return {name: values.tensor for name, values in self._state.items()}

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer states."""
        return tuple(self._state)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weights and state."""
        return sum(block.row_bytes for block in self._blocks())

    @property
    def bytes_per_row(self) -> int:
        """Bytes of memory that a further row takes."""
        return self.row_bytes

    def draw_columns(self, table: int, width: int, first: int) -> None:
        """Let initial weights of a table be some columns of those of a table of `width` columns, from `first` on."""
        self._columns[table] = (width, first)

    def attach_state(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], *, fills: Mapping[str, float] | None = None
    ) -> None:
        """Allocate an optimizer's state, in place of any former optimizer's.

        Args:
            shapes: Name and shape [V, ...] of each state tensor, as ``ops.row_update.state_shapes`` gives them.
            fills: State -> its first value, of later rows too; 0 for those that are not named.
        """
        self._state = {}
        for name, shape in shapes:
            values = GrowingTensor(tuple(shape[1:]), state_dtype(name), self.device)
            if self.device.type == "cpu":
                tables = ", ".join(repr(spec.name) for spec in self._specs[:3])
                memory.require(self.num_rows * values.row_bytes, f"optimizer state {name!r} of dynamic tables {tables}")
            values.grow(self.num_rows)
            self._state[name] = values
            self._fills[name] = (fills or {}).get(name, 0.0)
            if self._fills[name]:  # else the rows are zero, and spare ones take no memory yet
                values.tensor[:] = self._fills[name]

    def grow(self, rows: int) -> None:
        """Have memory for `rows` rows.

        Raises:
            StorageError: No memory for them; nothing has changed then.
        """
        try:
            for block in self._blocks():
                block.grow(rows)
        except StorageError:
            for block in self._blocks():
                # Those that grew keep their memory for the next attempt, but all have one length.
                block.tensor = block.tensor[: self.num_rows]
            raise
        self.num_rows = rows

    def begin(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Give ``rows int64[n]`` the initial weights of the keys int64[n] of a table, and fresh state."""
        for name, values in self._state.items():
            values.tensor[rows] = self._fills[name]
        spec = self._specs[table]
        if table in self._columns:
            write_columns(self.weights, rows, keys, self._columns[table], spec=spec, seed=self._seed)
            return
        initialise_keys(
            self.weights,
            rows,
            keys,
            table=spec.name,
            seed=self._seed,
            initializer=spec.initializer,
            scale=spec.init_scale,
        )

    def read(self, table: int, rows: Tensor, keys: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return copies of the weights and states of ``rows int64[n]``."""
        return self.weights[rows], {name: tensor[rows] for name, tensor in self.state.items()}

    def write(self, table: int, rows: Tensor, keys: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Set the weights and those states of ``rows int64[n]`` that are given."""
        self.weights.index_copy_(0, rows, weights.to(self.device))
        for name, values in state.items():
            self._state[name].tensor.index_copy_(0, rows, values.to(self.device))

    def forget(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Do nothing: rows without a key are not changed."""

    def reset_defaults(self, weights: Tensor) -> None:
        """Set the first rows to ``weights [T, D]`` and their state to its initial values."""
        self.weights[: weights.shape[0]] = weights
        for name, values in self._state.items():
            values.tensor[: weights.shape[0]] = self._fills[name]

    def move(self, device: torch.device) -> None:
        """Take everything to `device`.

        Raises:
            ConfigError: A device without memory.
            StorageError: Not enough memory there.
        """
        if device == self.device:
            return
        check_has_memory(device)
        # All are copied before any is replaced: if the device has too little memory, everything stays where it is.
        weights = self._weights.to(device)
        self._state = {name: values.to(device) for name, values in self._state.items()}
        self._weights = weights

    def _blocks(self) -> list[GrowingTensor]:
        return [self._weights, *self._state.values()]


def check_has_memory(device: torch.device) -> None:
    """Raise `ConfigError` for a device on which tensors have no elements."""
    if device.type == "meta":
        raise ConfigError("arena", "got device 'meta', expected one with memory such as 'cpu' or 'cuda'")
