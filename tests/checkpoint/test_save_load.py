# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from terarec.checkpoint import complete_checkpoints, latest, load, save
from terarec.checkpoint.directory import MANIFEST
from terarec.errors import ConfigError, DataNotFoundError, FormatError, StorageError
from terarec.formats.container import read_tensors
from tests.checkpoint.small_state import ROWS, assert_holds, make_state, make_tables
from tests.errors import at


def test_saved_state_is_restored_bit_for_bit(tmp_path):
    state = make_state(7)
    path = save(tmp_path, state)
    assert path == tmp_path / "step-00000007"
    assert_holds(load(path), state)


@pytest.mark.parametrize("shard_bytes", [1, 100, 101, 37 * 28, 10**9])
def test_tables_are_cut_into_pieces_of_bounded_size(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr("terarec.checkpoint.table_files.SHARD_BYTES", shard_bytes)
    state = make_state(1)
    path = save(tmp_path, state)
    assert_holds(load(path), state)
    row_bytes = 4 * (3 + 3 + 1)
    for file in (path / "tables").iterdir():
        arrays, metadata = read_tensors(file)
        assert set(metadata) == {"table", "first_key", "rows"}
        assert sum(array.nbytes for array in arrays.values()) <= max(shard_bytes, row_bytes)
    assert len(list((path / "tables").iterdir())) >= len(ROWS)


def test_files_are_those_that_the_format_names(tmp_path):
    path = save(tmp_path, make_state(7))
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert files == {
        "manifest.json",
        "dense.safetensors",
        "optimizer.safetensors",
        "state.json",
        "tables/movie-00000.safetensors",
        "tables/user id-00001-00000.safetensors",
    }
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("terarec.checkpoint", 3, 7)
    assert {entry["file"] for entry in manifest["files"]} == files - {"manifest.json"}


def test_weights_come_without_the_optimizers_state(tmp_path):
    state = make_state(2)
    tables = make_tables(state_names=())
    load(save(tmp_path, state)).load_tables(tables, with_state=False)
    assert torch.equal(tables["movie"].weights, state.tables["movie"].weights)
    assert tables["movie"].state_names == ()


def test_tables_of_another_shape_or_optimizer_are_rejected(tmp_path):
    checkpoint = load(save(tmp_path, make_state(2)))
    with pytest.raises(ConfigError, check=at(f"{tmp_path}/step-00000002", "optimizer state ['exp_avg', 'row_sum']")):
        checkpoint.load_tables(make_tables(state_names=("row_sum",)), with_state=True)
    with pytest.raises(
        ConfigError, check=at(f"{tmp_path}/step-00000002", "holds the tables ['movie', 'user id-00001']")
    ):
        checkpoint.load_tables({"movie": make_tables()["movie"]}, with_state=True)
    for wrong in (36, 38):
        with pytest.raises(
            ConfigError, check=at(f"{tmp_path}/step-00000002", f"table 'movie' has 37 rows, expected {wrong}")
        ):
            checkpoint.load_tables(make_tables(rows={**ROWS, "movie": wrong}), with_state=True)


def test_the_newest_stay_and_the_latest_is_found(tmp_path):
    for step in (5, 40, 300, 123456789):
        save(tmp_path, make_state(step), keep=2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000300", "step-123456789"]
    assert latest(tmp_path).name == "step-123456789"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000300", "step-123456789"]


def test_a_newer_checkpoint_without_a_manifest_is_named(tmp_path, caplog):
    """Finding Q15: an older one was taken without a word."""
    for step in (5, 9):
        save(tmp_path, make_state(step), keep=2)
    latest(tmp_path)
    assert not caplog.records
    (tmp_path / "step-00000009" / MANIFEST).unlink()
    assert latest(tmp_path).name == "step-00000005"
    assert [record.args[0] for record in caplog.records] == [tmp_path / "step-00000009"]


def test_incomplete_checkpoints_are_ignored(tmp_path):
    save(tmp_path, make_state(5))
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000011.partial-1-0123abcd").mkdir()
    (tmp_path / "notes").write_text("mine")
    assert latest(tmp_path).name == "step-00000005"
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/step-00000009")):
        load(tmp_path / "step-00000009")
    state = make_state(9)
    assert_holds(load(save(tmp_path, state)), state)
    assert not (tmp_path / "step-00000011.partial-1-0123abcd").exists()


@pytest.mark.parametrize("missing", ["", "nowhere"])
def test_no_checkpoint_at_all(tmp_path, missing):
    with pytest.raises(DataNotFoundError, check=at(tmp_path / missing)):
        latest(tmp_path / missing)


def test_a_step_is_saved_once(tmp_path):
    state = make_state(5)
    save(tmp_path, state)
    with pytest.raises(StorageError, check=at(f"{tmp_path}/step-00000005")):
        save(tmp_path, make_state(5))
    assert_holds(load(latest(tmp_path)), state)


def test_a_type_that_numpy_lacks_is_named(tmp_path):
    state = make_state(1)
    state.dense["0.weight"] = state.dense["0.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, check=at("checkpoint")):
        save(tmp_path, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [2, 4])
def test_another_version_is_rejected(tmp_path, version):
    path = save(tmp_path, make_state(1))
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "version": version}))
    with pytest.raises(FormatError, check=at(f"{path}/manifest.json", f"version {version}")):
        load(path)


def test_a1_progress_that_is_not_json_is_rejected(tmp_path):
    state = dataclasses.replace(make_state(1), progress={"rows": {"state": torch.zeros(2)}})
    with pytest.raises(ConfigError, check=at("progress")):
        save(tmp_path, state)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_replaced_while_it_is_listed_hides_no_complete_one(tmp_path, monkeypatch):
    older, newer = tmp_path / "step-00000001", tmp_path / "step-00000002"
    older.mkdir()
    (older / MANIFEST).touch()
    list_entries = Path.iterdir

    def replaced(directory):
        entries = list(list_entries(directory))
        if older in entries:
            newer.mkdir()
            (newer / MANIFEST).touch()
            shutil.rmtree(older)
        return iter(entries)

    monkeypatch.setattr(Path, "iterdir", replaced)
    assert complete_checkpoints(tmp_path) == [newer]
