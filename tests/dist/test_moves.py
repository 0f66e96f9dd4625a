# SPDX-License-Identifier: Apache-2.0
"""Checkpoints move between numbers of ranks, plans and tiers: they hold the same bits, and training goes on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.batch import Jagged
from terarec.checkpoint import TrainState, load, save
from terarec.checkpoint.table_files import rows_of, tensors_of
from terarec.dist import (
    ColumnWise,
    DataParallel,
    Hybrid,
    Placement,
    Ranks,
    RowWise,
    ShardingPlan,
    TableRowWise,
    TableWise,
    shard,
)
from terarec.dist.plan import TablePlan
from terarec.dist.shard import ShardedCollection
from terarec.embedding import EmbeddingCollection
from terarec.optim import RowOptimizer
from terarec.spec import AdamSpec, DynamicTableSpec, FeatureSpec, TableSpec, Tiers
from tests.dist.launch import Raised, run_ranks

WIDTH, KEYS, BATCH, STEPS = 24, 400, 24, 4  # a width that 2, 3, 4 and 8 divide
NAMES = ("small", "static", "dynamic", "second")
TABLES = {
    "small": TableSpec(name="small", rows=50, width=WIDTH),
    "static": TableSpec(name="static", rows=KEYS, width=WIDTH),
    "dynamic": DynamicTableSpec(name="dynamic", width=WIDTH, track_uses=True),
    "second": DynamicTableSpec(name="second", width=WIDTH),
}
ROW_BYTES = 3 * 4 * WIDTH + 64  # weights, two states of Adam, and what tiers note
PLANS: dict[str, tuple[Placement, ...]] = {
    "mixed": (DataParallel(), ColumnWise(), RowWise(), TableWise(rank=0)),
    "columns": (TableWise(rank=0), Hybrid(hot_keys=(0, 7, 399)), ColumnWise(), DataParallel()),
    "rows": (RowWise(), RowWise(), Hybrid(hot_keys=(1, 2)), TableRowWise(node=0)),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The ranks and tiers of a training.

    Attributes:
        size: Number of ranks.
        plan: Name of the plan, one of `PLANS`.
        host_rows: Rows that the fast tier of the static table and of "dynamic" has room for; None for no tiers.
    """

    size: int
    plan: str = "rows"
    host_rows: int | None = None


@dataclass(frozen=True)
class Move:
    """A checkpoint of a training in one place that goes on in another."""

    saved: Place
    loaded: Place


MOVES = (
    Move(Place(size=3, plan="mixed"), Place(size=1)),
    Move(Place(size=4, plan="columns"), Place(size=3, host_rows=150)),
    Move(Place(size=4, plan="mixed", host_rows=90), Place(size=2, plan="columns", host_rows=110)),
)
FURTHER_MOVES = (
    *(Move(Place(size=4, plan="mixed"), Place(size=size, plan="columns")) for size in (1, 2, 3, 8)),
    *(Move(Place(size=4, plan="mixed"), Place(size=size, host_rows=160)) for size in (1, 2, 3, 8)),
    *(Move(Place(size=4, host_rows=100), Place(size=size, plan="mixed")) for size in (1, 2, 3, 8)),
    *(Move(Place(size=4, host_rows=100), Place(size=size, host_rows=200)) for size in (1, 3, 8)),
    Move(Place(size=1, host_rows=250), Place(size=8, plan="columns")),
    Move(Place(size=8, plan="columns"), Place(size=3, host_rows=150)),
    Move(Place(size=3), Place(size=4, plan="columns")),
    Move(Place(size=1, plan="columns", host_rows=250), Place(size=3, plan="mixed", host_rows=110)),
)


def samples(step: int, part: slice) -> Jagged:
    """Return the samples of a rank: bags of 0 to 3 keys, of which some repeat."""
    keys, lengths = [], []
    for name in NAMES:
        generator = torch.Generator().manual_seed(100 * step + NAMES.index(name))
        of_bags = torch.randint(0, 4, (BATCH,), generator=generator)
        every = (torch.rand(int(of_bags.sum()), generator=generator) ** 2 * len_of(name)).long()
        ends = [0, *of_bags.cumsum(0).tolist()]
        keys.append(every[ends[part.start] : ends[part.stop]])
        lengths.append(of_bags[part])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    return Jagged(names=NAMES, keys=torch.cat(keys), offsets=offsets)


def len_of(name: str) -> int:
    spec = TABLES[name]
    return spec.rows if isinstance(spec, TableSpec) else KEYS


class Training:
    """Tables in a place, and their optimizer.

    Args:
        ranks: The ranks; the tables of one process are sharded, too, unless `place` is None.
        place: Ranks and tiers of the tables; None for one process without tiers.
        files: Directory of the files of tiers.
    """

    def __init__(self, ranks: Ranks, place: Place | None, files: Path) -> None:
        specs = dict(TABLES)
        if place is not None and place.host_rows is not None:
            tiers = Tiers(host=f"{place.host_rows * ROW_BYTES}", file=str(files))
            specs |= {name: replace(specs[name], tiers=tiers) for name in ("static", "dynamic")}
        features = [FeatureSpec(name=name, table=name) for name in NAMES]
        collection = EmbeddingCollection(list(specs.values()), features, seed=3)
        self.ranks = ranks
        self.module: Any = collection
        if place is not None:
            entries = [
                TablePlan(table=name, placement=held) for name, held in zip(NAMES, PLANS[place.plan], strict=True)
            ]
            plan = ShardingPlan(world_size=ranks.size, tables=tuple(entries), deterministic=True)
            self.module = shard(collection, plan, ranks)
        self.optimizer = RowOptimizer(self.module, AdamSpec(lr=0.01, eps=1e-3))

    @property
    def tables(self) -> Mapping[str, Any]:
        held = self.module.local if isinstance(self.module, ShardedCollection) else self.module
        return held.stores if isinstance(self.module, ShardedCollection) else held.tables

    def train(self, steps: range) -> None:
        for step in steps:
            jagged = samples(step, self.ranks.share(BATCH))
            pooled = self.module(jagged).pooled
            (pooled - 0.25).square().sum().backward()
            self.optimizer.step()

    def save(self, directory: Path, step: int) -> Path:
        state = TrainState(
            step=step,
            dense={},
            tables=self.tables,
            optimizer={"state": {}, "param_groups": []},
            rng=torch.get_rng_state(),
            progress={"row_optimizer": self.optimizer.step_state()},
        )
        return save(directory, state, writers=self.ranks)

    def load(self, path: Path) -> None:
        checkpoint = load(path)
        checkpoint.load_tables(self.tables, with_state=True)
        self.optimizer.load_step_state(checkpoint.progress["row_optimizer"])


def move(ranks: Ranks, groups: Mapping[int, Ranks | None], moved: Move, out: Path) -> None:
    """Train and save in one place; load, save again, train and save in the other."""
    first, second = groups[moved.saved.size], groups[moved.loaded.size]
    if first is not None:
        before = Training(first, moved.saved, out / "files-of-first")
        before.train(range(STEPS))
        before.save(out / "saved", STEPS)
    ranks.barrier("saved")
    if second is not None:
        after = Training(second, moved.loaded, out / "files-of-second")
        after.train(range(50, 52))  # rows and state that loading has to take back
        after.load(out / "saved" / f"step-{STEPS:08d}")
        after.save(out / "loaded", STEPS)
        after.train(range(STEPS, 2 * STEPS))
        after.save(out / "trained", 2 * STEPS)
    ranks.barrier("moved")


def move_all(ranks: Ranks, moves: tuple[Move, ...], out: Path) -> None:
    groups = {size: ranks.subset(list(range(size))) for size in (1, 2, 3, 4, 8) if size < ranks.size}
    groups[ranks.size] = ranks
    for number, moved in enumerate(moves):
        move(ranks, groups, moved, out / str(number))


def held_rows(directory: Path) -> dict[str, Tensor]:
    """Return weights, optimizer state and uses of all rows of the checkpoint in a directory, by their keys."""
    (path,) = directory.glob("step-*")
    files, found = load(path).table_files(), {}
    for name in files.names:
        rows, done = [], 0
        for piece in files.pieces(name):
            rows.append(rows_of(tensors_of(piece), done))
            done += rows[-1].keys.numel()
        order = torch.cat([held.keys for held in rows]).argsort()
        columns = [{"keys": held.keys, "weights": held.weights, **held.state, **held.uses} for held in rows]
        found |= {f"{name}/{part}": torch.cat([held[part] for held in columns])[order] for part in columns[0]}
    return found


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Compare rows by their keys; a checkpoint of tiers may lack those that were never trained."""
    assert found.keys() == expected.keys(), what
    for part, held in found.items():
        name = part.partition("/")[0]
        is_there = torch.isin(expected[f"{name}/keys"], found[f"{name}/keys"])
        assert torch.equal(held, expected[part][is_there]), f"{what}: {part}"
        if part.endswith("exp_avg_sq"):
            assert not expected[part][~is_there].any(), f"{what}: rows of {name}"


def check_moves(moves: tuple[Move, ...], size: int, out: Path) -> None:
    results = run_ranks(size, move_all, moves, out)
    failed = [result for result in results if isinstance(result, Raised | str)]
    assert not failed, "\n".join(map(str, failed))
    alone = Training(Ranks(), None, out)
    alone.train(range(STEPS))
    alone.save(out / "half", STEPS)
    alone.train(range(STEPS, 2 * STEPS))
    alone.save(out / "whole", 2 * STEPS)
    half, whole = held_rows(out / "half"), held_rows(out / "whole")
    assert {"static/exp_avg_sq", "dynamic/exp_avg"} <= half.keys()
    for number, moved in enumerate(moves):
        check_same(held_rows(out / str(number) / "saved"), half, f"{moved}: saved")
        check_same(held_rows(out / str(number) / "loaded"), half, f"{moved}: loaded")
        check_same(held_rows(out / str(number) / "trained"), whole, f"{moved}: trained")


def test_a_checkpoint_moves_between_ranks_plans_and_tiers(tmp_path: Path) -> None:
    check_moves(MOVES, 4, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_moves_to_one_two_three_and_eight(tmp_path: Path) -> None:
    check_moves(FURTHER_MOVES, 8, tmp_path)
