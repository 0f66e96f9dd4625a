# SPDX-License-Identifier: Apache-2.0
"""Tables in several tiers."""

import threading

import pytest
import torch

from terarec.errors import ConfigError, StorageError
from tests.errors import at
from tests.ps.tiers import Tier, host, table_of


def tier(keys: torch.Tensor, value: float) -> Tier:
    made = host(4)
    made.insert(keys, torch.full((keys.numel(), 4), value))
    return made


def test_the_first_tier_that_has_a_key_counts() -> None:
    table = table_of([tier(torch.arange(4), 1.0), tier(torch.arange(8), 2.0), tier(torch.arange(12), 3.0)])
    found = table.find(torch.tensor([11, 0, 5, 5, 99, 3, 11]))
    assert found.rows[:, 0].tolist() == [3.0, 1.0, 2.0, 2.0, 0.0, 1.0, 3.0]
    assert found.mask.tolist() == [True, True, True, True, False, True, True]
    statistics = table.statistics()
    assert (statistics.keys, statistics.defaults) == (7, 1)
    # In slower tiers a key is looked up once.
    assert [use.counted.keys for use in statistics.tiers] == [7, 3, 2]
    assert [use.counted.hits for use in statistics.tiers] == [2, 1, 1]


def test_keys_without_a_row_get_the_default_vector() -> None:
    table = table_of([tier(torch.arange(4), 1.0)], default=lambda keys: keys.float().unsqueeze(1).expand(-1, 4))
    assert table.lookup(torch.tensor([2, -7, 50])).tolist() == [[1.0] * 4, [-7.0] * 4, [50.0] * 4]


def test_a_tier_keeps_rows_of_a_slower_tier() -> None:
    fast, slow = host(4), tier(torch.arange(8), 2.0)
    table = table_of([fast, slow], keeps_found=[True, False])
    table.lookup(torch.tensor([1, 1, 6, 70]))
    assert fast.count() == 2
    table.lookup(torch.tensor([6, 1]))
    assert slow.statistics().keys == 3


def test_insertions_and_erasures_reach_all_tiers() -> None:
    fast, slow = host(4), host(4)
    table = table_of([fast, slow])
    table.insert(torch.arange(5), torch.ones(5, 4))
    table.erase(torch.tensor([2]))
    table.flush()
    assert (fast.count(), slow.count()) == (4, 4)
    assert table.find(torch.arange(5)).mask.tolist() == [True, True, False, True, True]


def test_rows_are_removed_after_a_change_that_is_under_way_and_none_comes_later() -> None:
    """What a change wrote after the removal stayed for good."""
    held = host(4)
    table = table_of([held])
    with table.changing():
        table.insert(torch.arange(3), torch.ones(3, 4))
        table.group.retire()
        clearing = threading.Thread(target=table.clear)
        clearing.start()
        clearing.join(0.2)
        table.insert(torch.arange(3, 5), torch.ones(2, 4))
    clearing.join()
    with pytest.raises(StorageError):
        table.insert(torch.arange(3), torch.ones(3, 4))
    assert held.count() == 0


def test_other_keys_are_rejected() -> None:
    with pytest.raises(ConfigError, check=at("keys")):
        table_of([host(4)]).lookup(torch.zeros(3))
