# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tables with a tier in files share the files, and hold the rows to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terarec.batch import one_hot
from terarec.checkpoint import TrainState, load, save
from terarec.embedding import EmbeddingCollection
from terarec.errors import DamagedFileError, FormatError
from terarec.optim import RowOptimizer
from terarec.spec import AdaGradSpec, DynamicTableSpec, FeatureSpec, TableSpec, Tiers, lru

WIDTH = 16
TABLES = {
    "static": TableSpec(name="t", rows=5000, width=WIDTH),
    "dynamic": DynamicTableSpec(name="t", width=WIDTH, max_rows=900, evict=lru()),
}
ROW_BYTES = 2 * 4 * WIDTH
FEATURES = [FeatureSpec(name="f", table="t")]


def collection(kind: str, directory: Path | None, *, seed: int = 1) -> tuple[EmbeddingCollection, RowOptimizer]:
    tiers = None if directory is None else Tiers(host=f"{150 * (ROW_BYTES + 60)}", file=str(directory))
    embedding = EmbeddingCollection([replace(TABLES[kind], tiers=tiers)], FEATURES, seed=seed)
    return embedding, RowOptimizer(embedding, AdaGradSpec(lr=0.1))


def train(held: tuple[EmbeddingCollection, RowOptimizer], steps: range) -> None:
    embedding, optimizer = held
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        keys = torch.randint(0, 5000, (1, 120), generator=generator)
        embedding(one_hot(["f"], keys)).pooled.square().sum().backward()
        optimizer.step()


def state_of(embedding: EmbeddingCollection, step: int) -> TrainState:
    return TrainState(
        step=step,
        dense={},
        tables=embedding.tables,
        optimizer={"state": {}, "param_groups": []},
        rng=torch.get_rng_state(),
        progress={},
    )


def assert_same(one: EmbeddingCollection, other: EmbeddingCollection, table: str = "t") -> None:
    mine, others = one.tables[table], other.tables[table]
    keys = mine.keys()
    assert torch.equal(keys, others.keys())
    rows, found = mine.export(keys), others.export(keys)
    assert torch.equal(rows.weights, found.weights)
    for held, theirs in ((rows.state, found.state), (rows.uses, found.uses)):
        assert held.keys() == theirs.keys()
        assert all(torch.equal(values, theirs[name]) for name, values in held.items())


def segments(directory: Path) -> list[Path]:
    return sorted(directory.rglob("segment-*.rows"))


@pytest.mark.parametrize("kind", TABLES)
def test_a_checkpoint_shares_the_files_and_is_opened_from_them(tmp_path: Path, kind: str) -> None:
    plain, tiered = collection(kind, None), collection(kind, tmp_path / "a")
    for held in (plain, tiered):
        train(held, range(12))
    path = save(tmp_path / "run", state_of(tiered[0], 12))
    shared = segments(path)
    assert shared
    assert [each.stat().st_nlink for each in shared] == [2] * len(shared)
    for held in (plain, tiered):  # which leaves the checkpoint as it is
        train(held, range(12, 24))

    opened = collection(kind, tmp_path / "b", seed=7)
    train(opened, range(50, 55))  # rows that loading has to take back
    before = opened[0].tier_use()
    load(path).load_tables(opened[0].tables, with_state=True)
    assert opened[0].tier_use().minus(before).rows_read == 0
    assert {each.stat().st_ino for each in segments(tmp_path / "b")} == {each.stat().st_ino for each in shared}
    train(opened, range(12, 24))
    assert_same(plain[0], tiered[0])
    loaded = collection(kind, None, seed=7)
    load(path).load_tables(loaded[0].tables, with_state=True)
    train(loaded, range(12, 24))
    assert_same(loaded[0], opened[0])
    if kind == "static":  # new keys of a dynamic table have initial weights of the seed that they are inserted by
        assert_same(loaded[0], tiered[0])
    again = save(tmp_path / "run", state_of(opened[0], 24))
    known = {each.stat().st_ino for each in shared}
    assert known & {each.stat().st_ino for each in segments(again)}, "what did not change is shared on"


def test_weights_alone_are_read_from_the_files(tmp_path: Path) -> None:
    tiered, plain = collection("dynamic", tmp_path / "a"), collection("dynamic", None)
    for held in (plain, tiered):
        train(held, range(5))
    path = save(tmp_path / "run", state_of(tiered[0], 5))
    tiers = Tiers(host="64KiB", file=str(tmp_path / "b"))
    for spec in (TABLES["dynamic"], replace(TABLES["dynamic"], tiers=tiers)):
        served = EmbeddingCollection([spec], FEATURES, seed=3)
        load(path).load_tables(served.tables, with_state=False)
        keys = plain[0].tables["t"].keys()
        assert torch.equal(served.tables["t"].keys(), keys)
        assert torch.equal(served.tables["t"].export(keys).weights, plain[0].tables["t"].export(keys).weights)


@pytest.mark.parametrize("file", ["manifest", "row_file.json", "segment"])
def test_damage_of_shared_files_is_named(tmp_path: Path, file: str) -> None:
    held = collection("static", tmp_path / "a")
    train(held, range(3))
    path = save(tmp_path / "run", state_of(held[0], 3))
    damaged = segments(path)[0] if file == "segment" else path / "rows" / "t" / file
    content = bytearray(damaged.read_bytes())
    content[-4096 if file == "segment" else 9] ^= 1  # of a segment, in its footer
    damaged.unlink()
    damaged.write_bytes(content)
    other = collection("static", tmp_path / "b")
    with pytest.raises((FormatError, DamagedFileError)) as caught:
        load(path).load_tables(other[0].tables, with_state=True)
    assert damaged.name in str(caught.value)
