# SPDX-License-Identifier: Apache-2.0
"""The probabilities of items in a batch, estimated from the stream of batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MULTIPLIER = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX; its products' high bits depend on all bits of a key


class ItemFrequency(nn.Module):
    """Streaming estimate of the probability that an item is in a batch (Yi et al. 2019, RecSys, algorithm 2).

    A cell keeps the number of the last batch with its item and the mean interval between such batches; the probability
    is 1 / interval. The first intervals of a cell count alike, so that its estimate is exact counting; from
    1 / decay of them on, a new one counts `decay`, so that the estimate follows changes. The paper starts from a guess
    instead. The cells are buffers: checkpoints have them.

    Args:
        num_items: Number of items, each of which has its own cell; None for any int64 keys.
        buckets: Number of cells for any keys; items that share one by their hash look more frequent.
        decay: Weight of a new interval.
    """

    last_batch: Tensor
    sightings: Tensor
    interval: Tensor
    num_batches: Tensor

    def __init__(self, num_items: int | None, *, buckets: int, decay: float) -> None:
        super().__init__()
        self.is_hashed = num_items is None
        self.decay = decay
        size = buckets if num_items is None else num_items
        self.register_buffer("last_batch", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("sightings", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("interval", torch.zeros(size))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))

    def update(self, keys: Tensor) -> None:
        """Update with the items of a batch: int64[B], each counted once."""
        cells = self._cells(keys)
        self.num_batches += 1
        # A cell may occur often in `cells`; all of these writes have the same value.
        sightings = self.sightings[cells] + 1
        weight = (1.0 / sightings).clamp_min(self.decay)
        passed = (self.num_batches - self.last_batch[cells]).float()
        self.interval[cells] = torch.lerp(self.interval[cells], passed, weight)
        self.sightings[cells] = sightings
        self.last_batch[cells] = self.num_batches.expand_as(cells)

    def log_probability(self, keys: Tensor) -> Tensor:
        """Return float[B] for int64[B]; an unseen item counts as seen once in all batches so far."""
        interval = self.interval[self._cells(keys)]
        return -torch.where(interval > 0, interval, self.num_batches.clamp_min(1).float()).log()

    def _cells(self, keys: Tensor) -> Tensor:
        if not self.is_hashed:
            return keys
        # The product moves low bits up only: high bits of a key are first folded into the low half.
        mixed = (keys ^ (keys >> 32)) * _MULTIPLIER
        return (mixed >> 32).remainder(self.interval.shape[0])
