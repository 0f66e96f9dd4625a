# SPDX-License-Identifier: Apache-2.0
"""Launchers of the slot map and of copies of rows in host memory."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from terarec.errors import NoSpaceError
from terarec.kernels.cpu.host import _embedding, empty_integers
from terarec.kernels.hash_index import check_vector
from terarec.kernels.pages import untouched_zeros
from terarec.kernels.slots import Admitted, RowBatch, RowPart, Touched, TouchedMaps, row_bytes_of

_CPU = torch.device("cpu")


class SlotMap:
    """The slots of rows in host memory; equals `terarec.kernels.ref.slots.SlotMap`, without its temporary tensors.

    Attributes:
        capacity: Number of slots C.
        device: The CPU.
        owners: The row of each slot, its key and its table, [C] each; a row of -1 for none, and 0 for slots behind
            `used_slots`.
        is_held: bool[C], whether the slot has a row.
        is_dirty: bool[C], whether the slot's row was changed since it was read.

    Args:
        is_sparse: See `terarec.kernels.slots.new_slot_map`.
    """

    def __init__(self, capacity: int, device: torch.device = _CPU, *, is_sparse: bool = False) -> None:
        self.capacity = capacity
        self.device = device

        def zeros(dtype: torch.dtype) -> Tensor:
            # A huge page for each of the arrays of each small table would add up.
            return untouched_zeros(capacity, dtype, f"{capacity:,} slots", huge_pages=not is_sparse)

        self.owners = RowBatch(zeros(torch.int64), zeros(torch.int64), zeros(torch.int32))
        self.is_held, self.is_dirty = zeros(torch.bool), zeros(torch.bool)
        types = (torch.int32, torch.uint8, torch.int16, torch.int32)
        self._numbers = [zeros(dtype) for dtype in types]  # the core keeps their addresses
        addresses = [tensor.data_ptr() for tensor in (*self.owners, self.is_held, self.is_dirty, *self._numbers)]
        # A random seed of the hash, so that rows cannot be chosen to collide.
        self.core = _embedding.SlotMap(capacity, addresses, secrets.randbits(64))

    def __len__(self) -> int:
        """Return the number of rows with a slot."""
        return self.core.size()

    @property
    def room(self) -> int:
        """Slots without a row."""
        return self.core.room()

    @property
    def used_slots(self) -> int:
        """Slots from the first on that ever had a row."""
        return self.core.used_slots()

    @property
    def num_pinned(self) -> int:
        """Slots that are pinned."""
        return self.core.num_pinned()

    def find(self, rows: Tensor) -> Tensor:
        """Return the slots int64[n] of ``rows int64[n]``, -1 where a row has none."""
        rows = check_vector("rows", rows, self.device)
        slots = empty_integers(rows.numel())
        self.core.find(rows.data_ptr(), rows.numel(), slots.data_ptr(), torch.get_num_threads())
        return slots

    def touch(self, rows: Tensor, *, pins: bool) -> Touched:
        """Find rows and count a use of their slots; see `terarec.kernels.ref.slots.SlotMap.touch`."""
        rows = check_vector("rows", rows, self.device)
        slots, used, absent = (empty_integers(rows.numel()) for _ in range(3))
        num_used, num_absent = self.core.touch(
            rows.data_ptr(),
            rows.numel(),
            pins,
            slots.data_ptr(),
            used.data_ptr(),
            absent.data_ptr(),
            torch.get_num_threads(),
        )
        # A copy, since the slots stay with the pin: a view would keep the memory of all rows.
        return Touched(slots, used[:num_used].clone(), absent[:num_absent])

    def mark_needed(self, rows: Tensor, until: int) -> Tensor:
        """Note that a coming batch needs rows; see `terarec.kernels.ref.slots.SlotMap.mark_needed`."""
        rows = check_vector("rows", rows, self.device)
        absent = empty_integers(rows.numel())
        return absent[: self.core.mark_needed(rows.data_ptr(), rows.numel(), until, absent.data_ptr())]

    def pin(self, slots: Tensor) -> None:
        """Pin ``slots int64[n]``, distinct, until as many calls of `unpin`."""
        self.core.pin(*_span(slots))

    def unpin(self, slots: Tensor) -> None:
        """Undo a pin of ``slots int64[n]``."""
        self.core.unpin(*_span(slots))

    def assign(self, batch: RowBatch) -> Tensor:
        """Give slots to distinct rows without one; see `terarec.kernels.ref.slots.SlotMap.assign`.

        Raises:
            StorageError: No memory for the index; nothing has changed then.
        """
        rows, keys, tables = (check_vector("rows", values, self.device) for values in batch)
        slots = torch.empty_like(rows)
        try:
            self.core.assign(
                rows.data_ptr(),
                rows.numel(),
                keys.data_ptr(),
                tables.data_ptr(),
                slots.data_ptr(),
                torch.get_num_threads(),
            )
        except MemoryError:
            raise NoSpaceError("slots", f"no memory to index {rows.numel():,} rows more") from None
        return slots

    def admit(self, rows: Tensor, at_once: int) -> Admitted:
        """Give slots to rows in place of others; see `terarec.kernels.ref.slots.SlotMap.admit`.

        Raises:
            StorageError: No memory for the index.
        """
        rows = check_vector("rows", rows, self.device)
        slots = torch.empty_like(rows)
        try:
            counted = self.core.admit(rows.data_ptr(), rows.numel(), at_once, slots.data_ptr(), torch.get_num_threads())
        except MemoryError:
            raise NoSpaceError("slots", f"no memory to index {rows.numel():,} rows more") from None
        return Admitted(slots, *counted)

    def release(self, slots: Tensor) -> None:
        """Remove the rows from ``slots int64[n]``, distinct; a pinned slot can be assigned after it is unpinned."""
        self.core.release(*_span(slots), torch.get_num_threads())

    def victims(self, count: int, batch: int, *, keeps_dirty: bool = False) -> Tensor:
        """Return up to `count` slots that may be released; see `terarec.kernels.ref.slots.SlotMap.victims`."""
        slots = torch.empty(max(count, 0), dtype=torch.int64)
        return slots[: self.core.victims(max(count, 0), batch, keeps_dirty, slots.data_ptr())]

    def mark_changed(self, slots: Tensor) -> None:
        """Note that the rows of ``slots int64[n]``, which may repeat, changed."""
        _embedding.mark_slots(self.is_dirty.data_ptr(), *_span(slots))

    def by_table(self, slots: Tensor) -> Tensor:
        """Return ``slots int64[n]`` table by table, in the order in which they come."""
        # The core reads bare addresses, without strides.
        slots = slots.contiguous()
        ordered = torch.empty_like(slots)
        self.core.by_table(*_span(slots), ordered.data_ptr())
        return ordered


class RowSet:
    """The distinct rows of a list; see `terarec.kernels.ref.slots.RowSet`."""

    def __init__(self, rows: Tensor) -> None:
        rows = check_vector("rows", rows, _CPU)
        self.places = torch.empty_like(rows)
        self._core = _embedding.RowSet(rows.data_ptr(), rows.numel(), secrets.randbits(64), self.places.data_ptr())
        self.firsts = torch.empty(self._core.size(), dtype=torch.int64)
        self._core.firsts(self.firsts.data_ptr())
        self.num_left = self.firsts.numel()

    def find(self, rows: Tensor) -> Tensor:
        """Return the number int64[n] of each of ``rows int64[n]``, -1 where it is not in the list, or taken."""
        rows = check_vector("rows", rows, _CPU)
        places = torch.empty_like(rows)
        self._core.find(rows.data_ptr(), rows.numel(), places.data_ptr())
        return places

    def take(self, rows: Tensor) -> Tensor:
        """Return the numbers int64[n] of ``rows int64[n]``, distinct, as `find` does, and take those away."""
        rows = check_vector("rows", rows, _CPU)
        places = torch.empty_like(rows)
        self.num_left = self._core.take(rows.data_ptr(), rows.numel(), places.data_ptr())
        return places


def touch_maps(maps: Sequence[SlotMap], rows: Tensor, ends: Sequence[int], pins: bool) -> TouchedMaps:
    """Find rows in several maps; see `terarec.kernels.slots.touch_maps`."""
    rows = check_vector("rows", rows, _CPU)
    # One allocation for the five results, as large ones come from the kept memory of the core.
    results = empty_integers(5 * rows.numel()).view(5, rows.numel())
    first, stride = results.data_ptr(), rows.numel() * rows.element_size()
    counts = _embedding.touch_maps(
        [slot_map.core for slot_map in maps],
        rows.data_ptr(),
        ends,
        pins,
        secrets.randbits(64),
        [first + number * stride for number in range(5)],
        torch.get_num_threads(),
    )
    num_used, num_absent, num_missing = zip(*counts, strict=True)
    slots, used, absent, missing, places = results.unbind()
    of_absent = sum(num_absent)
    return TouchedMaps(
        slots,
        used[: sum(num_used)],
        absent[:of_absent],
        missing[: sum(num_missing)],
        places[:of_absent],
        num_used,
        num_absent,
        num_missing,
    )


def admit_maps(
    maps: Sequence[SlotMap], rows: Tensor, ends: Sequence[int], at_once: Sequence[int]
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Admit rows to several maps; see `terarec.kernels.slots.admit_maps`.

    Raises:
        StorageError: No memory for an index.
    """
    rows = check_vector("rows", rows, _CPU)
    slots = torch.empty_like(rows)
    try:
        counts = _embedding.admit_maps(
            [slot_map.core for slot_map in maps],
            rows.data_ptr(),
            ends,
            at_once,
            slots.data_ptr(),
            torch.get_num_threads(),
        )
    except MemoryError:
        raise NoSpaceError("slots", f"no memory to index {rows.numel():,} rows more") from None
    return slots, counts


def gather_from(memories: Sequence[Tensor], slots: Tensor, ends: Sequence[int], out: Tensor) -> None:
    """Copy rows of several memories; see `terarec.kernels.slots.gather_from`."""
    slots = slots.contiguous()
    _embedding.gather_from(
        _addresses([RowPart(values, 0) for values in memories]),
        ends,
        slots.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )


def gather_rows(parts: Sequence[RowPart], slots: Tensor, out: Tensor, threads: int | None) -> None:
    """Copy rows to bytes; see `terarec.kernels.slots.gather_rows`."""
    slots = slots.contiguous()
    _embedding.gather_rows(
        _addresses(parts),
        slots.data_ptr(),
        slots.numel(),
        out.data_ptr(),
        out.stride(0),
        threads or torch.get_num_threads(),
    )


def scatter_rows(
    parts: Sequence[RowPart], slots: Tensor, values: Tensor, places: Tensor | None, threads: int | None
) -> None:
    """Copy bytes to rows; see `terarec.kernels.slots.scatter_rows`."""
    slots = slots.contiguous()
    places = None if places is None else places.contiguous()
    _embedding.scatter_rows(
        _addresses(parts),
        slots.data_ptr(),
        0 if places is None else places.data_ptr(),
        slots.numel(),
        values.data_ptr(),
        values.stride(0),
        threads or torch.get_num_threads(),
    )


def _addresses(parts: Sequence[RowPart]) -> list[tuple[int, int, int]]:
    return [(values.data_ptr(), row_bytes_of(values), offset) for values, offset in parts]


def _span(slots: Tensor) -> tuple[int, int]:
    assert slots.dtype == torch.int64, "slots come from the map itself"
    assert slots.is_contiguous()
    return slots.data_ptr(), slots.numel()
