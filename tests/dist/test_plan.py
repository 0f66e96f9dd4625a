# SPDX-License-Identifier: Apache-2.0
"""Plans: their files, and what they reject."""

from pathlib import Path

import pytest
import torch

from terarec.dist import (
    ColumnWise,
    DataParallel,
    Hybrid,
    Placement,
    RowWise,
    ShardingPlan,
    TableRowWise,
    TableWise,
    load_plan,
    same_for_all,
)
from terarec.dist.placement import COPIES, PlacedTable
from terarec.dist.plan import TablePlan, default_plan, described
from terarec.errors import ConfigError, FormatError, StorageError
from terarec.spec import DynamicTableSpec, TableSpec, Tiers
from tests.errors import at

TABLES = [TableSpec(name="item", rows=101, width=8), DynamicTableSpec(name="user", width=4)]
PLACEMENTS: list[Placement] = [
    DataParallel(),
    TableWise(rank=1),
    RowWise(),
    RowWise(ranks=(3, 1)),
    ColumnWise(),
    TableRowWise(node=1),
    Hybrid(hot_keys=(7, 0, 100)),
    Hybrid(hot_keys=(7,), ranks=(0, 2)),
]


def plan(placement: Placement, **options: object) -> ShardingPlan:
    entries = (TablePlan(table="item", placement=placement), TablePlan(table="user", placement=RowWise()))
    return ShardingPlan(world_size=4, tables=entries, ranks_per_node=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.kind)
def test_a_plan_survives_its_file(placement: Placement, tmp_path: Path) -> None:
    made = plan(placement, wire="bfloat16", deterministic=True, rank_bytes=10_000)
    made.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == made
    made.check(TABLES, 4)
    assert placement.kind.replace("_", "-") in described(made, TABLES)[0]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.kind)
def test_every_key_of_a_static_table_has_one_row_on_each_rank_that_has_it(placement: Placement) -> None:
    made = plan(placement)
    table = PlacedTable(TABLES[0], placement, made)
    keys = torch.arange(101)
    seen = torch.zeros(101, dtype=torch.int64)
    for rank in range(4):
        part = table.part(rank)
        assert isinstance(part, TableSpec)
        rows, held = table.keys_on(rank, 0, part.rows)
        if rank not in table.ranks and not (table.has_copies or table.has_hot_rows):
            assert not held.numel()
            assert part.rows == 1
            continue
        assert torch.equal(table.local_keys(held), rows)
        if not table.by_column:
            owners = table.owners(held)
            assert bool(((owners == rank) | (owners == COPIES)).all())
        seen[held] += 1
    if table.by_column or table.has_copies:
        assert bool((seen == len(table.ranks)).all())
    else:
        copies = table.owners(keys) == COPIES
        assert bool((seen[~copies] == 1).all())
        assert bool((seen[copies] == 4).all())


def test_dynamic_keys_of_any_structure_are_spread_evenly() -> None:
    table = PlacedTable(TABLES[1], RowWise(), plan(RowWise()))
    for keys in (torch.arange(4000) * 4, torch.arange(4000) << 32, -torch.arange(4000)):
        shares = torch.bincount(table.owners(keys), minlength=4) / 4000
        assert float((shares - 0.25).abs().max()) < 0.03


def test_plans_that_do_not_fit_are_rejected() -> None:
    row_wise = TablePlan(table="item", placement=RowWise())
    with pytest.raises(ConfigError, check=at("ShardingPlan.tables", "occurs twice")):
        ShardingPlan(world_size=2, tables=(row_wise, row_wise))
    with pytest.raises(ConfigError, check=at("ShardingPlan.tables", "rank 4")):
        plan(TableWise(rank=4))
    with pytest.raises(ConfigError, check=at("ShardingPlan.tables", "node 2")):
        plan(TableRowWise(node=2))
    with pytest.raises(ConfigError, check=at("ShardingPlan.ranks_per_node")):
        ShardingPlan(world_size=3, tables=(), ranks_per_node=2)
    with pytest.raises(ConfigError, check=at("RowWise.ranks")):
        RowWise(ranks=(1, 1))
    with pytest.raises(ConfigError, check=at("Hybrid.hot_keys")):
        Hybrid(hot_keys=(1, 1))
    made = plan(RowWise())
    for error, tables, size, where in (
        (ConfigError, TABLES, 2, "plan.world_size"),
        (ConfigError, TABLES[:1], 4, "plan.tables"),
        (ConfigError, [*TABLES, TableSpec(name="shop", rows=3, width=4)], 4, "plan.tables"),
    ):
        with pytest.raises(error) as caught:
            made.check(tables, size)
        assert caught.value.where == where
    with pytest.raises(ConfigError, check=at("plan.tables: table 'item'", "hot key 101")):
        plan(Hybrid(hot_keys=(101,))).check(TABLES, 4)
    with pytest.raises(ConfigError, check=at("plan.tables: table 'item'", "divisor of the width")):
        plan(ColumnWise(ranks=(0, 1, 2))).check(TABLES, 4)
    bounded = [DynamicTableSpec(name="item", width=8, max_rows=6), TABLES[1]]
    plan(Hybrid(hot_keys=(1, 2))).check(bounded, 4)
    with pytest.raises(ConfigError, check=at("plan.tables: table 'item'", "max_rows 6 on 4 ranks, expected >= 7")):
        plan(Hybrid(hot_keys=(1, 2, 3))).check(bounded, 4)
    with pytest.raises(StorageError, check=at("plan.rank_bytes")):
        plan(TableWise(rank=1), rank_bytes=3000).check(TABLES, 4)
    assert plan(TableWise(rank=1)).weight_bytes(TABLES) == [0, 3232, 0, 0]


def test_a_file_with_a_wrong_field_is_rejected_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    same_for_all(TABLES, RowWise(), 2).save(path)
    path.write_text(path.read_text().replace('"row_wise"', '"rowwise"', 1))
    with pytest.raises(FormatError) as caught:
        load_plan(path)
    assert "$.tables[0].placement.kind" in str(caught.value)
    assert "row_wise" in str(caught.value)


def test_the_tiers_of_a_part_have_a_directory_for_each_rank(tmp_path: Path) -> None:
    spec = TableSpec(name="item", rows=101, width=8, tiers=Tiers(host="1MiB", file=str(tmp_path)))
    for placement in (TableWise(rank=0), RowWise(), Hybrid(hot_keys=(3,)), ColumnWise()):
        part = PlacedTable(spec, placement, plan(placement)).part(1)
        assert part.tiers == Tiers(host="1MiB", file=str(tmp_path / "rank-1"))
        assert part.width == (2 if isinstance(placement, ColumnWise) else 8)


def test_a_dynamic_table_of_fewer_rows_than_ranks_is_whole_on_one() -> None:
    """Finding Q: the default plan spread it by row, which its own check rejects."""
    tables = [*(DynamicTableSpec(name=f"t{rows}", width=8, max_rows=rows) for rows in (1, 3, 2, 4)), TABLES[1]]
    made = default_plan(tables, 4)
    made.check(tables, 4)
    assert list(made.placements.values()) == [*(TableWise(rank=rank) for rank in (0, 1, 2)), RowWise(), RowWise()]
