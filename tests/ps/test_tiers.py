# SPDX-License-Identifier: Apache-2.0
"""What every tier does, compared with a dictionary."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from terarec.errors import ConfigError
from tests.errors import at
from tests.ps.tiers import KINDS, Tier, distinct_rows

WIDTH = 5
rows_of = partial(distinct_rows, WIDTH)
EXTREMES = torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1])


@pytest.fixture(params=list(KINDS))
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = KINDS[request.param](tmp_path, WIDTH, lambda: request.getfixturevalue("redis_server"))
    yield made
    made.close()


def test_rows_are_found_as_they_were_inserted(tier: Tier) -> None:
    keys = torch.arange(-50, 50) * 7
    tier.insert(keys, rows_of(keys))
    requested = torch.cat([keys.flip(0), torch.tensor([3, 3, -1]), keys[:5]])
    found = tier.lookup(requested)
    assert found.mask.tolist() == [True] * 100 + [False] * 3 + [True] * 5
    assert torch.equal(found.rows[found.mask], rows_of(requested[found.mask]))
    assert tier.count() == 100


def test_any_key_is_a_key(tier: Tier) -> None:
    tier.insert(EXTREMES, rows_of(EXTREMES))
    found = tier.lookup(EXTREMES)
    assert bool(found.mask.all())
    assert torch.equal(found.rows, rows_of(EXTREMES))


def test_nothing_is_found_in_an_empty_tier(tier: Tier) -> None:
    assert not bool(tier.lookup(EXTREMES).mask.any())
    assert tier.lookup(EXTREMES[:0]).rows.shape == (0, WIDTH)
    tier.insert(EXTREMES[:0], torch.empty(0, WIDTH))
    tier.erase(EXTREMES)
    assert tier.count() == 0


def test_the_last_row_of_a_key_counts(tier: Tier) -> None:
    keys = torch.tensor([4, 9, 4, 4, 9])
    tier.insert(keys, torch.arange(5.0).unsqueeze(1).expand(5, WIDTH))
    assert tier.lookup(torch.tensor([4, 9])).rows[:, 0].tolist() == [3.0, 4.0]
    tier.insert(torch.tensor([9]), torch.full((1, WIDTH), 7.0))
    assert tier.lookup(torch.tensor([4, 9])).rows[:, 0].tolist() == [3.0, 7.0]
    assert tier.count() == 2


def test_erased_rows_are_gone_and_can_come_back(tier: Tier) -> None:
    keys = torch.arange(20)
    tier.insert(keys, rows_of(keys))
    tier.erase(torch.tensor([3, 3, 99, 17]))
    assert (~tier.lookup(keys).mask).nonzero()[:, 0].tolist() == [3, 17]
    tier.insert(torch.tensor([17, 40]), rows_of(torch.tensor([17, 40]), salt=1.0))
    found = tier.lookup(torch.tensor([17, 40, 16]))
    assert torch.equal(found.rows, torch.cat([rows_of(torch.tensor([17, 40]), 1.0), rows_of(torch.tensor([16]))]))
    tier.clear()
    assert tier.count() == 0
    assert not bool(tier.lookup(keys).mask.any())


def test_a_result_is_not_changed_by_later_insertions(tier: Tier) -> None:
    keys = torch.arange(8)
    tier.insert(keys, rows_of(keys))
    found = tier.lookup(keys)
    tier.insert(keys, rows_of(keys, salt=2.0))
    assert torch.equal(found.rows, rows_of(keys))


def test_all_rows_are_listed_once(tier: Tier) -> None:
    keys = torch.arange(-400, 600) * 3
    tier.insert(keys, rows_of(keys))
    parts = list(tier.guarded.level.items(0, 64))
    listed = torch.cat([part for part, _ in parts])
    rows = torch.cat([part for _, part in parts])
    assert listed.sort().values.tolist() == keys.tolist()
    assert torch.equal(rows.contiguous().view(torch.float32), rows_of(listed))


def test_statistics_count_keys(tier: Tier) -> None:
    tier.insert(torch.arange(6), rows_of(torch.arange(6)))
    tier.lookup(torch.tensor([0, 0, 5, 6, -2]))
    counted = tier.statistics()
    assert (counted.keys, counted.hits, counted.inserted, counted.damaged) == (5, 3, 6, 0)


@pytest.mark.parametrize(
    ("keys", "rows", "where"),
    [
        (torch.arange(3, dtype=torch.int32), torch.zeros(3, WIDTH), "keys"),
        (torch.arange(4).view(2, 2), torch.zeros(4, WIDTH), "keys"),
        (torch.arange(3), torch.zeros(2, WIDTH), "rows"),
        (torch.arange(3), torch.zeros(3, WIDTH + 1), "rows"),
        (torch.arange(3), torch.zeros(3, WIDTH, dtype=torch.float64), "rows"),
    ],
)
def test_other_shapes_and_types_are_rejected(tier: Tier, keys: torch.Tensor, rows: torch.Tensor, where: str) -> None:
    with pytest.raises(ConfigError, check=at(where)):
        tier.insert(keys, rows)
    assert tier.count() == 0
