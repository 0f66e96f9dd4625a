# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of dynamic tables: keys, rows, state, use, and what waits for admission; no row numbers."""

import dataclasses
import json

import pytest
import torch

from terarec.checkpoint import load, save, table_files
from terarec.errors import ConfigError, FormatError, StorageError
from terarec.spec import DynamicTableSpec, TableSpec, counting_filter, freq, lru, prob
from terarec.storage import Arena
from terarec.storage.dynamic import dynamic_tables
from terarec.storage.dynamic_arena import DynamicArena
from terarec.storage.static import static_tables
from tests.checkpoint.small_state import make_state
from tests.errors import at

USERS = DynamicTableSpec(name="users", width=3, admit=freq(2), evict=lru(share=0.2), max_rows=20)
ITEMS = DynamicTableSpec(name="items", width=3, admit=counting_filter(2, num_bytes=64))
EMPTY = DynamicTableSpec(name="empty", width=3)
NARROW = DynamicTableSpec(name="narrow", width=3, dtype="bfloat16")


def make(*specs, state=True):
    arena = DynamicArena(specs, seed=1)
    if state:
        arena.attach_state((("sum", (arena.num_rows, 3)), ("step", (arena.num_rows,))), fills={"sum": 0.5, "step": 0.5})
    return {table.name: table for table in dynamic_tables(arena)}


def trained():
    tables = make(USERS, ITEMS, EMPTY)
    train(tables, range(12))
    arena = tables["users"].arena
    for tensor in (arena.weights, *arena.state.values()):
        tensor += torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    arena.reset_defaults()
    return tables


def train(tables, seeds):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for name in ("users", "items"):
            tables[name].rows(torch.randint(-(2**62), 2**62, (6,), generator=generator) % 31 - 15, train=True)


def contents(tables):
    """Everything held, by key."""
    contents = {}
    for name, table in tables.items():
        (rows,) = table.export_chunks(1000)
        for index, key in enumerate(rows.keys.tolist()):
            parts = {"weights": rows.weights, **rows.state, **rows.uses}
            contents[name, key] = {part: values[index].tolist() for part, values in parts.items()}
    return contents


def saved(directory, tables):
    return save(directory, dataclasses.replace(make_state(3), tables=tables))


@pytest.mark.parametrize("shard_bytes", [2**20, 200], ids=["one piece", "many pieces"])
def test_a_loaded_state_resumes_like_the_saved_one(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(table_files, "SHARD_BYTES", shard_bytes)
    tables = trained()
    path = saved(tmp_path, tables)
    assert (len(list((path / "tables").glob("users-*"))) > 1) == (shard_bytes == 200)
    loaded = make(USERS, ITEMS, EMPTY)
    load(path).load_tables(loaded, with_state=True)
    assert contents(loaded) == contents(tables)
    assert [len(table) for table in loaded.values()] == [len(table) for table in tables.values()]
    for held in (loaded, tables):
        train(held, range(20, 40))
    assert contents(loaded) == contents(tables)
    assert loaded["users"].num_evicted == tables["users"].num_evicted > 0
    assert torch.equal(loaded["users"].take_evicted(), tables["users"].take_evicted())


def test_narrow_rows_come_back_as_they_were(tmp_path):
    tables, loaded = make(NARROW), make(NARROW)
    tables["narrow"].rows(torch.arange(-9, 9), train=True)
    load(saved(tmp_path, tables)).load_tables(loaded, with_state=True)
    assert loaded["narrow"].arena.weights.dtype == torch.bfloat16
    assert contents(loaded) == contents(tables)


def test_loading_replaces_what_a_table_held(tmp_path):
    path = saved(tmp_path, trained())
    other = trained()
    train(other, range(50, 60))
    load(path).load_tables(other, with_state=True)
    assert contents(other) == contents(trained())


def test_files_hold_keys_and_no_row_numbers(tmp_path):
    path = saved(tmp_path, trained())
    files = {entry["file"] for entry in json.loads((path / "manifest.json").read_text())["files"]}
    assert {
        "tables/users-00000.safetensors",
        "tables/empty-00000.safetensors",
        "memory/users-00000.safetensors",
    } <= files
    one, other = trained(), make(EMPTY, ITEMS, USERS)
    other["items"].arena.allocate_rows(7, "so that rows have other numbers")
    load(path).load_tables(other, with_state=True)
    assert contents(other) == contents(one)


def test_serving_loads_rows_alone(tmp_path):
    tables = trained()
    path = saved(tmp_path, tables)
    bare = make(USERS, ITEMS, EMPTY, state=False)
    load(path).load_tables(bare, with_state=False)
    keys = next(tables["users"].export_chunks(100)).keys
    assert torch.equal(bare["users"].export(keys).weights, tables["users"].export(keys).weights)
    assert bare["users"].state_names == ()


def test_another_description_is_rejected(tmp_path):
    path = saved(tmp_path, trained())
    static = {t.name: t for t in static_tables(Arena([TableSpec(name=n, rows=9, width=3) for n in ("users", "items")]))}
    with pytest.raises(ConfigError, check=at(path, "'users' is dynamic")):
        load(path).load_tables({**make(EMPTY), **static}, with_state=False)
    with pytest.raises(ConfigError, check=at(path, "'users' comes with the optimizer state ['step', 'sum']")):
        load(path).load_tables(make(USERS, ITEMS, EMPTY, state=False), with_state=True)
    bare = make(EMPTY, ITEMS, USERS, state=False)
    bare["empty"].rows(torch.tensor([5]), train=True)
    with pytest.raises(ConfigError, check=at(path, "'users' comes with")):
        load(path).load_tables(bare, with_state=True)
    assert bare["empty"].keys().tolist() == [5]
    with pytest.raises(
        StorageError,
        check=at(
            "table 'users'", "got ['admission_counts', 'admission_keys'], which belongs to another admission policy"
        ),
    ):
        load(path).load_tables(make(dataclasses.replace(USERS, admit=prob(0.5)), ITEMS, EMPTY), with_state=True)
    with pytest.raises(StorageError, check=at("table 'users'", "holds 0 rows")):
        load(path).load_tables(make(dataclasses.replace(USERS, max_rows=3), ITEMS, EMPTY), with_state=True)
    static_path = saved(tmp_path / "static", static)
    with pytest.raises(ConfigError, check=at(static_path)):
        load(static_path).load_tables(make(USERS, ITEMS), with_state=False)


@pytest.mark.parametrize("file", ["tables/users-00000.safetensors", "memory/users-00001.safetensors"])
def test_a_damaged_file_is_named(tmp_path, file):
    path = saved(tmp_path, trained())
    content = bytearray((path / file).read_bytes())
    content[-3] ^= 4
    (path / file).write_bytes(content)
    with pytest.raises(FormatError, check=at(path / file)):
        load(path).load_tables(make(USERS, ITEMS, EMPTY), with_state=True)
