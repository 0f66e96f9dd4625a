"""Rows float32[n, D] as the bytes that a row store or a server holds, and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def as_bytes(rows: Tensor, row_bytes: int) -> NDArray[np.uint8]:
    """Return ``rows float32[n, D]`` as uint8[n, row_bytes], with zeros behind a row that is shorter."""
    held: NDArray[np.uint8] = rows.contiguous().numpy().view(np.uint8).reshape(rows.shape[0], 4 * rows.shape[1])
    if held.shape[1] == row_bytes:
        return held
    padded = np.zeros((held.shape[0], row_bytes), np.uint8)
    padded[:, : held.shape[1]] = held
    return padded


def as_rows(held: NDArray[np.uint8], width: int, offset: int = 0, dtype: str = "float32") -> Tensor:
    """Return rows float32[n, D] of ``held uint8[n, row_bytes]``.

    Args:
        held: Bytes of rows.
        width: Length D of a vector.
        offset: First byte of the vector in a row.
        dtype: Element type of the vector: "float32", "bfloat16" or "float16".
    """
    kind: torch.dtype = getattr(torch, dtype)
    part = np.ascontiguousarray(held[:, offset : offset + width * kind.itemsize])
    return torch.from_numpy(part.reshape(-1)).view(kind).view(held.shape[0], width).float()
