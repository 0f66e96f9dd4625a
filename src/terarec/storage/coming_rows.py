"""`ComingRows`: rows of coming batches and of the next part of the data, read while the present ones train."""

from __future__ import annotations

import torch

from terarec.kernels.slots import RowBatch, row_set
from terarec.storage.fast_tier import FastTier
from terarec.storage.lookahead import Lookahead
from terarec.storage.row_placement import RowPlacement
from terarec.storage.slots import Pin
from terarec.storage.tier_stack import TierStack

_LOADED_AT_ONCE = 64 << 20  # bytes, beside the budget while they are read
_CPU = torch.device("cpu")


class ComingRows:
    """Reads rows before batches need them. Methods may be called by several threads.

    Args:
        stack: The tiers.
        placement: Gives rows slots.
        ahead: Holds rows that have none yet.
    """

    def __init__(self, stack: TierStack, placement: RowPlacement, ahead: Lookahead) -> None:
        self._stack = stack
        self._placement = placement
        self._ahead = ahead

    def ahead(self, batch: RowBatch, number: int) -> None:
        """Read rows of a coming batch that are not in the fast tier; another thread may place rows meanwhile.

        Args:
            batch: Rows, which may repeat.
            number: Of calls of `RowPlacement.place` from now on, that which needs them: 1 for the next.
        """
        with self._stack.lock:
            memory = self._stack.opened()
            if memory.below is None:
                return
            batch = batch.to(self._stack.device)
            absent = memory.slots.want(batch.rows, self._placement.batch + number)
            staged = self._ahead.reserve(batch.part(absent).to(_CPU), self._stack.format)
            below = memory.below
        staged.fill(below)

    def stage_part(self, batch: RowBatch) -> None:
        """Read rows of the next part for which the fast tier has no room; another thread may place rows meanwhile.

        They take memory beside the budget until they are needed, or others are staged.

        Args:
            batch: Rows, which may repeat.
        """
        with self._stack.lock:
            memory = self._stack.opened()
            if memory.below is None:
                return
            absent = (memory.slots.find(batch.rows.to(self._stack.device)) < 0).nonzero()[:, 0].to(_CPU)
            staged = self._ahead.reserve_part(batch.to(_CPU).part(absent), self._stack.format)
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
        with self._stack.lock:
            memory = self._stack.opened()
            absent = memory.slots.find(batch.rows) < 0
            pin = memory.pin(torch.empty(0, dtype=torch.int64, device=self._stack.device))
            has_room = memory.below is not None
            if has_room:
                has_room = self._load_some(memory, batch.part(absent.nonzero()[:, 0]), pin, evicts=evicts)
            return pin, has_room

    def _load_some(self, memory: FastTier, batch: RowBatch, pin: Pin, *, evicts: bool) -> bool:
        """Give slots to as many rows without one, which may repeat, as there is room for; `pin` keeps them.

        Returns:
            Whether these are all rows.
        """
        batch = batch.part(row_set(batch.rows).firsts)
        if evicts:
            self._placement.make_room(batch.rows.numel())
        has_room = batch.rows.numel() <= memory.room
        batch = batch.part(slice(0, memory.room))
        at_once = max(1, _LOADED_AT_ONCE // memory.format.num_bytes)
        for begin in range(0, batch.rows.numel(), at_once):
            _, new = self._placement.bring(memory, batch.part(slice(begin, begin + at_once)), "a keyset")
            pin.slots = torch.cat([pin.slots, new])
        return has_room
