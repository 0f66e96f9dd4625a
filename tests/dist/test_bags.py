# SPDX-License-Identifier: Apache-2.0
"""Bags that the ranks of the rows pool: the same vectors and gradients as in one process, and a vector for each bag."""

from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.dist import ColumnWise, Placement, Ranks, RowWise, ShardingPlan, TableWise, shard
from terarec.dist.plan import PooledOn, TablePlan
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import FeatureSpec, SGDSpec, TableSpec
from tests.dist.launch import Raised, run_ranks

WIDTH, ROWS, BATCH, BAG = 8, 1000, 6, 12
FEATURES = {"a": ("one", "sum"), "b": ("one", "sqrtn"), "c": ("two", "mean"), "d": ("two", "sum")}
PLACEMENTS: dict[str, Placement] = {"table": TableWise(rank=1), "rows": RowWise(), "columns": ColumnWise()}


def collection() -> EmbeddingCollection:
    tables = [TableSpec(name=name, rows=ROWS, width=WIDTH) for name in ("one", "two")]
    features = [FeatureSpec(name=name, table=table, pooling=pooling) for name, (table, pooling) in FEATURES.items()]  # type: ignore[arg-type]
    return EmbeddingCollection(tables, features, seed=2)


def samples(part: slice, *, is_weighted: bool) -> Jagged:
    """Return bags of 12 keys, the last sample's empty ones; some weights add up to zero."""
    generator = torch.Generator().manual_seed(4)
    keys = torch.randint(0, ROWS, (len(FEATURES), BATCH, BAG), generator=generator)
    weights = torch.rand(keys.shape, generator=generator)
    weights[:, 1] = torch.tensor([1.0, -1.0]).repeat(BAG // 2)
    lengths = torch.full((len(FEATURES), BATCH), BAG)
    lengths[:, -1] = 0
    is_there = (lengths > 0)[:, part]
    ends = lengths[:, part].flatten().cumsum(0)
    return Jagged(
        names=tuple(FEATURES),
        keys=keys[:, part][is_there].flatten(),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
        weights=weights[:, part][is_there].flatten() if is_weighted else None,
    )


def step(module: Any, jagged: Jagged) -> Tensor:
    """Train on a batch; return the vectors before."""
    rows = RowOptimizer(module, SGDSpec(lr=0.1))
    pooled: Tensor = module(jagged).pooled
    (pooled * torch.arange(1.0, pooled.shape[1] + 1)).square().sum().backward()
    rows.step()
    return pooled.detach()


def sharded(ranks: Ranks, kind: str, pooling: PooledOn) -> Any:
    entries = tuple(TablePlan(table=name, placement=PLACEMENTS[kind], pooling=pooling) for name in ("one", "two"))
    return shard(collection(), ShardingPlan(world_size=ranks.size, tables=entries), ranks)


def alone() -> dict[bool, list[Tensor]]:
    """Return the vectors of one process before and after a step, without and with weights."""
    found = {}
    for is_weighted in (False, True):
        module, every = collection(), samples(slice(0, BATCH), is_weighted=is_weighted)
        found[is_weighted] = [step(module, every), module(every).pooled.detach()]
    return found


def compare(ranks: Ranks, expected: dict[bool, list[Tensor]]) -> list[tuple[float, float, int, int]]:
    """Return for each case the differences before and after a step, and the bytes sent with and without."""
    found = []
    for kind in PLACEMENTS:
        for is_weighted in (False, True):
            part, sent, mine = ranks.share(BATCH), [], []
            for pooling in ("samples", "rows"):
                module = sharded(ranks, kind, pooling)  # type: ignore[arg-type]
                own, before = samples(part, is_weighted=is_weighted), sum(ranks.sent_bytes.values())
                mine = [step(module, own)]
                sent.append(sum(ranks.sent_bytes.values()) - before)
                with torch.no_grad():
                    mine.append(module(own).pooled)
            worst = [
                float((held - whole[part]).abs().max() / whole.abs().max())
                for held, whole in zip(mine, expected[is_weighted], strict=True)
            ]
            found.append((worst[0], worst[1], *sent))
    return found


def rejected(ranks: Ranks) -> list[str]:
    """Return what is raised for tables that cannot be pooled there."""
    found = []
    tables = [TableSpec(name="one", rows=ROWS, width=WIDTH)]
    entry = TablePlan(table="one", placement=RowWise(), pooling="rows")
    plan = ShardingPlan(world_size=ranks.size, tables=(entry,))
    for pooling in ("none", "max"):
        features = [FeatureSpec(name="a", table="one", pooling=pooling)]  # type: ignore[arg-type]
        with pytest.raises(Exception) as error:
            shard(EmbeddingCollection(tables, features), plan, ranks)
        found.append(type(error.value).__name__)
    module = sharded(ranks, "rows", "rows")
    jagged = samples(ranks.share(BATCH), is_weighted=True)
    assert jagged.weights is not None
    jagged.weights.requires_grad_()
    with pytest.raises(Exception) as error:
        module(jagged)
    return [*found, type(error.value).__name__]


def both(ranks: Ranks, expected: dict[bool, list[Tensor]]) -> Any:
    return compare(ranks, expected), rejected(ranks)


def test_bags_pooled_by_the_ranks_of_rows_equal_those_of_one_process_and_move_less() -> None:
    results = run_ranks(2, both, alone())
    assert not any(isinstance(result, Raised | str) for result in results), results
    for compared, raised in results:
        assert max(max(before, after) for before, after, _, _ in compared) <= 1e-6
        assert raised == ["ConfigError"] * 3
    for case in zip(*(compared for compared, _ in results), strict=True):
        with_keys, with_bags = (sum(counts) for counts in list(zip(*case, strict=True))[2:])
        assert with_bags < 0.6 * with_keys
