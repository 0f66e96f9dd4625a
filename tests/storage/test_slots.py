"""Which rows have slots, and whose slots go to others."""

import gc

import torch

from terarec.storage.lookahead import Lookahead
from terarec.storage.row_levels import TableStores
from terarec.storage.row_store import MemoryRowStore
from terarec.storage.slots import RowBatch, SlotMap

CPU = torch.device("cpu")


def batch(*rows: int) -> RowBatch:
    held = torch.tensor(rows, dtype=torch.int64)
    return RowBatch(held, held + 100, torch.zeros_like(held))


def test_rows_get_slots_and_lose_them() -> None:
    slots = SlotMap(4, CPU)
    assert slots.num_distinct(torch.tensor([7, 8, 7])) == 2
    given = slots.assign(batch(7, 8, 7))
    assert given.tolist() == [0, 1, 0]
    assert (len(slots), slots.room) == (2, 2)
    assert slots.distinct(given).sort().values.tolist() == [0, 1]
    slots.is_dirty[given] = True
    slots.release(torch.tensor([0]))
    assert slots.find(torch.tensor([7, 8])).tolist() == [-1, 1]
    assert slots.assign(batch(9, 10, 11)).tolist() == [0, 2, 3]
    assert slots.is_dirty.tolist() == [False, True, False, False]
    assert slots.owners.keys.tolist() == [109, 108, 110, 111]


def test_victims_are_the_rows_that_fewest_batches_used() -> None:
    slots = SlotMap(6, CPU)
    slots.assign(batch(*range(6)))
    for used in ([0, 1, 2, 3], [0, 1, 2], [2, 5]):
        held = torch.tensor(used)
        slots.hold(held)
        slots.let_go(held)
    assert slots.victims(1, 0).tolist() == [4]
    slots.release(torch.tensor([4]))
    slots.wanted_until[5] = 3
    assert sorted(slots.victims(2, 2).tolist()) != [4, 5]
    assert 5 not in slots.victims(4, 2), "a coming batch wants it, and there are others"
    assert sorted(slots.victims(9, 2).tolist()) == [0, 1, 2, 3, 5]
    slots.is_dirty[:3] = True
    assert sorted(slots.victims(9, 4, keeps_dirty=True).tolist()) == [3, 5]


def test_pinned_rows_stay_until_nobody_holds_the_pin() -> None:
    slots = SlotMap(3, CPU)
    given = slots.assign(batch(1, 2, 3))
    slots.hold(given[:2])
    slots.hold(given[:1])
    pins = [slots.pin(given[:2]), slots.pin(given[:1])]
    assert slots.victims(3, 0).tolist() == [2]
    pins[0].release()
    pins[0].release()  # once is enough
    assert pins[0].is_released
    assert sorted(slots.victims(3, 0).tolist()) == [1, 2]
    assert slots.num_pinned == 1
    slots.release(given[:1])  # whose row is forgotten while a gradient waits for it
    assert slots.room == 0
    pins.clear()
    gc.collect()
    victims = slots.victims(3, 0)
    assert sorted(victims.tolist()) == [0, 1, 2]
    slots.release(victims)
    assert slots.room == 3


def test_staged_rows_are_taken_once_and_not_after_a_change() -> None:
    level = TableStores([MemoryRowStore(16)])
    level.write(batch(1, 2, 3), torch.arange(3, dtype=torch.uint8)[:, None].repeat(1, 16))
    ahead = Lookahead()
    first = ahead.reserve(batch(3, 1, 9, 3), 16)
    assert first.batch.rows.tolist() == [1, 3, 9]
    first.fill(level)
    second = ahead.reserve(batch(1, 2, 4), 16)
    assert second.batch.rows.tolist() == [2, 4], "those that an earlier batch wants are on their way"
    second.fill(level)
    ahead.drop(torch.tensor([3]))
    out, found = torch.zeros(5, 16, dtype=torch.uint8), torch.zeros(5, dtype=torch.bool)
    taken = ahead.take(torch.tensor([1, 2, 3, 4, 9]), out, found)
    assert taken.tolist() == [True, True, False, True, True]
    assert found.tolist() == [True, True, False, False, False]
    assert out[:2, 0].tolist() == [0, 1]
    assert not ahead.take(torch.tensor([1, 2, 4, 9]), out[:4], found[:4]).any()
