"""`GrowingTensor`: rows that become more without those that are there being copied, where the device allows it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.errors import StorageError
from terarec.kernels import memory
from terarec.kernels.rows import reserve_rows

# What NumPy lends its memory as; it has no bfloat16.
_LENT_AS = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


class GrowingTensor:
    """A tensor ``[rows, ...]`` that grows at its end by zeros.

    In host memory it keeps its address: address space for as much as the machine has memory is reserved, and memory
    is taken as rows come. On other devices growing allocates and copies.

    Attributes:
        tensor: the rows there are.
        row_bytes: bytes of a row.

    Args:
        row_shape: shape of a row, ``()`` for a number.
        dtype: one that NumPy can lend.
        device: where the rows are.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._row_shape = row_shape
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self.tensor = torch.empty(0, *row_shape, dtype=dtype, device=device)
        self._reserved = None
        if device.type == "cpu":
            most = memory.total_bytes() // max(1, self.row_bytes)
            self._reserved = reserve_rows((most, *row_shape), _LENT_AS[dtype])

    def grow(self, rows: int) -> None:
        """Become `rows` rows long, the new ones zero.

        Raises:
            StorageError: no memory for them; nothing has changed then.
        """
        if self._reserved is not None:
            self._reserved.grow(rows)
            self.tensor = torch.from_numpy(self._reserved.array(rows)).view(self.tensor.dtype)
            return
        try:
            grown = self.tensor.new_zeros(rows, *self._row_shape)
        except torch.OutOfMemoryError as error:
            raise StorageError(f"{rows * self.row_bytes:,} bytes asked for on {self.tensor.device}") from error
        grown[: self.tensor.shape[0]] = self.tensor
        self.tensor = grown

    def to(self, device: torch.device) -> GrowingTensor:
        """A copy on `device`.

        Raises:
            StorageError: no memory there.
        """
        return _copied(self._row_shape, self.tensor, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrowingTensor:
        twin = self.to(self.tensor.device)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # Address space that is reserved cannot be pickled. As a tensor the rows would move to shared memory on their
        # way to another process, and out of that address space.
        held = self.tensor.cpu()
        rows = held.view(torch.int16) if held.dtype == torch.bfloat16 else held
        return _rebuilt, (self._row_shape, rows.numpy(), held.dtype, self.tensor.device)


def _rebuilt(row_shape: tuple[int, ...], rows: NDArray[Any], dtype: torch.dtype, device: torch.device) -> GrowingTensor:
    return _copied(row_shape, torch.from_numpy(rows).view(dtype), device)


def _copied(row_shape: tuple[int, ...], rows: Tensor, device: torch.device) -> GrowingTensor:
    copied = GrowingTensor(row_shape, rows.dtype, device)
    copied.grow(rows.shape[0])
    copied.tensor.copy_(rows)
    return copied
