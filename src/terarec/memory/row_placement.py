# SPDX-License-Identifier: Apache-2.0
"""Placement of rows in slots of the fast tier: moves the rows of present and coming batches there.

A pinned row keeps its slot until all of its pins are released:

* `RowPlacement.place` pins the rows of a batch until nobody has the pin that it returns; a lookup of several features
  gives each a pin of its own (`share_pin`).
* `hold` keeps the pin of a lookup in training when its gradient arrives. `take` begins the update by all gradients so
  far, and `updated` releases their pins.
* `keep` and `ComingRows.preload` pin rows of a keyset, which batches are about to need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.kernels.slots import Pin, RowBatch, row_set
from terarec.memory.arena_tiers import ArenaTiers
from terarec.memory.fast_tier import FastTier, TierUse
from terarec.memory.initial_values import InitialValues
from terarec.memory.lookahead import Lookahead

_CPU = torch.device("cpu")
_LOADED_AT_ONCE = 64 << 20  # bytes, in addition to the budget while they are read
# Choosing victims looks at every slot, however few are needed.
_EVICTED_SHARE = 256  # a full tier frees at least this fraction of its slots at once, one in 256


class RowLoader:
    """Loads rows that are not in the fast tier: staged ones, those of the tier below, or initial values.

    Args:
        first: Initial values of rows that are in no tier.
        ahead: Staged rows.
        keeps_initial: Whether rows with initial values count as changed, so that slower tiers hold all rows with keys.
    """

    def __init__(self, first: InitialValues, ahead: Lookahead, *, keeps_initial: bool) -> None:
        self._first = first
        self._ahead = ahead
        self._keeps_initial = keeps_initial

    def load(self, memory: FastTier, slots: Tensor, batch: RowBatch) -> TierUse:
        """Write distinct rows to their new slots.

        Args:
            memory: The fast tier.
            slots: int64[n].
            batch: The rows.

        Returns:
            The rows that were read.
        """
        is_there = torch.zeros(slots.numel(), dtype=torch.bool)
        use = TierUse()
        if memory.below is not None:
            on_host = batch.to(_CPU)
            is_left = torch.ones(slots.numel(), dtype=torch.bool)
            # Staged rows first: they were taken from the tier below ahead of time, and need no read now.
            for taken in self._ahead.take(on_host):
                memory.unpack(slots, taken.values, taken.places)
                is_there |= taken.places >= 0
                is_left &= ~taken.is_staged
            staged = int(is_there.sum())
            for left in torch.split(is_left.nonzero()[:, 0], memory.rows_at_once):
                if not left.numel():
                    break
                values = memory.format.new_rows(left.numel())
                there = memory.below.read_others(on_host.part(left), values)  # none just left the fast tier
                memory.unpack(slots[left.to(slots.device)], values, _places(there))
                is_there[left] = there
            num_read = int(is_there.sum())
            use = TierUse(rows_read=num_read, staged=staged, bytes_read=num_read * memory.format.num_bytes)
        fresh = (~is_there).nonzero()[:, 0].to(slots.device)
        if fresh.numel():
            state = {name: values.tensor for name, values in memory.state.items()}
            self._first.write(memory.weights.tensor, state, slots[fresh], batch.part(fresh))
            if self._keeps_initial and memory.below is not None:
                # For dynamic tables: a key is in the files of a checkpoint only if its row was written there.
                memory.slots.is_dirty[slots[fresh]] = True
        return use

    def read(self, memory: FastTier, batch: RowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [n, D] and states of rows that are not in the fast tier; nothing moves."""
        device = memory.weights.tensor.device
        weights, state = memory.format.empty(batch.rows.numel(), device)
        is_there = torch.zeros(batch.rows.numel(), dtype=torch.bool)
        if memory.below is not None:
            values = memory.format.new_rows(batch.rows.numel())
            is_there = memory.below.read(batch.to(_CPU), values)
            got_weights, got_state = memory.format.unpack(values)
            weights.copy_(got_weights)
            for name, part in got_state.items():
                state[name].copy_(part)
        fresh = (~is_there).nonzero()[:, 0].to(device)
        self._first.write(weights, state, fresh, batch.part(fresh))
        return weights, state


def _places(is_there: Tensor) -> Tensor:
    """Return 0 to n - 1, and -1 where ``is_there bool[n]`` is false."""
    return torch.arange(is_there.numel()).masked_fill_(~is_there, -1)


class PlacedRows(NamedTuple):
    """Rows that are in the fast tier and stay there.

    Attributes:
        slots: int64[n], the row of the weights that holds each.
        pin: Pin that keeps them there.
    """

    slots: Tensor
    pin: Pin


class RowPlacement:
    """Brings rows into the fast tier, evicts others for them, and pins those whose gradients are not applied yet.

    Methods may be called by several threads.

    Args:
        tiers: The tiers.
        loader: Finds rows that have no slot.
    """

    def __init__(self, tiers: ArenaTiers, loader: RowLoader) -> None:
        self.batch = 0
        self._tiers = tiers
        self._loader = loader
        self._pins: list[Pin] = []
        self._taken: list[Pin] = []
        self._use = TierUse()

    @property
    def use(self) -> TierUse:
        """Counters so far."""
        return self._use.plus(self._tiers.written)

    def place(self, batch: RowBatch, *, purpose: str, is_trained: bool = True) -> PlacedRows:
        """Bring rows into the fast tier.

        Args:
            batch: Rows, which may repeat.
            purpose: What needs them, for the error.
            is_trained: Whether the batch is one of those that `ComingRows.ahead` counts.
        """
        with self._tiers.lock:
            memory = self._tiers.opened()
            self.batch += is_trained
            # Pinned before others are brought in, which evicts what is not.
            slots, used, absent = memory.slots.touch(batch.rows, pins=True)
            hits = used.numel()
            if absent.numel():
                try:
                    slots[absent], new = self.bring(memory, batch.part(absent), purpose)
                except BaseException:
                    # Rows that were here keep their slots, but no pin: a batch that failed leaves nothing behind.
                    memory.slots.unpin(used)
                    raise
                used = torch.cat([used, new])
            self._use = self._use.plus(TierUse(lookups=used.numel(), hits=hits))
            return PlacedRows(slots, memory.pin(used))

    def share_pin(self, pin: Pin) -> Pin:
        """Return another pin of the same slots."""
        with self._tiers.lock:
            memory = self._tiers.opened()
            # Pins are counted: the rows stay until both are released.
            memory.slots.pin(pin.slots)
            return memory.pin(pin.slots)

    def hold(self, pin: Pin) -> bool:
        """Keep rows in the fast tier until `updated`: a gradient waits for them.

        Returns:
            Whether they are still there.
        """
        with self._tiers.lock:
            # Its slots may have other rows by now, which the gradient must not change.
            if pin.is_released:
                return False
            if pin not in self._pins:
                self._pins.append(pin)
            return True

    def take(self) -> None:
        """Note that an update by the gradients that wait begins; `updated` or another `take` ends it."""
        with self._tiers.lock:
            # An update that failed is never reported, and must not pin rows for ever.
            self._release_taken()
            self._taken, self._pins = self._pins, []

    def updated(self, slots: Sequence[Tensor | None], table_lr: Tensor | None) -> None:
        """Record that an update changed rows, and release those that it pinned.

        Args:
            slots: int64[n] each.
            table_lr: float32[T], factors of the learning rate; rows of tables with 0 did not change.
        """
        with self._tiers.lock:
            memory = self._tiers.opened()
            for changed in slots:
                assert changed is not None, "gradients of tiered rows have places"
                # Rows that were removed meanwhile are gone, and must not be written below.
                changed = changed[memory.slots.is_held[changed]]
                # Rows that did not change need not be written back.
                if table_lr is not None:
                    is_trained = table_lr.to(self._tiers.device)[memory.slots.owners.tables[changed].long()] != 0.0
                    changed = changed[is_trained]
                memory.slots.mark_changed(changed)
            self._release_taken()

    def keep(self, batch: RowBatch) -> Pin:
        """Pin the rows, which may repeat, that are in the fast tier, and return the pin."""
        with self._tiers.lock:
            memory = self._tiers.opened()
            return memory.pin(memory.slots.touch(batch.rows, pins=True).used)

    def make_room(self, rows: int) -> None:
        """Free slots of rows that are not pinned, until there is room for a number of rows."""
        with self._tiers.lock:
            memory = self._tiers.opened()
            missing = rows - memory.room
            if missing > 0 and memory.below is not None:
                _release(memory, memory.victims(missing, self.batch))

    def bring(self, memory: FastTier, batch: RowBatch, purpose: str) -> tuple[Tensor, Tensor]:
        """Give slots to rows without one, which may repeat; the caller holds the lock.

        Returns:
            The slots of all and, held, each new one once.
        """
        self._tiers.sizes.fit(memory, self._tiers.device)
        if memory.below is not None:
            memory.below.wait()  # rows that left the fast tier for the batch before may be wanted now
        # Each row once, since a slot belongs to one row.
        arrivals = row_set(batch.rows)
        batch = batch.part(arrivals.firsts)
        if batch.rows.numel() > memory.room:
            self._evict_for(memory, batch.rows.numel(), purpose)
        new = memory.slots.assign(batch)
        try:
            self._use = self._use.plus(self._loader.load(memory, new, batch))
        except BaseException:
            # Their rows were not read: no lookup may find them.
            memory.slots.unpin(new)
            memory.slots.release(new)
            raise
        return new[arrivals.places], new

    def _evict_for(self, memory: FastTier, needed: int, purpose: str) -> None:
        missing = needed - memory.room
        # At least a share of the slots, since choosing victims looks at all of them.
        wanted = max(missing, memory.capacity // _EVICTED_SHARE)
        # Without a slower tier a changed row has nowhere to go; one that was never trained can be drawn again.
        victims = memory.victims(wanted, self.batch, keeps_dirty=memory.below is None)
        if victims.numel() < missing:
            raise self._tiers.sizes.too_small(memory, needed, purpose)
        _release(memory, victims)

    def _release_taken(self) -> None:
        for pin in self._taken:
            pin.release()
        self._taken = []


def _release(memory: FastTier, victims: Tensor) -> None:
    """Write the rows of ``victims int64[n]`` back where they changed, and take their slots away."""
    slots = memory.slots
    memory.write_back(victims[slots.is_dirty[victims]])
    slots.release(victims)


class ComingRows:
    """Reads rows before batches need them. Methods may be called by several threads."""

    def __init__(self, tiers: ArenaTiers, placement: RowPlacement, ahead: Lookahead) -> None:
        self._tiers = tiers
        self._placement = placement
        self._ahead = ahead

    def ahead(self, batch: RowBatch, number: int) -> None:
        """Read rows of a coming batch that are not in the fast tier; another thread may place rows meanwhile.

        Args:
            batch: Rows, which may repeat.
            number: Number of the call of `RowPlacement.place` that needs them, counted from now on: 1 for the next.
        """
        with self._tiers.lock:
            memory = self._tiers.opened()
            if memory.below is None:
                return
            batch = batch.to(self._tiers.device)
            absent = memory.slots.mark_needed(batch.rows, self._placement.batch + number)
            staged = self._ahead.reserve(batch.part(absent).to(_CPU), self._tiers.format)
            below = memory.below
        # Without the lock: the batch that trains must not wait for this read.
        staged.fill(below)

    def stage_part(self, batch: RowBatch) -> None:
        """Read rows of the next part for which the fast tier has no room; another thread may place rows meanwhile.

        They take memory in addition to the budget until they are needed, or others are staged.

        Args:
            batch: Rows, which may repeat.
        """
        with self._tiers.lock:
            memory = self._tiers.opened()
            if memory.below is None:
                return
            absent = (memory.slots.find(batch.rows.to(self._tiers.device)) < 0).nonzero()[:, 0].to(_CPU)
            staged = self._ahead.reserve_part(batch.to(_CPU).part(absent), self._tiers.format)
            below = memory.below
        staged.fill(below)

    def preload(self, batch: RowBatch, *, evicts: bool = True) -> tuple[Pin, bool]:
        """Bring rows into the fast tier that will be needed for a while, as many as there is room for.

        Args:
            batch: Rows, which may repeat.
            evicts: Whether rows that nothing keeps give them theirs.

        Returns:
            What keeps those there that it brought, and whether all of them had room.
        """
        with self._tiers.lock:
            memory = self._tiers.opened()
            absent = memory.slots.find(batch.rows) < 0
            pin = memory.pin(torch.empty(0, dtype=torch.int64, device=self._tiers.device))
            has_room = memory.below is not None
            if has_room:
                has_room = self._load_some(memory, batch.part(absent.nonzero()[:, 0]), pin, evicts=evicts)
            return pin, has_room

    def _load_some(self, memory: FastTier, batch: RowBatch, pin: Pin, *, evicts: bool) -> bool:
        """Give slots, which `pin` keeps, to rows without one while there is room; return whether these are all rows."""
        batch = batch.part(row_set(batch.rows).firsts)
        if evicts:
            self._placement.make_room(batch.rows.numel())
        has_room = batch.rows.numel() <= memory.room
        batch = batch.part(slice(0, memory.room))
        # In parts, so that copies on the way take bounded memory.
        at_once = max(1, _LOADED_AT_ONCE // memory.format.num_bytes)
        for begin in range(0, batch.rows.numel(), at_once):
            _, new = self._placement.bring(memory, batch.part(slice(begin, begin + at_once)), "a keyset")
            # Each chunk joins the pin at once, so that the next one does not evict it.
            pin.slots = torch.cat([pin.slots, new])
        return has_room
