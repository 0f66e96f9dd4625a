# SPDX-License-Identifier: Apache-2.0
"""Pins of slots, and rows that are read ahead."""

import gc

import pytest
import torch

from terarec.kernels.slots import RowBatch, SlotLimit, new_slot_map
from terarec.memory.fast_tier import FastTier
from terarec.memory.lookahead import Lookahead
from terarec.memory.row_format import RowFormat
from terarec.memory.table_stores import TableStore, TableStores
from tests.memory.memory_row_store import MemoryRowStore

OF = RowFormat(4, torch.float32)


def batch(*rows: int) -> RowBatch:
    held = torch.tensor(rows, dtype=torch.int64)
    return RowBatch(held, held + 100, torch.zeros_like(held))


def test_pinned_rows_stay_until_the_last_unpin() -> None:
    tier = FastTier(OF, 3, torch.device("cpu"), None, 0)
    slots = tier.slots
    given = slots.assign(batch(1, 2, 3))
    slots.unpin(given[1:])
    slots.pin(given[:2])
    pins = [tier.pin(given[:2]), tier.pin(given[:1])]
    assert tier.victims(3, 0).tolist() == [2]
    pins[0].release()
    pins[0].release()  # once is enough
    assert pins[0].is_released
    assert sorted(tier.victims(3, 0).tolist()) == [1, 2]
    assert tier.num_pinned == 1
    slots.release(given[:1])  # whose row is forgotten while a gradient waits for it
    assert slots.room == 0
    pins.clear()
    gc.collect()
    victims = tier.victims(3, 0)
    assert sorted(victims.tolist()) == [0, 1, 2]
    slots.release(victims)
    assert slots.room == 3


def test_staged_rows_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr("terarec.memory.lookahead.STAGED_BYTES", 5 * OF.num_bytes)
    ahead = Lookahead()
    staged = [ahead.reserve(batch(*rows), OF) for rows in ((1, 2, 1, 3), (3, 4, 5, 6), (7,))]
    assert [each.batch.rows.tolist() for each in staged] == [[1, 2, 3], [4, 5], []]


def test_staged_rows_are_taken_once_and_not_after_a_change() -> None:
    level = TableStores([TableStore(MemoryRowStore(16))])
    level.write(batch(1, 2, 3), torch.arange(3, dtype=torch.uint8)[:, None].repeat(1, 16))
    ahead = Lookahead()
    first = ahead.reserve(batch(3, 1, 9, 3), OF)
    assert first.batch.rows.tolist() == [3, 1, 9]
    first.fill(level)
    second = ahead.reserve(batch(1, 4, 2), OF)
    assert second.batch.rows.tolist() == [4, 2], "those that an earlier batch wants are on their way"
    second.fill(level)
    ahead.drop(torch.tensor([3]))
    wanted = batch(1, 2, 3, 4, 9)
    taken = list(ahead.take(wanted))
    assert torch.stack([held.is_staged for held in taken]).any(0).tolist() == [True, True, False, True, True]
    found = {int(wanted.rows[at]): int(held.values[place, 0]) for held in taken for at, place in enumerate(held.places)
             if place >= 0}  # fmt: skip
    assert found == {1: 0, 2: 1}
    assert not list(ahead.take(batch(1, 2, 4, 9)))


def test_a_row_that_has_another_key_now_is_not_taken() -> None:
    level = TableStores([TableStore(MemoryRowStore(16))])
    ahead = Lookahead()
    ahead.reserve(batch(1, 2), OF).fill(level)
    other = batch(1, 2)
    other.keys[0] = 7
    assert [held.is_staged.tolist() for held in ahead.take(other)] == [[False, True]]


@pytest.mark.parametrize("implementation", ["ref", "cpu"])
def test_slots_behind_a_lowered_limit_are_not_assigned(implementation: str) -> None:
    slots = new_slot_map(8, torch.device("cpu"), implementation)
    limit = SlotLimit(slots)

    def assigned(*rows: int) -> list[int]:
        held = torch.tensor(rows)
        found = slots.assign(RowBatch(held, held, torch.zeros_like(held)))
        slots.unpin(found)
        return found.tolist()

    assert assigned(10, 11, 12, 13, 14, 15) == [0, 1, 2, 3, 4, 5]
    slots.mark_changed(torch.tensor([1, 4]))
    slots.pin(torch.tensor([3]))
    written: list[int] = []
    assert limit.room == 2
    assert limit.lower(2, lambda gone: written.extend(gone.tolist())) == 4  # slot 3 is pinned
    assert written == [4]
    assert slots.find(torch.tensor([10, 11, 12, 13, 14, 15])).tolist() == [0, 1, -1, 3, -1, -1]
    assert limit.room == 0
    slots.unpin(torch.tensor([3]))
    assert limit.lower(1, lambda gone: written.extend(gone.tolist())) == 1
    assert sorted(written[1:]) == [1]
    assert limit.room == 0
    slots.release(torch.tensor([0]))
    assert limit.room == 1
    assert assigned(20) == [0]


@pytest.mark.parametrize("implementation", ["ref", "cpu"])
def test_a_limit_counts_slots_that_were_never_used(implementation: str) -> None:
    slots = new_slot_map(8, torch.device("cpu"), implementation)
    limit = SlotLimit(slots)
    assert limit.lower(3, lambda gone: None) == 3
    held = torch.arange(3)
    slots.assign(RowBatch(held, held, held))
    assert limit.room == 0
