# SPDX-License-Identifier: Apache-2.0
"""Deltas, tiers, parts and counting filters on ranks: checkpoints hold what those of one process hold."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terarec.batch import one_hot
from terarec.checkpoint import complete_checkpoints, load, save
from terarec.dist import (
    ColumnWise,
    DataParallel,
    Hybrid,
    Placement,
    Ranks,
    RowWise,
    ShardingPlan,
    TableWise,
    same_for_all,
    shard,
)
from terarec.dist.placement import PlacedTable
from terarec.dist.plan import TablePlan
from terarec.embedding import EmbeddingCollection
from terarec.formats import read_dataset
from terarec.formats.parts import write_parts
from terarec.models.artifact import load_model
from terarec.optim import RowOptimizer
from terarec.spec import (
    DynamicTableSpec,
    DynamicTablesSpec,
    FeatureSpec,
    RunSpec,
    SGDSpec,
    Tiers,
    counting_filter,
    lru,
)
from terarec.train.run import build
from tests.checkpoint.small_state import make_state
from tests.dist.launch import Raised, run_ranks
from tests.dist.test_training import TABLES, run_spec
from tests.params import in_every_run
from tests.train.planted import make_planted
from tests.train.small_run import weights
from tests.train.test_tiers import with_tiers

PLANS: dict[str, tuple[Placement, ...]] = {
    "columns": (RowWise(), ColumnWise(), DataParallel()),
    "hot": (RowWise(), Hybrid(hot_keys=(0, 3, 7)), TableWise(rank=1)),
}
DELTAS: dict[str, Any] = {"checkpoint_every": 8, "delta_every": 2, "keep_checkpoints": 20, "epochs": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planted")
    make_planted(directory, train=1000, valid=301, rows_per_group=100)
    write_parts(read_dataset(directory), directory, "train", 3)
    return directory


def runs_of(data: Path, out: Path) -> dict[str, tuple[RunSpec, str]]:
    """Return the runs, with the plans of those on ranks."""
    tiers = Tiers(host="40KiB", file=str(out / "rows"))
    filtered = DynamicTablesSpec(admit=counting_filter(2, num_bytes=1 << 16))
    dynamic = run_spec(data, tables="dynamic", **DELTAS)
    return {
        "static": (run_spec(data, **DELTAS), "columns"),
        "dynamic": (dynamic, "columns"),
        "filter": (dataclasses.replace(dynamic, model=dataclasses.replace(dynamic.model, tables=filtered)), "hot"),
        "tiers": (with_tiers(run_spec(data, **DELTAS), tiers), "hot"),
        "parts": (with_tiers(run_spec(data, passes=True, batch_size=100, epochs=1), tiers), "hot"),
    }


def train_all(ranks: Ranks, data: Path, out: Path, names: Sequence[str]) -> None:
    for name in names:
        spec, plan = runs_of(data, out)[name]
        entries = [TablePlan(table=table, placement=held) for table, held in zip(TABLES, PLANS[plan], strict=True)]
        made = ShardingPlan(world_size=ranks.size, tables=tuple(entries)) if ranks.size > 1 else None
        build(spec, out / name, ranks=ranks, plan=made).fit()


def rows_of(checkpoint: Path) -> dict[str, Tensor]:
    """Return the rows of the tables of a checkpoint, by their keys."""
    files, found = load(checkpoint).table_files(), {}
    for name in files.names:
        pieces = list(files.rows(name))
        keys = torch.cat([rows.keys for rows in pieces])
        order = keys.argsort()
        found |= {f"{name}/keys": keys[order], name: torch.cat([rows.weights for rows in pieces])[order]}
    return found


EVERY_RUN, OTHERS = ["dynamic", "parts"], ["static", "filter", "tiers", "dynamic"]


@pytest.mark.parametrize("names", in_every_run([EVERY_RUN], [EVERY_RUN, OTHERS]), ids=" ".join)
def test_checkpoints_of_ranks_hold_what_those_of_one_process_hold(data: Path, tmp_path: Path, names: list[str]) -> None:
    results = run_ranks(2, train_all, data, tmp_path / "ranks", names)
    assert not any(isinstance(result, Raised | str) for result in results), results
    train_all(Ranks(), data, tmp_path / "one", names)
    for name in names:
        found, expected = (complete_checkpoints(tmp_path / side / name / "checkpoints") for side in ("ranks", "one"))
        assert [path.name for path in found] == [path.name for path in expected]
        for path, wanted in zip(found, expected, strict=True):
            assert len(load(path)._chain) == len(load(wanted)._chain)
            mine, theirs = rows_of(path), rows_of(wanted)
            assert mine.keys() == theirs.keys()
            for table, held in theirs.items():
                torch.testing.assert_close(mine[table], held, rtol=1e-4, atol=1e-5, msg=f"{name}: {path.name}: {table}")
        for table, held in weights(load_model(tmp_path / "one" / name).model).items():
            other = weights(load_model(tmp_path / "ranks" / name).model)[table]
            torch.testing.assert_close(other, held, rtol=1e-4, atol=1e-5)
    for path in complete_checkpoints(tmp_path / "ranks" / "dynamic" / "checkpoints")[3:]:
        shutil.rmtree(path)  # a delta is left as the newest one
    again = build(runs_of(data, tmp_path)["dynamic"][0], tmp_path / "ranks" / "dynamic")
    again.fit(resume=True)
    straight = weights(load_model(tmp_path / "one" / "dynamic").model)
    for table, held in weights(load_model(tmp_path / "ranks" / "dynamic").model).items():
        torch.testing.assert_close(held, straight[table], rtol=1e-4, atol=1e-5)


MOST = 9
HOT = Hybrid(hot_keys=(0,))


def bounded(ranks: Ranks, placement: Placement, **options: Any) -> Any:
    """Return a collection of one dynamic table, on ranks if there are several."""
    spec = DynamicTableSpec(name="t", width=4, default=0.5, **options)
    module: Any = EmbeddingCollection([spec], [FeatureSpec(name="t", table="t")])
    if ranks.size == 1:
        return module
    return shard(module, same_for_all([spec], placement, ranks.size), ranks)


def look_up(module: Any, optimizer: RowOptimizer, keys: Tensor) -> None:
    module(one_hot(("t",), keys[None])).pooled.sum().backward()
    optimizer.step()


def owned(rank: int) -> Tensor:
    """Return some keys whose rows are on one rank of two."""
    spec = DynamicTableSpec(name="t", width=4)
    keys = torch.arange(1, 200)
    placed = PlacedTable(spec, RowWise(), same_for_all([spec], RowWise(), 2))
    return keys[placed.owners(keys) == rank]


def copies(ranks: Ranks) -> dict[str, Any]:
    """Return what each rank holds of a hot row, after one rank has got many other keys."""
    found = {}
    for name, options in {
        "evicted": {"max_rows": 8, "evict": lru(share=0.25)},
        "filtered": {"admit": counting_filter(4, num_bytes=64)},
        "admitted": {"admit": counting_filter(4, num_bytes=64)},
    }.items():
        module = bounded(ranks, HOT, **options)
        optimizer = RowOptimizer(module, SGDSpec())
        keys = [torch.zeros(1, dtype=torch.int64), *owned(0)[:50].split(2 if name == "evicted" else 50)]
        if name != "evicted":
            keys = keys[::-1] + keys[:1] * (name == "admitted")
        for batch in keys:
            look_up(module, optimizer, batch)
        rows = module.local.tables["t"]
        mine = rows.keys()
        found[name] = rows.export(mine[mine == 0]).weights.tolist()
        if name == "evicted":
            assert mine.numel() <= 5
            module.tables["t"].evict(keep_at_least=0)
            found["kept"] = rows.keys().tolist()
    return found


def test_copies_of_a_row_stay_equal_where_rows_come_and_go() -> None:
    """A rank evicted its copy, or admitted its key, by the other keys that it had; there the row began anew."""
    results = run_ranks(2, copies)
    assert results[0] == results[1]
    counts = {name: len(rows) for name, rows in results[0].items()}
    assert counts == {"evicted": 1, "kept": 1, "filtered": 0, "admitted": 1}


def resumed(ranks: Ranks, path: Path) -> tuple[int, int]:
    """Return the rows on this rank after loading, and after the next batch, which is saved."""
    module = bounded(ranks, RowWise(), max_rows=MOST, evict=lru())
    load(path / "one").load_tables(module.tables, with_state=True)
    optimizer, tables = RowOptimizer(module, SGDSpec()), module.tables
    loaded = len(tables["t"])
    for keys in (owned(0)[-1:], owned(0)[-3:], owned(1)[:20].split(4)[-1]):
        look_up(module, optimizer, keys)
    save(path, dataclasses.replace(make_state(4), tables=tables), writers=ranks)
    return loaded, len(tables["t"])


def test_a_full_table_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Keys are not spread evenly: a rank had no room for its share."""
    module = bounded(Ranks(), RowWise(), max_rows=MOST, evict=lru())
    look_up(module, RowOptimizer(module, SGDSpec()), owned(0)[:MOST])
    save(tmp_path, dataclasses.replace(make_state(3), tables=module.tables)).rename(tmp_path / "one")
    (loaded, left), (none, other) = run_ranks(2, resumed, tmp_path)
    assert (loaded, none) == (MOST, 0)
    assert left + other <= MOST
    [path] = complete_checkpoints(tmp_path)
    load(path).load_tables(module.tables, with_state=True)
    assert len(module.tables["t"]) == left + other


PLACES: dict[str, Placement] = {
    "copies": DataParallel(),
    "columns": ColumnWise(ranks=(1, 0)),
    "there": TableWise(rank=1),
}


def evicted_rows(ranks: Ranks) -> dict[str, int]:
    """Return how many rows of each table were evicted, by what all ranks write, and again by what they have read."""
    specs = [DynamicTableSpec(name=name, width=4, max_rows=8, evict=lru(share=0.25)) for name in PLACES]
    module: Any = EmbeddingCollection(specs, [FeatureSpec(name=name, table=name) for name in PLACES])
    if ranks.size > 1:
        entries = tuple(TablePlan(table=name, placement=placement) for name, placement in PLACES.items())
        module = shard(module, ShardingPlan(world_size=ranks.size, tables=entries), ranks)
    optimizer = RowOptimizer(module, SGDSpec())
    for step in range(6):
        share = ranks.share(4)
        keys = torch.arange(4 * step + share.start, 4 * step + share.stop)
        module(one_hot(tuple(PLACES), keys.repeat(len(PLACES), 1))).pooled.sum().backward()
        optimizer.step()
    found = {}
    for name, table in module.tables.items():
        for _ in range(2):
            pieces = [piece for piece in table.export_memory(100) if "num_evicted" in piece]
            count = torch.tensor([sum(int(piece["num_evicted"]) for piece in pieces)])
            found[name] = int(ranks.all_reduce_("what is written", count))
            counts = {"clock": torch.tensor([6]), "num_evicted": torch.tensor([found[name]])}
            table.import_memory(counts)
    return found


def test_evicted_rows_with_copies_or_columns_are_counted_once() -> None:
    expected = evicted_rows(Ranks())
    assert min(expected.values()) > 0
    assert run_ranks(2, evicted_rows) == [expected] * 2
