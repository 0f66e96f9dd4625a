# SPDX-License-Identifier: Apache-2.0
"""`GrowingTensor`: a tensor to which rows are appended, in host memory without a copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.errors import NoSpaceError
from terarec.kernels import memory
from terarec.kernels.rows import reserve_rows

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

    Attributes:
        tensor: Rows.
        row_bytes: Bytes of a row.

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
        """Return a copy on `device`.

        Raises:
            StorageError: Not enough memory there.
        """
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
