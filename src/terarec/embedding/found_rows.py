"""`FoundRows`: the rows of keys that a collection found, for a caller that looks them up and returns gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from terarec.ops.bag_lookup import bag_lookup
from terarec.ops.layout import BagLayout, single_layout
from terarec.ops.row_update import BagGradient
from terarec.storage import Pin


class FoundRows:
    """The rows of the tables of one arena for N keys, table by table.

    Attributes:
        tables: Names of the tables, in the order of the keys.

    Args:
        weights: Weights [V, D] of the arena, as they are at the lookup.
        keys: int64[N], as gradients name them: keys of static tables, else arena rows.
        places: int64[N], the rows of `weights`.
        layout: Layout of one feature without pooling for each table.
        deposit: Function that keeps a gradient for the row optimizer.
        slots: `places`, if rows are in tiers, for gradients.
        pin: Pin that keeps rows in tiers in place.
    """

    def __init__(
        self,
        weights: Tensor,
        keys: Tensor,
        places: Tensor,
        layout: BagLayout,
        deposit: Callable[[BagGradient], None],
        *,
        slots: Tensor | None = None,
        pin: Pin | None = None,
    ) -> None:
        self.tables = tuple(layout.table_names[table] for table in layout.feature_table)
        self._weights, self._keys, self._places, self._layout = weights, keys, places, layout
        self._deposit, self._slots, self._pin = deposit, slots, pin

    def vectors(self, order: Tensor) -> Tensor:
        """Return the vectors float32[n, D] of the keys at the positions ``order int64[n]``."""
        places = self._places[order]
        layout = single_layout(self._weights.shape[0], self._weights.shape[1], "none")
        return bag_lookup(self._weights, places, torch.tensor([0, places.numel()], device=places.device), layout)

    def keep(self, order: Tensor | None, ends: Tensor, grad: Tensor) -> None:
        """Keep a gradient for the row optimizer, which adds up those of a row in their order.

        Args:
            order: Positions int64[n] of keys, table by table; they may repeat and be left out. None for all keys once.
            ends: int64[T + 1]: table t has the positions ``order[ends[t] : ends[t + 1]]``.
            grad: float32[n, D], the gradients of the vectors at `order`.

        Raises:
            StorageError: The rows have been evicted or moved since.
        """
        keys, slots = self._keys, self._slots
        if order is not None:
            keys, slots = keys[order], None if slots is None else slots[order]
        self._deposit(BagGradient(keys, ends, grad, self._layout, None, slots))

    def release(self) -> None:
        """Let rows in tiers move: no gradient will come."""
        if self._pin is not None:
            self._pin.release()
