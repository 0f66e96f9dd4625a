# SPDX-License-Identifier: Apache-2.0
"""The planner's placements: balanced, within the budget, and no worse than any plan that has one placement for all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terarec.apps.planner import PlannedSharding, plan_tables, rate_plan
from terarec.batch import Jagged
from terarec.dist import ColumnWise, DataParallel, Hybrid, Ranks, RowWise, TableWise, load_plan, same_for_all, shard
from terarec.dist.costs import MachineCosts, TableLoad
from terarec.embedding import EmbeddingCollection
from terarec.errors import ConfigError, StorageError
from terarec.optim import RowOptimizer
from terarec.spec import DynamicTableSpec, FeatureSpec, RowOptions, RowWiseAdaGradSpec, TableSpec, Tiers
from tests.dist.launch import Raised, run_ranks
from tests.errors import at

COSTS = MachineCosts()
BATCH = 1024


def load(name: str, rows: int, size: int, *, width: int = 16, dynamic: bool = False, **options: Any) -> TableLoad:
    """Return a table whose keys follow Zipf's law with exponent 1.2 in two batches."""
    generator = torch.Generator().manual_seed(len(name) * rows)
    cumulated = torch.arange(1, rows + 1, dtype=torch.float64).pow(-1.2).cumsum(0)
    batches = []
    for _ in range(2):
        drawn = torch.searchsorted(
            cumulated, torch.rand(BATCH, generator=generator, dtype=torch.float64) * cumulated[-1]
        )
        batches.append([part.unique() for part in drawn.clamp(max=rows - 1).chunk(size)])
    tiers = options.pop("tiers", None)
    spec = (
        DynamicTableSpec(name=name, width=width, tiers=tiers)
        if dynamic
        else TableSpec(name=name, rows=rows, width=width, tiers=tiers)
    )
    return TableLoad(spec=spec, rows=rows, num_bytes=8 * width * rows, row_bytes=8 * width, batches=batches, **options)


def loads(size: int) -> list[TableLoad]:
    sizes = {"user": 200_000, "item": 50_000, "city": 3_000, "brand": 800, "day": 7}
    return [*(load(name, rows, size) for name, rows in sizes.items()), load("tag", 20_000, size, dynamic=True)]


def slowest(found: PlannedSharding) -> float:
    return max(rank.milliseconds for rank in found.ranks)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_the_ranks_take_nearly_the_same_time_and_no_uniform_plan_is_faster(size: int) -> None:
    tables = loads(size)
    found = plan_tables(tables, size, COSTS)
    assert set(found.plan.placements) == {table.spec.name for table in tables}
    assert found.slowest_over_mean <= 1.15
    specs = [table.spec for table in tables]
    for placement in (DataParallel(), RowWise(), TableWise(rank=0)):
        uniform = rate_plan(same_for_all(specs, placement, size), tables, COSTS)
        assert slowest(found) <= 1.03 * slowest(uniform), placement


def test_rows_and_bytes_are_those_of_the_sampled_keys() -> None:
    table = load("item", 50, 2)
    by_row, whole, copies, columns = (
        rate_plan(same_for_all([table.spec], placement, 2), [table], COSTS).ranks
        for placement in (RowWise(), TableWise(rank=1), DataParallel(), ColumnWise())
    )
    counts = torch.zeros(2, 2)  # of a rank's share, the keys whose row is on a rank
    for batch in table.batches:
        for source, keys in enumerate(batch):
            for owner in range(2):
                counts[source, owner] += (keys % 2 == owner).sum() / len(table.batches)
    for rank in (0, 1):
        other = 1 - rank
        vectors, gradients = counts[other, rank], counts[rank, other]
        assert by_row[rank].rows_looked_up == pytest.approx(counts[:, rank].sum().item(), abs=1)
        assert by_row[rank].sent_bytes == pytest.approx((64 * vectors + 72 * gradients).item(), abs=1)
        assert copies[rank].rows_looked_up == pytest.approx(counts[rank].sum().item(), abs=1)
        assert copies[rank].rows_updated == columns[rank].rows_looked_up == pytest.approx(counts.sum().item(), abs=1)
        assert copies[rank].table_bytes == table.num_bytes == 2 * columns[rank].table_bytes
    assert (whole[0].rows_looked_up, whole[0].table_bytes) == (0, 0)
    assert whole[1].sent_bytes == pytest.approx(64 * counts[0].sum().item(), abs=1)


def test_the_budget_of_a_rank_bounds_rows_with_their_states() -> None:
    tables = loads(4)
    total = sum(table.num_bytes for table in tables)
    found = plan_tables(tables, 4, COSTS, rank_bytes=int(0.27 * total))
    assert max(rank.table_bytes for rank in found.ranks) <= 0.27 * total
    with pytest.raises(StorageError, check=at("plan.rank_bytes")):
        plan_tables(tables, 4, COSTS, rank_bytes=int(0.24 * total))
    edited = same_for_all([table.spec for table in tables], TableWise(rank=2), 4)
    rated = rate_plan(edited, tables, COSTS)
    assert rated.ranks[2].table_bytes == total
    assert rated.slowest_over_mean == pytest.approx(4.0, rel=0.4)


def test_impossible_placements_are_not_chosen(tmp_path: Path) -> None:
    uneven = load("user", 9_001, 2, width=9)
    found = plan_tables([load("item", 5_000, 2), uneven], 2, COSTS)
    assert found.tables[1].placement != "column_wise"
    with pytest.raises(ConfigError, check=at("place")):
        plan_tables([uneven], 2, COSTS, fixed={"user": "column_wise"})
    for wrong in ({"itme": "row_wise"}, {"item": "rowwise"}):
        with pytest.raises(ConfigError, check=at("place")):
            plan_tables([load("item", 5_000, 2)], 2, COSTS, fixed=wrong)
    full = load("item", 5_000, 2, dynamic=True)
    full = replace(full, spec=replace(full.spec, max_rows=3))  # its hot keys alone are more
    assert plan_tables([full], 2, COSTS).tables[0].placement != "hybrid"
    with pytest.raises(ConfigError, check=at("place")):
        plan_tables([full], 2, COSTS, fixed={"item": "hybrid"})
    tiered = load("item", 5_000, 2, tiers=Tiers(host="1MiB", file=str(tmp_path)))
    assert plan_tables([tiered], 2, COSTS, fixed={"item": "column_wise"}).tables[0].placement == "column_wise"


def test_given_placements_are_kept_and_hot_rows_are_those_that_most_shares_have() -> None:
    table = load("item", 5_000, 4)
    found = plan_tables([table, *loads(4)[2:]], 4, COSTS, fixed={"item": "hybrid", "day": "column_wise"})
    assert found.tables[0].reason == "given"
    hot = found.plan.placements["item"].hot_keys
    shares = [set(keys.tolist()) for batch in table.batches for keys in batch]
    assert hot
    assert all(sum(key in share for share in shares) >= len(shares) / 2 for key in hot)
    assert 4_999 not in hot


def test_links_between_machines_have_their_own_speed() -> None:
    tables = loads(4)
    slow = MachineCosts(bandwidth=1e6, local_bandwidth=1e10)
    found = plan_tables(tables, 4, slow, ranks_per_node=2)
    by_row = replace(same_for_all([table.spec for table in tables], RowWise(), 4), ranks_per_node=2)
    assert slowest(found) <= slowest(rate_plan(by_row, tables, slow))
    near = replace(by_row, ranks_per_node=4)
    assert slowest(rate_plan(near, tables, slow)) < 0.01 * slowest(rate_plan(by_row, tables, slow))


def test_a_plan_is_saved_and_rated_again(tmp_path: Path) -> None:
    tables = loads(2)
    found = plan_tables(tables, 2, COSTS, rank_bytes=10**9)
    found.plan.save(tmp_path / "plan.json")
    assert rate_plan(load_plan(tmp_path / "plan.json"), tables, COSTS) == found


@pytest.mark.parametrize("field", ["lookup_seconds", "bandwidth"])
def test_costs_are_positive(field: str) -> None:
    with pytest.raises(ConfigError, check=at(f"MachineCosts.{field}")):
        MachineCosts(**{field: 0.0})


def bags_of(keys_per_bag: int, *, rows: int, size: int) -> TableLoad:
    """Return a table that bags of so many keys read, each key about once in a batch."""
    generator = torch.Generator().manual_seed(3)
    shares = []
    for _ in range(size):
        keys = torch.randint(0, rows, (64 * keys_per_bag,), generator=generator)
        shares.append((keys, torch.arange(64).repeat_interleave(keys_per_bag)))
    spec = TableSpec(name="tags", rows=rows, width=16)
    distinct = [keys.unique() for keys, _ in shares]
    return TableLoad(spec=spec, rows=rows, num_bytes=128 * rows, row_bytes=128, batches=[distinct], bags=[shares])


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_bags_are_pooled_where_fewer_bytes_travel(kind: str) -> None:
    for keys_per_bag, pooling in ((1, "samples"), (20, "rows")):
        table = bags_of(keys_per_bag, rows=100_000, size=2)
        found = plan_tables([table], 2, COSTS, fixed={"tags": kind})
        (entry,) = found.plan.tables
        assert entry.pooling == pooling
        assert ("pooled there" in found.tables[0].reason) == (pooling == "rows")
        other = replace(entry, pooling="samples" if pooling == "rows" else "rows")
        rated = rate_plan(replace(found.plan, tables=(other,)), [table], COSTS)
        assert rated.plan.tables == (other,)
        assert sum(rank.sent_bytes for rank in rated.ranks) > sum(rank.sent_bytes for rank in found.ranks)
    few = bags_of(20, rows=30, size=2)  # whose keys repeat in all bags
    assert plan_tables([few], 2, COSTS, fixed={"tags": kind}).plan.tables[0].pooling == "samples"


def test_bags_of_deterministic_plans_and_of_copies_are_pooled_on_the_ranks_of_the_samples() -> None:
    table = bags_of(20, rows=100_000, size=2)
    plan = same_for_all([table.spec], RowWise(), 2)
    with pytest.raises(ConfigError, check=at("ShardingPlan.tables")):
        replace(plan, deterministic=True, tables=(replace(plan.tables[0], pooling="rows"),))
    with pytest.raises(ConfigError, check=at("TablePlan.pooling")):
        replace(plan.tables[0], placement=DataParallel(), pooling="rows")
    assert plan_tables([table], 2, COSTS, fixed={"tags": "data_parallel"}).plan.tables[0].pooling == "samples"


BYTES = {
    "rows": RowWise(),
    "whole": TableWise(rank=1),
    "columns": ColumnWise(),
    "copies": DataParallel(),
    "hot": Hybrid(hot_keys=(0, 1, 2)),
}
RULE = RowWiseAdaGradSpec(lr=0.1, rows=RowOptions(clip_norm=0.1))


def share_of_keys(rank: int) -> torch.Tensor:
    return torch.randint(0, 60, (50 + rank,), generator=torch.Generator().manual_seed(rank))


def sent_by_a_step(ranks: Ranks, placement: str, is_exact: bool) -> dict[str, int]:
    spec = TableSpec(name="item", rows=60, width=8)
    plan = replace(same_for_all([spec], BYTES[placement], ranks.size), deterministic=is_exact)
    module = shard(EmbeddingCollection([spec], [FeatureSpec(name="item", table="item")]), plan, ranks)
    rows = RowOptimizer(module, RULE)
    keys, before = share_of_keys(ranks.rank), ranks.sent_bytes.copy()
    module(Jagged(names=("item",), keys=keys, offsets=torch.arange(len(keys) + 1))).pooled.sum().backward()
    rows.step()
    return dict(ranks.sent_bytes - before)


def steps_of_all(ranks: Ranks) -> dict[str, dict[str, int]]:
    found = {placement: sent_by_a_step(ranks, placement, False) for placement in BYTES}
    return found | {"exact columns": sent_by_a_step(ranks, "columns", True)}


@pytest.mark.slow
def test_ranks_send_the_bytes_that_the_planner_counts() -> None:
    sent = run_ranks(2, steps_of_all)
    assert not any(isinstance(result, Raised | str) for result in sent), sent
    spec, shares = TableSpec(name="item", rows=60, width=8), [share_of_keys(rank).unique() for rank in range(2)]
    table = TableLoad(spec=spec, rows=60, num_bytes=60 * 36, row_bytes=36, batches=[shares], row_sums=2)
    for name, placement in BYTES.items():
        planned = rate_plan(same_for_all([spec], placement, 2), [table], COSTS)
        for rank in planned.ranks:
            of_rank = sent[rank.rank][name]
            # The planner leaves out how many keys come, a few bytes for each table.
            assert sum(n for what, n in of_rank.items() if "count" not in what) == rank.sent_bytes, (name, of_rank)
    exact = replace(same_for_all([spec], ColumnWise(), 2), deterministic=True)
    sums = [rate_plan(exact, [replace(table, row_sums=count)], COSTS).ranks[0].sent_bytes for count in (2, 0)]
    assert sent[0]["exact columns"]["sums over columns"] == sums[0] - sums[1]
