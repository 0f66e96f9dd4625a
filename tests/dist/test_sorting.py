# SPDX-License-Identifier: Apache-2.0
"""Keys sorted as on a device equal those of the hash index, but for the order of the keys of a rank."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from terarec.dist import ColumnWise, DataParallel, Hybrid, Placement, RowWise, ShardingPlan, TableWise
from terarec.dist.placement import PlacedTable
from terarec.dist.plan import TablePlan
from terarec.dist.routing import Routed, StepKeys, TableKeys, hashed_keys
from terarec.dist.sorting import sorted_keys
from terarec.spec import DynamicTableSpec, TableSpec

RANKS = 3
ROWS = 40


@dataclass(frozen=True)
class Table:
    """A table, and whether the ranks of its rows pool its bags."""

    placement: Placement
    is_dynamic: bool = False
    is_pooled: bool = False


TABLES = [
    Table(RowWise()),
    Table(RowWise(), is_dynamic=True),
    Table(RowWise(ranks=(2, 0)), is_pooled=True),
    Table(TableWise(rank=1), is_pooled=True),
    Table(ColumnWise(ranks=(0, 2)), is_pooled=True),
    Table(DataParallel()),
    Table(Hybrid(hot_keys=(3, 1, 39))),
]


def placed() -> list[PlacedTable]:
    specs = [
        DynamicTableSpec(name=str(number), width=4)
        if table.is_dynamic
        else TableSpec(name=str(number), rows=ROWS, width=4)
        for number, table in enumerate(TABLES)
    ]
    plan = ShardingPlan(
        world_size=RANKS,
        tables=tuple(
            TablePlan(table=spec.name, placement=table.placement) for spec, table in zip(specs, TABLES, strict=True)
        ),
    )
    return [PlacedTable(spec, table.placement, plan) for spec, table in zip(specs, TABLES, strict=True)]


def keys_of(count: int, *, is_weighted: bool) -> list[TableKeys]:
    generator = torch.Generator().manual_seed(count)
    keys = []
    for table in TABLES:
        of_table = torch.randint(0, ROWS, (count,), generator=generator)
        if table.is_dynamic:
            of_table = of_table * 2**40 - 2**44
        bags = torch.randint(0, count // 3 + 1, (count,), generator=generator).sort().values
        weights = torch.rand(count, generator=generator) if is_weighted else None
        keys.append(TableKeys(of_table, bags, weights) if table.is_pooled else TableKeys(of_table))
    return keys


def segments(routed: Routed, values: Tensor, *, by_column: bool) -> list[Tensor]:
    """Return the values of the keys of each rank and of those with copies."""
    sizes = [max(routed.num_rows)] if by_column else routed.num_rows
    return list(torch.split(values, [*sizes, routed.num_copies]))


@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sorted_keys_equal_hashed_ones(count: int, is_weighted: bool) -> None:
    tables, keys = placed(), keys_of(count, is_weighted=is_weighted)
    takes_counts = [number % 2 == 0 for number in range(len(tables))]
    steps: list[StepKeys] = [
        distinct(tables, keys, RANKS, takes_counts=takes_counts) for distinct in (hashed_keys, sorted_keys)
    ]
    hashed, mine = steps
    assert torch.equal(mine.rows, hashed.rows)
    assert torch.equal(mine.copies, hashed.copies)
    assert torch.equal(mine.bags, hashed.bags)
    assert [int(total) for total in mine.totals] == list(hashed.totals)
    cut = [step.cut(step.rows, step.copies, step.bags) for step in steps]
    for number, (table, of_table, expected, found) in enumerate(zip(tables, keys, *cut, strict=True)):
        assert (found.num_rows, found.num_copies) == (expected.num_rows, expected.num_copies)
        # Each key is at its place.
        assert torch.equal(found.keys[mine.places[number]], of_table.keys)
        for one, other in zip(
            segments(found, found.keys, by_column=table.by_column),
            segments(expected, expected.keys, by_column=table.by_column),
            strict=True,
        ):
            assert torch.equal(one, other.sort().values)
        assert (found.counts is None) == (expected.counts is None) == (not takes_counts[number])
        if found.counts is not None and expected.counts is not None:
            assert dict(zip(found.keys.tolist(), found.counts.tolist(), strict=True)) == dict(
                zip(expected.keys.tolist(), expected.counts.tolist(), strict=True)
            )
        if found.bags is None or expected.bags is None:
            assert not TABLES[number].is_pooled
            continue
        for rank in range(RANKS):
            part, wanted = found.bags.parts[rank], expected.bags.parts[rank]
            assert part.numbers == wanted.numbers
            assert torch.equal(part.lengths, wanted.lengths)
            assert torch.equal(found.bags.bags[rank], expected.bags.bags[rank])
            assert (part.weights is None) == (wanted.weights is None)
            if part.weights is not None and wanted.weights is not None:
                assert torch.equal(part.weights, wanted.weights)
            # The places mean the same keys.
            column = 0 if table.by_column else rank
            here = segments(found, found.keys, by_column=table.by_column)[column]
            there = segments(expected, expected.keys, by_column=table.by_column)[column]
            assert torch.equal(here[part.places.long()], there[wanted.places.long()])
