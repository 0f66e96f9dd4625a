# SPDX-License-Identifier: Apache-2.0
"""`FastTier`: the rows that kernels read, in slots, above a slower tier; and counters of what moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from terarec.kernels.slots import Pin, RowBatch, RowPart, SlotLimit, gather_rows, new_slot_map, scatter_rows
from terarec.memory.growing_rows import GrowingTensor
from terarec.memory.row_format import RowFormat
from terarec.memory.write_behind import WrittenBehind
from terarec.ops.row_update import are_finite

MOVED_BYTES = 32 << 20
"""Bytes of rows that are copied at once on their way to the slower tier or from it: in addition
to the budget two such copies may exist, that of a batch and the one that is being written."""


class TierUse(NamedTuple):
    """Counters of a tiered arena.

    Attributes:
        lookups: Distinct rows that batches needed.
        hits: Rows found in the fast tier.
        rows_read: Rows read from the tier below.
        rows_written: Rows written to it.
        staged: Rows of `rows_read` that were read ahead.
        bytes_read: Bytes of the rows read.
        bytes_written: Bytes of the rows written.
    """

    lookups: int = 0
    hits: int = 0
    rows_read: int = 0
    rows_written: int = 0
    staged: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the lookups that were hits; 1 without lookups."""
        return self.hits / self.lookups if self.lookups else 1.0

    def plus(self, other: TierUse) -> TierUse:
        """Return the sums."""
        return TierUse(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: TierUse) -> TierUse:
        """Return the differences from `other`."""
        return TierUse(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class FastTier:
    """A bounded number of rows of an arena with their optimizer state.

    Attributes:
        format: Bytes of a row.
        slots: Map of the rows that are here to their slots.
        weights: Weights [C, D].
        state: Name -> optimizer state [C, ...].
        below: Tier of rows that do not fit; None for no such tier.
        written: Statistics of the writes to that tier.
        not_finite: Table -> keys int64[n] of rows of that tier whose weights are not all finite.

    Args:
        of: Bytes of a row.
        capacity: Number of slots C.
        device: Device of the rows.
        num_defaults: Number of rows at the start of the arena that belong to no key and are never written.
    """

    def __init__(
        self, of: RowFormat, capacity: int, device: torch.device, below: WrittenBehind | None, num_defaults: int
    ) -> None:
        self.format = of
        self.slots = new_slot_map(capacity, device)
        self._limit = SlotLimit(self.slots)
        self.below = below
        self.written = TierUse()
        # Noted when they are written: a checkpoint, which shares the files, reads none of them.
        self.not_finite: dict[int, Tensor] = {}
        self._num_defaults = num_defaults
        self.weights = GrowingTensor((of.width,), of.dtype, device)
        self.state = {name: GrowingTensor(shape, dtype, device) for name, (dtype, shape) in of.states.items()}
        for part in (self.weights, *self.state.values()):
            part.grow(capacity)
        self._released: deque[Tensor] = deque()

    def pin(self, slots: Tensor) -> Pin:
        """Return the pin of ``slots int64[n]``, whose release unpins them."""
        return Pin(slots, self._released)

    @property
    def rows_at_once(self) -> int:
        """Number of rows that are copied at once between tiers."""
        return max(1, MOVED_BYTES // self.format.num_bytes)

    @property
    def num_pinned(self) -> int:
        """Slots that are pinned."""
        self._unpin_released()
        return self.slots.num_pinned

    def victims(self, count: int, batch: int, *, keeps_dirty: bool = False) -> Tensor:
        """Return slots that may be released; see `terarec.kernels.ref.slots.SlotMap.victims`."""
        self._unpin_released()
        return self.slots.victims(count, batch, keeps_dirty=keeps_dirty)

    def _unpin_released(self) -> None:
        # Any thread may release a pin, also the collector of garbage, but slots change under the lock alone: pins leave
        # their slots in the queue.
        while self._released:
            self.slots.unpin(self._released.popleft())

    def put(self, slots: Tensor, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write rows to ``slots int64[n]``."""
        self.weights.tensor.index_copy_(0, slots, weights.to(slots.device))
        for name, values in state.items():
            self.state[name].tensor.index_copy_(0, slots, values.to(slots.device))

    def unpack(self, slots: Tensor, values: Tensor, places: Tensor) -> None:
        """Write rows ``places int64[n]`` of ``values uint8[m, row_bytes]`` to ``slots int64[n]``; none for -1."""
        scatter_rows(self._parts(), slots, values, places.to(slots.device))

    def packed(self, slots: Tensor) -> Tensor:
        """Return the rows of ``slots int64[n]`` as uint8[n, row_bytes] in host memory."""
        # A copy: it is written in the background while the slots get other rows.
        values = self.format.new_rows(slots.numel())
        gather_rows(self._parts(), slots, values)
        return values

    def _parts(self) -> list[RowPart]:
        parts = [self.weights, *self.state.values()]
        return [RowPart(each.tensor, offset) for each, offset in zip(parts, self.format.offsets, strict=True)]

    def of_table(self, table: int) -> Tensor:
        """Return the slots int64[n] of a table's rows, without its default row."""
        owners, used = self.slots.owners, self.slots.used_slots
        mine = (owners.rows[:used] >= self._num_defaults) & (owners.tables[:used] == table)
        return mine.nonzero()[:, 0]

    def changed(self, table: int) -> Tensor:
        """Return those of them int64[n] whose rows were changed and not written."""
        mine = self.of_table(table)
        return mine[self.slots.is_dirty[mine]]

    def write_back(self, slots: Tensor) -> None:
        """Write the rows of ``slots int64[n]`` to the tier below."""
        if not slots.numel() or self.below is None:
            return
        owners = self.slots.owners
        slots = self.slots.by_table(slots)  # so that the rows of a table lie together
        # In parts: a copy of all would take as much memory again.
        for part in torch.split(slots, self.rows_at_once):
            batch = RowBatch(owners.rows[part], owners.keys[part], owners.tables[part].long())
            self.write_below(batch.to(torch.device("cpu")), self.packed(part))
        rows = slots.numel()
        self.written = self.written.plus(TierUse(rows_written=rows, bytes_written=rows * self.format.num_bytes))

    def write_below(self, batch: RowBatch, values: Tensor) -> None:
        """Write distinct rows ``uint8[n, row_bytes]`` to the tier below, and note which of them are not finite."""
        assert self.below is not None
        weights = self.format.unpack(values)[0]
        if self.not_finite or not (self.format.are_finite(values) or are_finite(weights)):
            self.forget_not_finite(batch)
            is_wrong = ~weights.isfinite().all(dim=1)
            for table in set(batch.tables[is_wrong].tolist()):
                keys = batch.keys[is_wrong & (batch.tables == table)]
                self.not_finite[table] = torch.cat([self.not_finite.get(table, keys[:0]), keys])
        self.below.write(batch, values)

    def forget_not_finite(self, batch: RowBatch) -> None:
        """Forget rows that are written or erased."""
        for table, keys in list(self.not_finite.items()):
            keys = keys[~torch.isin(keys, batch.keys[batch.tables == table])]
            self.not_finite[table] = keys
            if not keys.numel():
                del self.not_finite[table]

    def write_changed(self) -> None:
        """Write all changed rows to the tier below; they stay here, too."""
        used = slice(0, self.slots.used_slots)
        dirty = self.slots.is_dirty[used] & (self.slots.owners.rows[used] >= self._num_defaults)
        self.write_back(dirty.nonzero()[:, 0])
        # Those of default rows, too, which no tier below takes.
        self.slots.is_dirty[used] = False

    @property
    def capacity(self) -> int:
        """Number of slots that may be used."""
        return self._limit.limit

    @property
    def room(self) -> int:
        """Slots without a row."""
        return self._limit.room

    def lower(self, capacity: int) -> None:
        """Give up slots until `capacity` are left, as far as pinned rows allow, and the memory of their rows."""
        # Pins that were released but wait in the queue would keep their slots in use.
        self._unpin_released()
        first = self._limit.lower(capacity, self.write_back)
        for part in (self.weights, *self.state.values()):
            part.discard(first, self.slots.capacity)

    def items(self, table: int, chunk_rows: int) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """Yield keys int64[n], weights [n, D] and states of a table's changed rows, or of those of the tier below."""
        # Rows that never changed have initial values, which follow from seed and key.
        if self.below is None:
            for slots in torch.split(self.changed(table), chunk_rows):
                if slots.numel():
                    state = {name: values.tensor[slots] for name, values in self.state.items()}
                    yield self.slots.owners.keys[slots], self.weights.tensor[slots], state
            return
        for keys, values in self.below.items(table, chunk_rows):
            # The parts of a packed row are interleaved; files and imports take each in one piece.
            weights, state = self.format.unpack(values)
            yield keys, weights.contiguous(), {name: part.contiguous() for name, part in state.items()}
