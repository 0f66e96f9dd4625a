"""`RowPlacement`: rows that batches need, in slots of the fast tier until their gradients are applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.kernels.slots import RowBatch, row_set
from terarec.storage.fast_tier import FastTier
from terarec.storage.row_loader import RowLoader
from terarec.storage.slots import Pin
from terarec.storage.tier_stack import TierStack
from terarec.storage.tier_use import TierUse

_EVICTED_SHARE = 256  # a full tier frees at least this fraction of its slots at once, one in 256


class PlacedRows(NamedTuple):
    """Rows that are in the fast tier and stay there.

    Attributes:
        slots: int64[n], the row of the weights that holds each.
        pin: What keeps them there.
    """

    slots: Tensor
    pin: Pin


class RowPlacement:
    """Brings rows into the fast tier, evicts others for them, and pins those whose gradients are not applied yet.

    Methods may be called by several threads.

    Attributes:
        batch: Number of trained batches that were placed.

    Args:
        stack: The tiers.
        loader: Finds rows that have no slot.
    """

    def __init__(self, stack: TierStack, loader: RowLoader) -> None:
        self.batch = 0
        self._stack = stack
        self._loader = loader
        self._held: list[Pin] = []
        self._taken: list[Pin] = []
        self._use = TierUse()

    @property
    def use(self) -> TierUse:
        """Counters so far."""
        return self._use.plus(self._stack.written)

    def place(self, batch: RowBatch, *, purpose: str, is_trained: bool = True) -> PlacedRows:
        """Bring rows into the fast tier.

        Args:
            batch: Rows, which may repeat.
            purpose: What needs them, for the error.
            is_trained: Whether the batch is one of those that `ComingRows.ahead` counts.

        Raises:
            BudgetError: They do not fit beside the rows that pending gradients need.
        """
        with self._stack.lock:
            memory = self._stack.opened()
            self.batch += is_trained
            slots, used, absent = memory.slots.touch(batch.rows, pins=True)
            hits = used.numel()
            if absent.numel():
                try:
                    slots[absent], new = self.bring(memory, batch.part(absent), purpose)
                except BaseException:
                    memory.slots.let_go(used)
                    raise
                used = torch.cat([used, new])
            self._use = self._use.plus(TierUse(lookups=used.numel(), hits=hits))
            return PlacedRows(slots, memory.pin(used))

    def share_pin(self, pin: Pin) -> Pin:
        """Return another pin of the same slots."""
        with self._stack.lock:
            memory = self._stack.opened()
            memory.slots.hold(pin.slots)
            return memory.pin(pin.slots)

    def hold(self, pin: Pin) -> bool:
        """Keep rows in the fast tier until `updated`: a gradient waits for them.

        Returns:
            Whether they are still there.
        """
        with self._stack.lock:
            if pin.is_released:
                return False
            if pin not in self._held:
                self._held.append(pin)
            return True

    def take(self) -> None:
        """Note that an update by the gradients that wait begins; `updated` or another `take` ends it."""
        with self._stack.lock:
            self._release_taken()
            self._taken, self._held = self._held, []

    def updated(self, slots: Sequence[Tensor | None], table_lr: Tensor | None) -> None:
        """Record that an update changed rows, and release those that it pinned.

        Args:
            slots: int64[n] each.
            table_lr: float32[T], factors of the learning rate; rows of tables with 0 did not change.
        """
        with self._stack.lock:
            memory = self._stack.opened()
            for changed in slots:
                assert changed is not None, "gradients of tiered rows have places"
                if table_lr is not None:
                    is_trained = table_lr.to(self._stack.device)[memory.slots.owners.tables[changed].long()] != 0.0
                    changed = changed[is_trained]
                memory.slots.mark_changed(changed)
            self._release_taken()

    def keep(self, batch: RowBatch) -> Pin:
        """Return what keeps those rows, which may repeat, in the fast tier that are there."""
        with self._stack.lock:
            memory = self._stack.opened()
            return memory.pin(memory.slots.touch(batch.rows, pins=True).used)

    def make_room(self, rows: int) -> None:
        """Free slots of rows that are not pinned, until there is room for a number of rows."""
        with self._stack.lock:
            memory = self._stack.opened()
            missing = rows - memory.room
            if missing > 0 and memory.below is not None:
                _release(memory, memory.victims(missing, self.batch))

    def bring(self, memory: FastTier, batch: RowBatch, purpose: str) -> tuple[Tensor, Tensor]:
        """Give slots to rows without one, which may repeat; the caller holds the lock.

        Args:
            memory: The fast tier.
            batch: The rows.
            purpose: What needs them, for the error.

        Returns:
            The slots of all and, held, each new one once.

        Raises:
            BudgetError: They do not fit beside the rows that are pinned.
        """
        self._stack.sizes.fit(memory, self._stack.device)
        if memory.below is not None:
            memory.below.settle()  # rows that left the fast tier for the batch before may be wanted now
        arrivals = row_set(batch.rows)
        batch = batch.part(arrivals.firsts)
        if batch.rows.numel() > memory.room:
            self._evict_for(memory, batch.rows.numel(), purpose)
        new = memory.slots.assign(batch)
        try:
            self._use = self._use.plus(self._loader.load(memory, new, batch))
        except BaseException:
            memory.slots.let_go(new)
            memory.slots.release(new)
            raise
        return new[arrivals.places], new

    def _evict_for(self, memory: FastTier, needed: int, purpose: str) -> None:
        missing = needed - memory.room
        wanted = max(missing, memory.capacity // _EVICTED_SHARE)
        victims = memory.victims(wanted, self.batch, keeps_dirty=memory.below is None)
        if victims.numel() < missing:
            raise self._stack.sizes.too_small(memory, needed, purpose)
        _release(memory, victims)

    def _release_taken(self) -> None:
        for pin in self._taken:
            pin.release()
        self._taken = []


def _release(memory: FastTier, victims: Tensor) -> None:
    """Write the rows of ``victims int64[n]`` back where they changed, and take their slots away."""
    slots = memory.slots
    memory.write_back(victims[slots.is_dirty[victims] & slots.is_held[victims]])
    slots.release(victims)
