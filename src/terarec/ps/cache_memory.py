# SPDX-License-Identifier: Apache-2.0
"""`CacheMemory`: the rows of a cache on a device, in one block that a single lookup reads."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.contract import ROW_TAIL_BYTES
from terarec.kernels.rows import allocate_rows
from terarec.kernels.slots import RowPart, scatter_rows
from terarec.ops import BagLayout, bag_lookup, quantize_rows, quantized_bag_lookup
from terarec.ops.layout import single_layout


class CacheMemory:
    """Rows of one width, as float32 or as 8-bit codes with a scale and an offset.

    Args:
        num_rows: Number of rows V.
        width: Length D of a vector.
        device: Device of the rows.
        is_coded: Whether rows are 8-bit codes.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device, *, is_coded: bool) -> None:
        self.device = device
        self._is_coded = is_coded
        self._layout = single_layout(num_rows, width, "none")
        if is_coded:
            self._rows = torch.zeros(num_rows, width + ROW_TAIL_BYTES, dtype=torch.uint8, device=device)
        elif device.type == "cpu":
            # On huge pages, as the rows of training.
            self._rows = torch.from_numpy(allocate_rows((num_rows, width)))
        else:
            self._rows = torch.zeros(num_rows, width, device=device)

    def packed(self, rows: Tensor) -> Tensor:
        """Return ``rows float32[n, D]`` on any device in the form in which they are held."""
        rows = rows.to(self.device)
        return quantize_rows(rows) if self._is_coded else rows

    def write(self, places: Tensor, values: Tensor) -> None:
        """Set the rows at ``places int64[n]``, distinct, to packed `values`."""
        scatter_rows([RowPart(self._rows, 0)], places, values.contiguous().view(torch.uint8))

    def write_held(self, places: Tensor, values: Tensor) -> None:
        """Set the rows at ``places int64[n]``, distinct except for -1, whose values are left out."""
        # Of the rows that got no slot neither place nor value is used.
        sources = torch.where(places >= 0, torch.arange(places.numel(), device=places.device), -1)
        scatter_rows([RowPart(self._rows, 0)], places, values.contiguous().view(torch.uint8), sources)

    def rows(self, places: Tensor) -> Tensor:
        """Return the rows float32[n, D] at ``places int64[n]``."""
        return self.lookup(places, torch.tensor([0, places.numel()], device=self.device), self._layout)

    def lookup(self, slots: Tensor, offsets: Tensor, layout: BagLayout, key_weights: Tensor | None = None) -> Tensor:
        """Look up bags of ``slots int64[N]``; arguments and result are those of `terarec.ops.bag_lookup`."""
        op = quantized_bag_lookup if self._is_coded else bag_lookup
        return op(self._rows, slots, offsets, layout, key_weights=key_weights)
