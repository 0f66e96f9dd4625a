# SPDX-License-Identifier: Apache-2.0
"""Slots: which rows have one of a bounded number of them, what keeps them there, and copies of rows as bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from terarec.errors import ConfigError
from terarec.kernels.registry import Op, choose

NO_ROW = -1
"""Owner of a slot without a row."""
MOST_USES = 255
USES_OF_SLOT = 64
"""Counts are halved after so many uses for each slot: 64 let rows that come in every tenth of such a time stay."""


class RowBatch(NamedTuple):
    """Rows of an arena.

    Attributes:
        rows: int64[n], arena rows.
        keys: int64[n], of their tables.
        tables: int64[n], numbers of their tables in the arena.
    """

    rows: Tensor
    keys: Tensor
    tables: Tensor

    def part(self, places: Tensor | slice) -> RowBatch:
        """Return the rows at `places`."""
        return RowBatch(self.rows[places], self.keys[places], self.tables[places])

    def to(self, device: torch.device) -> RowBatch:
        """Return the rows on `device`."""
        return RowBatch(*(tensor.to(device) for tensor in self))


class Touched(NamedTuple):
    """The result of looking rows up.

    Attributes:
        slots: int64[n], the slot of each row, -1 where it has none.
        used: int64[u], these slots, each once, in any order.
        absent: int64[a], positions of the rows without a slot, rising.
    """

    slots: Tensor
    used: Tensor
    absent: Tensor


class Admitted(NamedTuple):
    """The result of admitting rows.

    Attributes:
        slots: int64[n], the slot of each row, -1 for those that found all slots pinned.
        num_new: Number of rows that had none before.
        num_released: Rows that lost theirs.
    """

    slots: Tensor
    num_new: int
    num_released: int


class TouchedMaps(NamedTuple):
    """The result of looking rows up in several maps.

    Attributes:
        slots: int64[n], the slot of each row in its map, -1 where it has none.
        used: int64[u], these slots, each once, map by map.
        absent: int64[a], positions of the rows without a slot, rising.
        missing: int64[m], the rows without a slot, each once in the order in which they first occur, map by map.
        places: int64[a], the place of each absent row among `missing`.
        num_used: Slots of each map in `used`.
        num_absent: Rows of each map in `absent`.
        num_missing: Rows of each map in `missing`.
    """

    slots: Tensor
    used: Tensor
    absent: Tensor
    missing: Tensor
    places: Tensor
    num_used: Sequence[int]
    num_absent: Sequence[int]
    num_missing: Sequence[int]


class RowPart(NamedTuple):
    """A tensor that holds a part of each row, such as an optimizer state.

    Attributes:
        values: [C, ...], contiguous; a row takes up some bytes.
        offset: First byte of the part in a row of bytes.
    """

    values: Tensor
    offset: int


class SlotMap(Protocol):
    """The slots of rows; documented by `terarec.kernels.ref.slots.SlotMap`. One thread at a time calls it."""

    capacity: int
    device: torch.device
    owners: RowBatch
    is_held: Tensor
    is_dirty: Tensor

    def __len__(self) -> int:
        """Return the number of rows with a slot."""

    @property
    def room(self) -> int:
        """Slots without a row."""

    @property
    def used_slots(self) -> int:
        """Slots from the first on that ever had a row."""

    @property
    def num_pinned(self) -> int:
        """Slots that are pinned."""

    def find(self, rows: Tensor) -> Tensor:
        """Return the slots int64[n] of ``rows int64[n]``, -1 where a row has none."""

    def touch(self, rows: Tensor, *, pins: bool) -> Touched:
        """Find ``rows int64[n]``, which may repeat; count a use of each slot and, with `pins`, pin it once."""

    def mark_needed(self, rows: Tensor, until: int) -> Tensor:
        """Note that batches up to number `until` need rows; return the positions int64[a] of those without a slot."""

    def pin(self, slots: Tensor) -> None:
        """Pin ``slots int64[n]``, distinct, once more."""

    def unpin(self, slots: Tensor) -> None:
        """Undo a pin of ``slots int64[n]``."""

    def assign(self, batch: RowBatch) -> Tensor:
        """Give slots int64[n], pinned once, to distinct rows without one; there is `room` for them."""

    def admit(self, rows: Tensor, at_once: int) -> Admitted:
        """Give slots to ``rows int64[n]``, distinct, in place of at least `at_once` rows of the fewest uses."""

    def release(self, slots: Tensor) -> None:
        """Take the rows of ``slots int64[n]``, distinct, away; a pinned slot can be assigned once it is not."""

    def victims(self, count: int, batch: int, *, keeps_dirty: bool = False) -> Tensor:
        """Return up to `count` distinct slots that may be released, those of the fewest uses."""

    def mark_changed(self, slots: Tensor) -> None:
        """Note that the rows of ``slots int64[n]``, which may repeat, changed."""

    def by_table(self, slots: Tensor) -> Tensor:
        """Return ``slots int64[n]`` table by table, in the order in which they come."""


class RowSet(Protocol):
    """The distinct rows of a list; documented by `terarec.kernels.ref.slots.RowSet`."""

    firsts: Tensor
    places: Tensor
    num_left: int

    def find(self, rows: Tensor) -> Tensor:
        """Return the number int64[n] of each of ``rows int64[n]``, -1 where it is not in the list, or taken."""

    def take(self, rows: Tensor) -> Tensor:
        """Return the numbers int64[n] of ``rows int64[n]``, distinct, as `find` does, and take those away."""


def new_slot_map(
    capacity: int, device: torch.device, implementation: str = "auto", *, is_sparse: bool = False
) -> SlotMap:
    """Return an empty map of `capacity` slots.

    Args:
        capacity: As above.
        device: Device of the map.
        implementation: "auto", or one by name.
        is_sparse: Whether few of the slots are used: in host memory the others then take address space alone.

    Raises:
        KernelError: An implementation that does not run on `device`.
    """
    slot_map: SlotMap = choose(Op.SLOT_MAP, device, _for(device, implementation))(capacity, device, is_sparse=is_sparse)
    return slot_map


def row_set(rows: Tensor, implementation: str = "auto") -> RowSet:
    """Return the distinct ones of ``rows int64[n]``."""
    chosen: RowSet = choose(Op.ROW_SET, rows.device, _for(rows.device, implementation))(rows)
    return chosen


def touch_maps(
    maps: Sequence[SlotMap], rows: Tensor, ends: Sequence[int], *, pins: bool, implementation: str = "auto"
) -> TouchedMaps:
    """Find rows in several maps as `SlotMap.touch` does, and the distinct ones among those without a slot.

    Args:
        maps: Distinct maps on one device, made by one implementation.
        rows: int64[n], which may repeat; those of map i end before ``ends[i]``, where those of the next begin.
        ends: End of the rows of each map, rising; the last is n.
        pins: Whether each slot is pinned once.
        implementation: That of the maps.
    """
    device = maps[0].device
    touched: TouchedMaps = choose(Op.TOUCH_MAPS, device, _for(device, implementation))(maps, rows, ends, pins)
    return touched


def admit_maps(
    maps: Sequence[SlotMap],
    rows: Tensor,
    ends: Sequence[int],
    at_once: Sequence[int],
    implementation: str = "auto",
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Admit rows to several maps; see `SlotMap.admit`.

    Args:
        maps: Maps as for `touch_maps`.
        rows: int64[n], those of a map distinct.
        ends: Ends as for `touch_maps`.
        at_once: Fewest slots of each map to release where there is no room.
        implementation: That of the maps.

    Returns:
        The slots int64[n] of the rows in their maps, and for each map how many rows are new and how many lost theirs.

    Raises:
        StorageError: No memory for an index.
    """
    device = maps[0].device
    admitted: tuple[Tensor, list[tuple[int, int]]]
    admitted = choose(Op.ADMIT_MAPS, device, _for(device, implementation))(maps, rows, ends, at_once)
    return admitted


def gather_from(
    memories: Sequence[Tensor], slots: Tensor, ends: Sequence[int], out: Tensor, implementation: str = "auto"
) -> None:
    """Copy rows of several memories to ``out uint8[n, row_bytes]``; those of slot -1 stay as they are.

    Args:
        memories: [C, ...] each, contiguous, with rows of one size.
        slots: int64[n], rows of the memories; those of memory i end before ``ends[i]``.
        ends: Ends as for `touch_maps`.
        out: As above.
        implementation: "auto", or one by name.

    Raises:
        ConfigError: As `gather_rows`.
    """
    _check_parts([RowPart(values, 0) for values in memories], slots, out)
    choose(Op.GATHER_FROM, slots.device, _for(slots.device, implementation))(memories, slots, ends, out)


def gather_rows(
    parts: Sequence[RowPart],
    slots: Tensor,
    out: Tensor,
    implementation: str = "auto",
    *,
    threads: int | None = None,
) -> None:
    """Copy rows ``slots int64[n]`` of all parts to ``out uint8[n, row_bytes]``; those of slot -1 stay as they are.

    Args:
        parts: Tensors on the device of `slots`.
        slots: As above.
        out: As above.
        implementation: "auto", or one by name.
        threads: Maximum number of threads of the compiled core; None for those of torch.

    Raises:
        ConfigError: Tensors of other types or shapes, or bytes outside of a row.
    """
    _check_parts(parts, slots, out)
    choose(Op.GATHER_ROWS, slots.device, _for(slots.device, implementation))(parts, slots, out, threads)


def scatter_rows(
    parts: Sequence[RowPart],
    slots: Tensor,
    values: Tensor,
    places: Tensor | None = None,
    implementation: str = "auto",
    *,
    threads: int | None = None,
) -> None:
    """Copy rows of ``values uint8[m, row_bytes]`` to rows ``slots int64[n]``, distinct, of all parts.

    Args:
        parts: Tensors on the device of `slots`.
        slots: As above.
        values: As above.
        places: int64[n], a row of `values` for each slot, or -1 for none; None for 0 to n - 1.
        implementation: "auto", or one by name.
        threads: Maximum number of threads of the compiled core; None for those of torch.

    Raises:
        ConfigError: As `gather_rows`.
    """
    _check_parts(parts, slots, values)
    if places is not None and (places.dtype != torch.int64 or places.shape != slots.shape):
        raise ConfigError("places", f"got {places.dtype}{list(places.shape)}, expected torch.int64{list(slots.shape)}")
    choose(Op.SCATTER_ROWS, slots.device, _for(slots.device, implementation))(parts, slots, values, places, threads)


def _for(device: torch.device, implementation: str) -> str:
    """Return the implementation for a device; on a GPU torch's own operations are the ones there are."""
    return "ref" if implementation == "auto" and device.type != "cpu" else implementation


def _check_parts(parts: Sequence[RowPart], slots: Tensor, packed: Tensor) -> None:
    if slots.dtype != torch.int64 or slots.ndim != 1:
        raise ConfigError("slots", f"got {slots.dtype}{list(slots.shape)}, expected torch.int64[n]")
    if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.stride(1) != 1:
        raise ConfigError("values", f"got {packed.dtype}{list(packed.shape)}, expected torch.uint8[n, row_bytes]")
    for values, offset in parts:
        num_bytes = row_bytes_of(values)
        if not values.is_contiguous() or offset < 0 or offset + num_bytes > packed.shape[1]:
            raise ConfigError(
                "parts",
                f"got {values.dtype}{list(values.shape)} at byte {offset}, expected contiguous rows within the "
                f"{packed.shape[1]} bytes of a packed one",
            )


def row_bytes_of(values: Tensor) -> int:
    """Return the bytes of a row of ``values [C, ...]``."""
    num_bytes: int = values[:1].numel() * values.element_size() if values.shape[0] else 0
    return num_bytes


_LAST_BATCH = 2**31 - 1
SLOT_BYTES = 60
"""Bytes that a slot takes besides its row: some 23 in the index, and 37 for its owner and its use."""


class Pin:
    """Slots that keep their rows until `release`, at the latest until the pin is deleted.

    Attributes:
        slots: int64[n], distinct.

    Args:
        released: Queue of the slots to unpin.
    """

    def __init__(self, slots: Tensor, released: deque[Tensor]) -> None:
        self.slots = slots
        self._released: deque[Tensor] | None = released

    @property
    def is_released(self) -> bool:
        """Whether `release` was called."""
        return self._released is None

    def release(self) -> None:
        """Unpin the rows; more calls have no effect. Any thread may call it."""
        released, self._released = self._released, None
        if released is not None:
            # Only noted here: a `deque` takes it from any thread, garbage collection included, and the map has no lock.
            released.append(self.slots)

    # A pin that is dropped without `release` would keep its slots for ever.
    def __del__(self) -> None:
        self.release()


class SlotLimit:
    """A bound of the slots of a map that can be lowered, as their memory is needed for something else.

    Attributes:
        limit: Slots from this one on are not assigned any more, except for the few that were free when it was lowered.
    """

    def __init__(self, slots: SlotMap) -> None:
        self.limit = slots.capacity
        self._slots = slots

    @property
    def room(self) -> int:
        """Slots without a row."""
        return self._slots.room - (self._slots.capacity - max(self.limit, self._slots.used_slots))

    def lower(self, limit: int, write_back: Callable[[Tensor], None]) -> int:
        """Retire the slots from `limit` on, except pinned ones.

        Args:
            limit: As above.
            write_back: Function of the slots int64[n] whose rows are evicted although they were changed.

        Returns:
            The slot from which on none has a row.
        """
        slots = self._slots
        # All slots that nothing pins: with the last batch number no row counts as needed by a coming one.
        loose = slots.victims(slots.used_slots, _LAST_BATCH)
        tail = loose[loose >= limit]
        # Before their release, after which nothing says that they changed.
        write_back(tail[slots.is_dirty[tail]])
        # A slot is free to be assigned only once nothing pins it, and this pin is never undone.
        slots.pin(tail)
        slots.release(tail)
        self.limit = limit
        places = slots.is_held[limit : slots.used_slots].nonzero()
        return limit + (int(places[-1]) + 1 if places.numel() else 0)
