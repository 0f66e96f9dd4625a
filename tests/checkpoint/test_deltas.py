# SPDX-License-Identifier: Apache-2.0
"""A base and any deltas load as a complete checkpoint of the same step does."""

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.batch import one_hot
from terarec.checkpoint import complete_checkpoints, follow_changes, load, mark_best, save
from terarec.checkpoint.directory import MANIFEST, keep_newest, read_manifest
from terarec.cli.inspect_model import describe_checkpoint, describe_table
from terarec.embedding import EmbeddingCollection
from terarec.errors import FormatError
from terarec.optim import RowOptimizer
from terarec.spec import AdamSpec, DynamicTableSpec, FeatureSpec, RowOptions, TableSpec, Tiers, freq, lru
from tests.checkpoint.test_tiered_tables import assert_same, state_of
from tests.errors import at

NUM_KEYS = 600
STATIC = [TableSpec(name="t", rows=NUM_KEYS, width=8), TableSpec(name="u", rows=NUM_KEYS, width=8)]
DYNAMIC = [
    DynamicTableSpec(name="t", width=8, max_rows=200, evict=lru(), admit=freq(2), report_evicted=True),
    DynamicTableSpec(name="u", width=8, track_uses=True),
]
FEATURES = [FeatureSpec(name="f", table="t"), FeatureSpec(name="g", table="u"), FeatureSpec(name="h", table="t")]
KINDS = {"static": STATIC, "dynamic": DYNAMIC}

Training = tuple[EmbeddingCollection, RowOptimizer]


def begun(kind: str, files: Path | None, *, seed: int = 1, rows: RowOptions | None = None) -> Training:
    tiers = None if files is None else Tiers(host="24KiB", file=str(files))
    embedding = EmbeddingCollection([replace(table, tiers=tiers) for table in KINDS[kind]], FEATURES, seed=seed)
    return embedding, RowOptimizer(embedding, AdamSpec(lr=0.05, rows=rows))


def train(held: Training, numbers: range) -> None:
    embedding, optimizer = held
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        keys = torch.randint(0, NUM_KEYS, (3, 20), generator=generator)
        embedding(one_hot(["f", "g", "h"], keys)).pooled.square().sum().backward()
        optimizer.step()


def restored(path: Path, kind: str, files: Path | None) -> EmbeddingCollection:
    embedding, _ = begun(kind, files)
    load(path).load_tables(embedding.tables, with_state=True)
    return embedding


def assert_equal(one: EmbeddingCollection, other: EmbeddingCollection) -> None:
    for name in one.tables:
        assert_same(one, other, name)
        kept = [each.tables[name].keyed for each in (one, other)]
        mine, others = ([] if keyed is None else [*keyed.export_memory(10**6)] for keyed in kept)
        assert [piece.keys() for piece in mine] == [piece.keys() for piece in others]
        for piece, theirs in zip(mine, others, strict=True):
            for part, values in piece.items():
                assert torch.equal(values.sort().values, theirs[part].sort().values)


@pytest.mark.parametrize("where", ["memory", "files"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(parts=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4), keep=st.booleans())
def test_a_base_and_deltas_equal_a_complete_checkpoint(kind, where, parts, keep) -> None:
    with TemporaryDirectory() as directory:
        base = Path(directory)
        files = None if where == "memory" else base / "files"
        held = begun(kind, files)
        train(held, range(5))
        done = 5
        save(base / "chain", state_of(held[0], 0), kind="base")
        for number, (steps, evicts) in enumerate(parts, 1):
            train(held, range(done, done + steps))
            done += steps
            if evicts and kind == "dynamic":
                held[0].tables["u"].evict(lru(), keep_at_least=len(held[0].tables["u"]) // 2)
            newest = save(base / "chain", state_of(held[0], number), kind="delta", keep=1 if keep else None)
            whole = save(base / "whole", state_of(held[0], number))
            assert read_manifest(newest).delta.sequence == number
            found = restored(newest, kind, None if files is None else base / "a")
            assert_equal(found, held[0])
            assert_equal(found, restored(whole, kind, None))
            found.arenas[0].data.close() if files is not None else None
        assert len(complete_checkpoints(base / "chain")) == len(parts) + 1
        held[0].arenas[0].data.close() if files is not None else None


def test_a_delta_holds_what_changed(tmp_path: Path) -> None:
    for kind in KINDS:
        held = begun(kind, None)
        train(held, range(40))
        whole = save(tmp_path / kind, state_of(held[0], 1), kind="base")
        delta = save(tmp_path / kind, state_of(held[0], 2), kind="delta")
        assert sum(path.stat().st_size for path in (delta / "changes").iterdir()) < 1000
        train(held, range(40, 41))
        later = save(tmp_path / kind, state_of(held[0], 3), kind="delta")
        sizes = [
            sum(p.stat().st_size for d in ds for p in d.iterdir()) for ds in ([later / "changes"], [whole / "tables"])
        ]
        assert 0 < sizes[0] < sizes[1] / 3


@pytest.mark.slow
def test_the_shorter_of_base_and_delta_is_written(tmp_path: Path) -> None:
    for kind in KINDS:
        held = begun(kind, None)
        train(held, range(40))
        kinds = []
        for step in range(1, 40):
            path = save(tmp_path / kind, state_of(held[0], step), kind="shorter")
            kinds.append(read_manifest(path).delta is not None)
            train(held, range(step, step + 1))
        # Few rows change each time, so that deltas follow, until they take as much as some bases.
        assert kinds[:10] == [False] + 9 * [True]
        assert not all(kinds[1:])
        assert kinds[kinds.index(False, 1) + 1]
        train(held, range(40, 80))
        assert read_manifest(save(tmp_path / kind, state_of(held[0], 40), kind="shorter")).delta is None


def test_frozen_tables_change_nothing(tmp_path: Path) -> None:
    held = begun("static", None, rows=RowOptions(frozen=("t",)))
    save(tmp_path, state_of(held[0], 0), kind="base")
    train(held, range(3))
    assert not list(held[0].tables["t"].export_since(10**6))
    assert list(held[0].tables["u"].export_since(10**6))


CHANGES = ["restart", "state dict", "new optimizer", "load", "clear", "global", "weights", "state"]


@pytest.mark.parametrize("change", CHANGES)
def test_where_it_is_not_known_what_changed_all_is_written(tmp_path: Path, change: str) -> None:
    kind = "dynamic" if change == "clear" else "static"
    held = begun(kind, None, rows=RowOptions(mode="global") if change == "global" else None)
    train(held, range(3))
    first = save(tmp_path, state_of(held[0], 0), kind="base")
    table = held[0].tables["t"]
    if change == "restart":
        table.restart(5)
    elif change == "state dict":
        held[0].load_state_dict(begun(kind, None, seed=9)[0].state_dict())
    elif change == "new optimizer":
        held = held[0], RowOptimizer(held[0], AdamSpec(lr=0.1))
    elif change == "load":
        load(first).load_tables(held[0].tables, with_state=True)
        held[0].tables["t"].arena.changes.discard()
    elif change == "clear":
        table.clear()
    elif change == "weights":
        with torch.no_grad():
            table.weights[3, 1:] += 1.0
    elif change == "state":
        table.state["exp_avg"].zero_()
    else:
        train(held, range(3, 4))
    path = save(tmp_path, state_of(held[0], 1), kind="delta")
    assert read_manifest(path).delta is None
    assert_equal(restored(path, kind, None), held[0])
    assert read_manifest(save(tmp_path, state_of(held[0], 2), kind="delta")).delta.sequence == 1


def test_a_loaded_chain_continues(tmp_path: Path) -> None:
    held = begun("dynamic", None)
    train(held, range(4))
    save(tmp_path / "run", state_of(held[0], 0), kind="base")
    train(held, range(4, 8))
    path = save(tmp_path / "run", state_of(held[0], 1), kind="delta")
    again = begun("dynamic", tmp_path / "files")
    load(path).load_tables(again[0].tables, with_state=True)
    follow_changes(again[0].tables, path)
    again[1].load_step_state(held[1].step_state())
    for each in (held, again):
        train(each, range(8, 12))
    last = save(tmp_path / "run", state_of(again[0], 2), kind="delta")
    assert read_manifest(last).delta.sequence == 2
    assert_equal(restored(last, "dynamic", None), held[0])
    served = EmbeddingCollection(DYNAMIC, FEATURES, seed=3)
    load(last).load_tables(served.tables, with_state=False)
    for name, table in served.tables.items():
        keys = held[0].tables[name].keys()
        assert torch.equal(table.keys(), keys)
        assert torch.equal(table.export(keys).weights, held[0].tables[name].export(keys).weights)
    files = load(last).table_files()
    for name, table in held[0].tables.items():
        assert files.shape(name).num_rows == len(table) == sum(len(rows.keys) for rows in files.rows(name))
    described = describe_checkpoint(last)
    assert {table["table"]: table["rows"] for table in described["tables"]} == {
        name: len(table) for name, table in held[0].tables.items()
    }
    assert describe_table(last, "t", 3)["rows"] == len(held[0].tables["t"])


def chain(directory: Path, count: int = 3) -> tuple[Training, list[Path]]:
    held, paths = begun("static", None), []
    for step in range(count):
        train(held, range(step, step + 1))
        paths.append(save(directory, state_of(held[0], step), kind="base" if step == 0 else "delta"))
    return held, paths


def test_a_gap_is_rejected(tmp_path: Path) -> None:
    _, paths = chain(tmp_path)
    shutil.rmtree(paths[1])
    with pytest.raises(FormatError, check=at(f"{tmp_path}/step-00000002")):
        load(paths[2])


def test_another_base_is_rejected(tmp_path: Path) -> None:
    _, paths = chain(tmp_path / "a")
    _, others = chain(tmp_path / "b")
    shutil.rmtree(paths[0])
    shutil.copytree(others[0], paths[0])
    (paths[0] / MANIFEST).write_text((paths[0] / MANIFEST).read_text() + " ")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/a/step-00000002: delta of step 1")):
        load(paths[2])


def test_a_repeated_delta_is_rejected(tmp_path: Path) -> None:
    _, paths = chain(tmp_path)
    again = tmp_path / "step-00000003"
    shutil.copytree(paths[2], again)
    text = (again / MANIFEST).read_text().replace('"step": 2,', '"step": 3,', 1)
    (again / MANIFEST).write_text(text)
    with pytest.raises(FormatError):
        load(again)


def test_checkpoints_that_deltas_need_are_kept(tmp_path: Path) -> None:
    held, paths = chain(tmp_path, 4)
    mark_best(tmp_path, 2)
    train(held, range(9, 10))
    save(tmp_path, state_of(held[0], 9), kind="base", keep=1)
    assert [path.name for path in complete_checkpoints(tmp_path)] == [*(p.name for p in paths[:3]), "step-00000009"]
    load(paths[2])
    mark_best(tmp_path, 9)
    keep_newest(tmp_path, 1)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000009"]
