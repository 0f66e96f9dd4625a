"""The rows of keys that come and go no more."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.hash_index import new_hash_index


class FrozenKeys:
    """Finds rows that lie in the order of their keys.

    Args:
        keys: int64[n], distinct.
        first_row: row of the first key; the others follow.
        default_row: row of all other keys.
    """

    def __init__(self, keys: Tensor, *, first_row: int, default_row: int) -> None:
        self._default_row = default_row
        self._index = new_hash_index(keys.device)
        self._index.assign(keys, torch.arange(first_row, first_row + keys.numel(), device=keys.device))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the index."""
        return self._index.memory_bytes

    def rows(self, keys: Tensor, *, train: bool) -> Tensor:
        """Rows int64[n] of ``keys int64[n]``; `train` changes nothing."""
        rows = self._index.find(keys)
        return rows.masked_fill_(rows < 0, self._default_row)
