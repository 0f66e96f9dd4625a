# SPDX-License-Identifier: Apache-2.0
"""Single occurrences of keys, whose gradients deterministic mode sums in the order of the whole batch's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.dist.placement import PlacedTable


class Occurrences(NamedTuple):
    """Occurrences of keys of one feature by the ranks that their gradients go to.

    Attributes:
        table: Number of the table.
        order: int64[n], the occurrences: those of keys of rank 0's rows, ..., of rank R - 1's, and of rows with copies.
        places: int64[n], in this order, the place of each key among those of its rank, or of copies.
        counts: int64[R + 1], the occurrences of keys of each rank's rows, and of rows with copies; by column all for
            each rank of the table.
        by_column: Whether all occurrences go to all ranks of the table.
    """

    table: int
    order: Tensor
    places: Tensor
    counts: Tensor
    by_column: bool

    def part(self, rank: int, counts: Sequence[int], num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the occurrences whose gradient goes to `rank`, and the places of their keys among those there.

        Args:
            rank: The rank.
            counts: `counts` in host memory.
            num_rows: Keys of its rows in the request to it, behind which there are those of rows with copies.
        """
        first = 0 if self.by_column else sum(counts[:rank])
        own, copies = slice(first, first + counts[rank]), slice(self.order.numel() - counts[-1], self.order.numel())
        if not counts[-1]:
            return self.order[own], self.places[own]
        places = torch.cat([self.places[own], self.places[copies] + num_rows])
        return torch.cat([self.order[own], self.order[copies]]), places


def occurrences(number: int, table: PlacedTable, rows: Tensor, places: Tensor) -> Occurrences:
    """Sort the occurrences of keys of a feature by the ranks that their gradients go to, without a wait for a device.

    Args:
        number: Number of the table.
        table: The table.
        rows: int64[R], its distinct keys for each rank without those of copies.
        places: int64[n], the place of each key among the distinct ones.
    """
    if table.by_column:
        count = torch.full_like(rows[0], places.numel())
        counts = torch.stack([count if rank in table.ranks else count * 0 for rank in range(rows.numel())])
        every = torch.arange(places.numel(), device=places.device)
        return Occurrences(number, every, places, torch.cat([counts, counts.new_zeros(1)]), by_column=True)
    ends = rows.cumsum(0)
    # Places of keys of rows with copies are behind those of all ranks.
    owners = torch.bucketize(places, ends, right=True)
    # Stable: the gradients of a row are summed in the order of the samples.
    order = owners.argsort(stable=True)
    counts = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=places.device)
    counts.index_add_(0, owners, torch.ones_like(places))
    starts = torch.cat([ends - rows, ends[-1:]])
    return Occurrences(number, order, (places - starts[owners])[order], counts, by_column=False)
