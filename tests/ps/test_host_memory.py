# SPDX-License-Identifier: Apache-2.0
"""Eviction, memory and concurrency of rows in host memory."""

import threading

import pytest
import torch

from terarec.spec import HostMemorySpec, OverflowSpec
from tests.ps.tiers import Tier, host


def rows(keys: torch.Tensor) -> torch.Tensor:
    return keys.float().unsqueeze(1).expand(-1, 4).contiguous()


def bounded(evict: str, most: int = 100, keep: float = 0.5) -> Tier:
    overflow = OverflowSpec(max_rows=most, evict=evict, keep=keep)  # type: ignore[arg-type]
    return host(4, HostMemorySpec(overflow=overflow))


@pytest.mark.parametrize("evict", ["random", "lru", "lfu"])
def test_a_full_partition_keeps_its_share_and_the_new_rows(evict: str) -> None:
    tier = bounded(evict)
    tier.insert(torch.arange(100), rows(torch.arange(100)))
    assert tier.count() == 100
    new = torch.arange(1000, 1010)
    tier.insert(new, rows(new))
    assert tier.count() == 50
    assert tier.statistics().evicted == 60
    assert bool(tier.lookup(new).mask.all())
    held = tier.lookup(torch.arange(100))
    assert torch.equal(held.rows[held.mask], rows(torch.arange(100))[held.mask])


def test_the_least_recently_used_rows_leave() -> None:
    tier = bounded("lru")
    tier.insert(torch.arange(100), rows(torch.arange(100)))
    tier.lookup(torch.arange(20, 60))
    tier.insert(torch.tensor([500]), rows(torch.tensor([500])))
    assert bool(tier.lookup(torch.arange(20, 60)).mask.all())


def test_the_least_frequently_used_rows_leave() -> None:
    tier = bounded("lfu")
    tier.insert(torch.arange(100), rows(torch.arange(100)))
    tier.lookup(torch.arange(30, 70).repeat(3))
    tier.lookup(torch.arange(0, 100))
    tier.insert(torch.tensor([500]), rows(torch.tensor([500])))
    assert bool(tier.lookup(torch.arange(30, 70)).mask.all())


def test_a_batch_larger_than_the_bound_leaves_the_bound() -> None:
    tier = bounded("random", most=10)
    tier.insert(torch.arange(64), rows(torch.arange(64)))
    assert tier.count() <= 10


def test_memory_of_evicted_rows_is_used_again() -> None:
    tier = bounded("random", most=1000, keep=0.1)
    for begin in range(0, 200_000, 1000):
        keys = torch.arange(begin, begin + 1000)
        tier.insert(keys, rows(keys))
    assert tier.count() <= 1000
    assert tier.memory_bytes < 4 << 20


def test_rows_that_are_replaced_take_no_more_memory() -> None:
    tier = host(64)
    keys = torch.arange(5000)
    for number in range(40):
        tier.insert(keys, torch.full((5000, 64), float(number)))
        if number == 1:
            before = tier.memory_bytes
    assert tier.memory_bytes == before
    assert bool((tier.lookup(keys).rows == 39.0).all())


def test_keys_that_are_erased_twice_give_their_row_back_once() -> None:
    tier = host(4)
    tier.insert(torch.arange(10), rows(torch.arange(10)))
    tier.erase(torch.tensor([3, 3, 4, 99]))
    tier.insert(torch.tensor([20, 21, 22]), rows(torch.tensor([20, 21, 22])))
    found = tier.lookup(torch.tensor([20, 21, 22, 5, 3]))
    assert found.mask.tolist() == [True] * 4 + [False]
    assert found.rows[:4, 0].tolist() == [20.0, 21.0, 22.0, 5.0]


def test_insertions_during_clears_leave_all_rows_or_none() -> None:
    tier = host(64)
    keys = torch.arange(1000)

    def clear() -> None:
        for _ in range(50):
            tier.clear()

    cleaner = threading.Thread(target=clear)
    cleaner.start()
    while cleaner.is_alive():
        tier.insert(keys, torch.ones(1000, 64))
    cleaner.join()
    tier.insert(keys, torch.full((1000, 64), 2.0))
    assert bool((tier.lookup(keys).rows == 2.0).all())


def test_lookups_during_insertions_see_whole_rows() -> None:
    tier = host(64)
    keys = torch.arange(20_000)
    tier.insert(keys, torch.zeros(20_000, 64))
    stop = threading.Event()

    def insert() -> None:
        value = 0.0
        while not stop.is_set():
            value += 1.0
            tier.insert(keys[:4000], torch.full((4000, 64), value))

    writer = threading.Thread(target=insert)
    writer.start()
    try:
        for _ in range(30):
            found = tier.lookup(keys[:1000])
            assert bool(found.mask.all())
            assert torch.equal(found.rows, found.rows[:, :1].expand(-1, 64))
    finally:
        stop.set()
        writer.join()
