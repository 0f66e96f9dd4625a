"""`RowLoader`: loads rows that have no slot in the fast tier."""

from __future__ import annotations

import torch
from torch import Tensor

from terarec.kernels.slots import RowBatch
from terarec.storage.fast_tier import FastTier
from terarec.storage.first_values import FirstValues
from terarec.storage.lookahead import Lookahead
from terarec.storage.tier_use import TierUse

_CPU = torch.device("cpu")


class RowLoader:
    """Loads rows that are not in the fast tier: staged ones, those of the tier below, or first values.

    Args:
        first: First values of rows that are in no tier.
        ahead: Staged rows.
        keeps_first: Whether rows with first values count as changed, so that slower tiers hold every row with a key.
    """

    def __init__(self, first: FirstValues, ahead: Lookahead, *, keeps_first: bool) -> None:
        self._first = first
        self._ahead = ahead
        self._keeps_first = keeps_first

    def load(self, memory: FastTier, slots: Tensor, batch: RowBatch) -> TierUse:
        """Write distinct rows to their new slots.

        Args:
            memory: The fast tier.
            slots: int64[n].
            batch: The rows.

        Returns:
            The rows that were read.
        """
        found = torch.zeros(slots.numel(), dtype=torch.bool)
        use = TierUse()
        if memory.below is not None:
            held = batch.to(_CPU)
            is_left = torch.ones(slots.numel(), dtype=torch.bool)
            for taken in self._ahead.take(held):
                memory.unpack(slots, taken.values, taken.places)
                found |= taken.places >= 0
                is_left &= ~taken.is_staged
            staged = int(found.sum())
            for left in torch.split(is_left.nonzero()[:, 0], memory.rows_at_once):
                if not left.numel():
                    break
                values = memory.format.new_rows(left.numel())
                there = memory.below.read_others(held.part(left), values)  # none just left the fast tier
                memory.unpack(slots[left.to(slots.device)], values, _places(there))
                found[left] = there
            num_read = int(found.sum())
            use = TierUse(rows_read=num_read, staged=staged, bytes_read=num_read * memory.format.num_bytes)
        fresh = (~found).nonzero()[:, 0].to(slots.device)
        if fresh.numel():
            state = {name: held.tensor for name, held in memory.state.items()}
            self._first.write(memory.weights.tensor, state, slots[fresh], batch.part(fresh))
            if self._keeps_first and memory.below is not None:
                memory.slots.is_dirty[slots[fresh]] = True
        return use

    def read(self, memory: FastTier, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [n, D] and states of rows that are not in the fast tier; nothing moves."""
        device = memory.weights.tensor.device
        weights, state = memory.format.empty(batch.rows.numel(), device)
        found = torch.zeros(batch.rows.numel(), dtype=torch.bool)
        if memory.below is not None:
            values = memory.format.new_rows(batch.rows.numel())
            found = memory.below.read(batch.to(_CPU), values)
            got_weights, got_state = memory.format.unpack(values)
            weights.copy_(got_weights)
            for name, part in got_state.items():
                state[name].copy_(part)
        fresh = (~found).nonzero()[:, 0].to(device)
        self._first.write(weights, state, fresh, batch.part(fresh))
        return weights, state


def _places(found: Tensor) -> Tensor:
    """Return 0 to n - 1, and -1 where ``found bool[n]`` is false."""
    return torch.arange(found.numel()).masked_fill_(~found, -1)
