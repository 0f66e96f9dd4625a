# SPDX-License-Identifier: Apache-2.0
"""Slots of rows and their reuse: the compiled map against the plain one."""

import resource
from pathlib import Path

import pytest
import torch

from terarec.errors import ConfigError, KernelError
from terarec.kernels.slots import (
    MOST_USES,
    RowBatch,
    RowPart,
    admit_maps,
    gather_from,
    gather_rows,
    new_slot_map,
    row_set,
    scatter_rows,
    touch_maps,
)

CPU = torch.device("cpu")
BOTH = ("ref", "cpu")


def batch(*rows: int) -> RowBatch:
    held = torch.tensor(rows, dtype=torch.int64)
    return RowBatch(held, held + 100, held % 3)


@pytest.fixture(params=BOTH)
def implementation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rows_get_slots_and_lose_them(implementation: str) -> None:
    slots = new_slot_map(4, CPU, implementation)
    assert slots.assign(batch(7, 8)).tolist() == [0, 1]
    assert (len(slots), slots.room, slots.used_slots, slots.num_pinned) == (2, 2, 2, 2)
    slots.mark_changed(torch.tensor([0, 1, 0]))
    slots.unpin(torch.tensor([0, 1]))
    slots.release(torch.tensor([0]))
    assert slots.find(torch.tensor([7, 8])).tolist() == [-1, 1]
    assert slots.assign(batch(9, 10, 11)).tolist() == [0, 2, 3]
    assert slots.is_dirty.tolist() == [False, True, False, False]
    assert [held.tolist() for held in slots.owners] == [[9, 8, 10, 11], [109, 108, 110, 111], [0, 2, 1, 2]]
    assert slots.by_table(torch.tensor([3, 2, 1, 0])).tolist() == [0, 2, 3, 1]


def test_found_rows_are_pinned_once_and_absent_ones_are_reported(implementation: str) -> None:
    slots = new_slot_map(4, CPU, implementation)
    slots.unpin(slots.assign(batch(5, 6, 7)))
    found, used, absent = slots.touch(torch.tensor([6, 9, 5, 6, 8, 9]), pins=True)
    assert found.tolist() == [1, -1, 0, 1, -1, -1]
    assert sorted(used.tolist()) == [0, 1]
    assert absent.tolist() == [1, 4, 5]
    assert slots.num_pinned == 2
    slots.pin(used)
    slots.unpin(used)
    assert slots.victims(3, 0).tolist() == [2]
    slots.unpin(used)
    assert sorted(slots.victims(3, 0).tolist()) == [0, 1, 2]


def test_victims_are_the_rows_that_fewest_batches_used(implementation: str) -> None:
    slots = new_slot_map(6, CPU, implementation)
    slots.unpin(slots.assign(batch(*range(6))))
    for used in ([0, 1, 2, 3], [0, 1, 2], [2, 5]):
        slots.touch(torch.tensor(used), pins=False)
    assert slots.victims(1, 0).tolist() == [4]
    assert slots.mark_needed(torch.tensor([5, 70, 5]), 3).tolist() == [1]
    assert sorted(slots.victims(2, 2).tolist()) == [3, 4]
    assert 5 not in slots.victims(5, 2), "a coming batch needs it, and there are others"
    assert sorted(slots.victims(9, 2).tolist()) == [0, 1, 2, 3, 4, 5]
    slots.mark_changed(torch.tensor([0, 1, 2]))
    assert sorted(slots.victims(9, 4, keeps_dirty=True).tolist()) == [3, 4, 5]


def test_rows_are_let_in_for_those_of_the_fewest_uses(implementation: str) -> None:
    slots = new_slot_map(4, CPU, implementation)
    rows = torch.tensor([-5, 2**63 - 1, -(2**63), -1])
    first = slots.admit(rows, 1)
    assert (first.slots.tolist(), first.num_new, first.num_released) == ([0, 1, 2, 3], 4, 0)
    slots.touch(rows[[0, 1, 3]], pins=False)
    pinned = slots.touch(rows[[0, 3]], pins=True)
    more = slots.admit(torch.tensor([7, -1, 8, 9]), 1)
    assert (more.num_new, more.num_released) == (2, 2)
    assert more.slots.tolist()[1] == 3
    assert sorted(more.slots.tolist()) == [-1, 1, 2, 3]
    assert slots.find(rows).tolist() == [0, -1, -1, 3]
    slots.unpin(pinned.used)
    assert (slots.num_pinned, len(slots)) == (0, 4)
    assert slots.admit(torch.tensor([10]), 3).num_released == 3
    assert slots.is_held.sum() == 2


def test_rows_that_were_used_as_often_go_in_turns(implementation: str) -> None:
    slots = new_slot_map(5, CPU, implementation)
    slots.unpin(slots.assign(batch(*range(5))))
    assert [slots.victims(2, 0).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]


def test_counts_end_at_the_most_and_are_halved_in_time(implementation: str) -> None:
    slots = new_slot_map(2, CPU, implementation)
    slots.unpin(slots.assign(batch(1, 2)))
    for _ in range(2 * MOST_USES):
        slots.touch(torch.tensor([1]), pins=False)
    slots.touch(torch.tensor([2, 2]), pins=False)
    assert slots.victims(1, 0).tolist() == [1]


def test_both_maps_do_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    capacity = 700
    maps = [new_slot_map(capacity, CPU, implementation) for implementation in BOTH]
    for step in range(60):
        rows = (torch.rand(900, generator=generator) ** 3 * 2000).long()
        requested = RowBatch(rows, rows * 7, rows % 5)
        absent = [each.mark_needed(rows[:100] + 3, step + 1) for each in maps]
        touched = [each.touch(rows, pins=True) for each in maps]
        sets = [row_set(rows[held.absent], name) for held, name in zip(touched, BOTH, strict=True)]
        assert torch.equal(*absent)
        assert torch.equal(sets[0].places, sets[1].places)
        assert torch.equal(sets[0].find(rows), sets[1].find(rows))
        assert torch.equal(*(each.take(torch.arange(step, 2000, 3)) for each in sets))
        assert torch.equal(sets[0].find(rows), sets[1].find(rows))
        assert sets[0].num_left == sets[1].num_left
        assert torch.equal(touched[0].used.sort().values, touched[1].used.sort().values)
        new = []
        for each, held, distinct in zip(maps, touched, sets, strict=True):
            assert torch.equal(held.absent, touched[0].absent)
            arrivals = requested.part(held.absent).part(distinct.firsts)
            missing = arrivals.rows.numel() - each.room
            gone = each.victims(missing, step).sort().values
            each.release(gone)
            new.append((gone, each.assign(arrivals)))
            each.unpin(torch.cat([held.used, new[-1][1]]))
            each.mark_changed(held.slots[held.slots >= 0])
        assert torch.equal(new[0][0], new[1][0])
        assert (len(maps[0]), maps[0].room) == (len(maps[1]), maps[1].room)
        assert torch.equal(*(each.find(torch.arange(2000)) for each in maps))
        assert torch.equal(*(each.is_dirty for each in maps))
    assert maps[0].room == 0


def test_several_maps_do_what_each_does_alone(implementation: str) -> None:
    generator = torch.Generator().manual_seed(7)
    capacities = (40, 1, 300, 7)
    together, alone = ([new_slot_map(size, CPU, implementation) for size in capacities] for _ in range(2))
    for counts in ((0, 3, 500, 9), (80, 0, 0, 0), (5, 5, 400, 30), (0, 0, 0, 0)):
        ends = torch.tensor(counts).cumsum(0).tolist()
        rows = torch.randint(-250, 250, (ends[-1],), generator=generator)
        found = touch_maps(together, rows, ends, pins=True, implementation=implementation)
        parts = [each.touch(some, pins=True) for each, some in zip(alone, torch.split(rows, counts), strict=True)]
        sets = [
            row_set(some[part.absent], implementation)
            for some, part in zip(torch.split(rows, counts), parts, strict=True)
        ]
        assert torch.equal(found.slots, torch.cat([part.slots for part in parts]))
        assert torch.equal(found.absent, (found.slots < 0).nonzero()[:, 0])
        assert torch.equal(found.missing[found.places], rows[found.absent])
        used = torch.split(found.used, list(found.num_used))
        assert [sorted(part.tolist()) for part in used] == [sorted(part.used.tolist()) for part in parts]
        assert list(found.num_absent) == [part.absent.numel() for part in parts]
        assert list(found.num_missing) == [distinct.firsts.numel() for distinct in sets]
        ends = torch.tensor(found.num_missing).cumsum(0).tolist()
        given, admitted = admit_maps(together, found.missing, ends, [1] * 4, implementation)
        expected = [
            each.admit(some, 1) for each, some in zip(alone, torch.split(found.missing, found.num_missing), strict=True)
        ]
        assert torch.equal(given, torch.cat([one.slots for one in expected]))
        assert admitted == [(one.num_new, one.num_released) for one in expected]
        for each, other, part, one in zip(together, alone, used, parts, strict=True):
            each.unpin(part)
            other.unpin(one.used)
            assert (each.num_pinned, len(each)) == (0, len(other))


def test_rows_of_several_memories_are_copied(implementation: str) -> None:
    memories = [torch.randint(0, 255, (rows, 24), dtype=torch.uint8) for rows in (5, 900, 1)]
    counts = (3, 700, 0)
    slots = torch.cat(
        [torch.randint(-1, each.shape[0], (count,)) for each, count in zip(memories, counts, strict=True)]
    )
    out = torch.full((703, 24), 9, dtype=torch.uint8)
    gather_from(memories, slots, [3, 703, 703], out, implementation)
    expected = torch.cat([each[part] for each, part in zip(memories, torch.split(slots, counts), strict=True)])
    expected[slots < 0] = 9
    assert torch.equal(out, expected)
    with pytest.raises(ConfigError):
        gather_from([torch.zeros(3, 25, dtype=torch.uint8)], slots[:3], [3], out, implementation)


@pytest.mark.parametrize("count", [0, 1, 5, 1300])
def test_rows_are_copied_to_bytes_and_back(count: int, implementation: str) -> None:
    weights, state = torch.randn(2000, 5).bfloat16(), torch.randn(2000, 3, 2)
    parts = [RowPart(weights, 0), RowPart(state, 12)]
    slots = torch.randperm(2000)[:count]
    slots[::7] = -1
    out = torch.full((count, 40), 9, dtype=torch.uint8)
    gather_rows(parts, slots, out, implementation)
    here = slots >= 0
    assert torch.equal(out[here, :10].contiguous().view(torch.bfloat16), weights[slots[here]])
    assert torch.equal(out[here, 12:36].contiguous().view(torch.float32).view(-1, 3, 2), state[slots[here]])
    assert (out[~here] == 9).all()
    assert (out[:, 36:] == 9).all()
    back = [RowPart(torch.zeros_like(held), offset) for held, offset in parts]
    scatter_rows(back, slots.clamp(min=0), out, torch.arange(count).masked_fill_(~here, -1), implementation)
    for (mine, _), (held, _) in zip(back, parts, strict=True):
        assert torch.equal(mine[slots[here]], held[slots[here]])
        assert int((mine.flatten(1) != 0).any(1).sum()) == int(here.sum())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_slots_take_memory_as_they_are_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    slots = new_slot_map(50_000_000, CPU, "cpu")  # 1.8 GB
    slots.assign(batch(*range(1000)))
    slots.touch(torch.arange(500), pins=False)
    slots.unpin(torch.arange(1000))
    slots.release(slots.victims(500, 1))
    assert slots.used_slots == 1000
    assert resident() - before < 100 << 20


def test_bad_tensors_are_rejected() -> None:
    weights, out = torch.zeros(4, 2), torch.zeros(3, 8, dtype=torch.uint8)
    slots = torch.zeros(3, dtype=torch.int64)
    for parts, at, to in (
        ([RowPart(weights, 4)], slots, out),
        ([RowPart(weights.t(), 0)], slots, out),
        ([RowPart(weights, 0)], slots.int(), out),
        ([RowPart(weights, 0)], slots, out.int()),
    ):
        with pytest.raises(ConfigError):
            gather_rows(parts, at, to)
    with pytest.raises(ConfigError):
        scatter_rows([RowPart(weights, 0)], slots, out, slots[:2])
    with pytest.raises(ConfigError):
        row_set(slots.int())
    with pytest.raises(KernelError):
        new_slot_map(4, CPU, "triton")
