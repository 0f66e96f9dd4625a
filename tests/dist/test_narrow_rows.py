# SPDX-License-Identifier: Apache-2.0
"""Rows of 16 bits on ranks: they are rounded as in one process, so that copies of a row stay equal."""

from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.dist import DataParallel, Hybrid, Placement, Ranks, RowWise, ShardingPlan, TableWise, shard
from terarec.dist.plan import TablePlan
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import AdamSpec, DynamicTableSpec, FeatureSpec, RowOptions, TableSpec
from tests.dist.launch import run_ranks

ROWS, WIDTH, BATCH = 30, 6, 8
# Tables of other sizes on each rank come before those with copies.
PLACES: dict[str, Placement] = {
    "there": TableWise(rank=1),
    "some": RowWise(ranks=(1,)),
    "spread": RowWise(),
    "copies": DataParallel(),
    "hot": Hybrid(hot_keys=(3, 0, 11)),
    "there.dynamic": TableWise(rank=1),
    "spread.dynamic": RowWise(),
    "copies.dynamic": DataParallel(),
    "hot.dynamic": Hybrid(hot_keys=(3, 0, 11)),
}


def spec_of(name: str) -> TableSpec | DynamicTableSpec:
    if name.endswith("dynamic"):
        return DynamicTableSpec(name=name, width=WIDTH, dtype="bfloat16")
    return TableSpec(name=name, rows=ROWS, width=WIDTH, dtype="bfloat16")


def train(ranks: Ranks, mode: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the keys of the rows on this rank, and these rows."""
    names = [name for name in PLACES if mode != "global" or "." not in name]
    module: Any = EmbeddingCollection(
        [spec_of(name) for name in names], [FeatureSpec(name=name, table=name) for name in names], seed=1
    )
    if ranks.size > 1:
        entries = tuple(TablePlan(table=name, placement=PLACES[name]) for name in names)
        module = shard(module, ShardingPlan(world_size=ranks.size, tables=entries, deterministic=True), ranks)
    optimizer = RowOptimizer(module, AdamSpec(lr=0.01, rows=RowOptions(mode=mode)))
    share = ranks.share(BATCH)
    for step in range(4):
        drawn = torch.randint(ROWS, (len(names), BATCH), generator=torch.Generator().manual_seed(step))
        keys = drawn[:, share.start : share.stop]
        offsets = torch.arange(keys.numel() + 1)
        pooled = module(Jagged(names=tuple(names), keys=keys.flatten(), offsets=offsets)).pooled
        (pooled - 0.25).square().sum().backward()
        optimizer.step()
    held = {name: table.keys() for name, table in module.tables.items()}
    return {name: (keys, module.tables[name].export(keys).weights) for name, keys in held.items()}


@pytest.mark.parametrize("mode", ["local", "global"])
def test_they_have_the_bits_of_one_process(mode: str) -> None:
    expected = train(Ranks(), mode)
    for result in run_ranks(2, train, mode):
        assert isinstance(result, dict), result
        for name, (keys, weights) in result.items():
            every, rows = expected[name]
            assert torch.equal(weights, rows[torch.searchsorted(every, keys)]), name
