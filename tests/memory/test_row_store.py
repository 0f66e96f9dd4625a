# SPDX-License-Identifier: Apache-2.0
"""One behaviour suite for every row store; a new kind adds its row in `row_stores.KINDS`."""

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from terarec.errors import ConfigError, StorageError
from terarec.memory import RowStore
from terarec.memory.row_file import RowFile
from tests.memory.memory_row_store import MemoryRowStore
from tests.memory.row_stores import KINDS, Kind
from tests.params import examples

KEYS = np.array([5, -1, 0, 2**63 - 1, -(2**63), 77], dtype=np.int64)


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def rows_of(keys: NDArray[np.int64], row_bytes: int, version: int = 0) -> NDArray[np.uint8]:
    """Rows that depend on key and version in every byte."""
    seeds = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version * 2654435761 + 12345)
    columns = np.arange(row_bytes, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = seeds[:, None] ^ columns[None]
    mixed ^= mixed >> np.uint64(29)
    return ((mixed * np.uint64(0x94D049BB133111EB)) >> np.uint64(56)).astype(np.uint8)


def read(store: RowStore, keys: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    out = np.full((len(keys), store.row_bytes), 0xEE, dtype=np.uint8)
    return store.read(keys, out), out


def content(store: RowStore, chunk_rows: int = 1000) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for keys, rows in store.items(chunk_rows):
        assert 0 < len(keys) <= chunk_rows
        assert rows.shape == (len(keys), store.row_bytes)
        found |= {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
    assert len(found) == len(store)
    return found


def expected(keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> dict[int, bytes]:
    return {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}


def test_it_is_a_row_store(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    assert isinstance(store, RowStore)
    assert (store.row_bytes, len(store), store.last_commit, dict(store.metadata)) == (16, 0, 0, {})
    store.write(KEYS, rows_of(KEYS, 16))
    assert len(store) == 6
    assert store.memory_bytes > 0
    store.close()
    store.close()


@pytest.mark.parametrize("row_bytes", [16, 17, 512, 1032, 4096])
def test_rows_are_read_as_written(kind: Kind, tmp_path: Path, row_bytes: int) -> None:
    store = kind.create(tmp_path / "rows", row_bytes)
    rows = rows_of(KEYS, row_bytes)
    store.write(KEYS, rows)
    for _ in range(2):  # before and after they are on the disk
        found, out = read(store, KEYS[[3, 0, 0, 5]])
        assert found.all()
        assert (out == rows[[3, 0, 0, 5]]).all()
        store.commit()
    store.close()


def test_keys_without_a_row_leave_out_as_it_is(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    store.write(KEYS[:1], rows_of(KEYS[:1], 16))
    found, out = read(store, np.array([6, 5, 6], dtype=np.int64))
    assert found.tolist() == [False, True, False]
    assert (out[[0, 2]] == 0xEE).all()
    assert read(store, np.empty(0, dtype=np.int64))[0].shape == (0,)
    store.close()


def test_the_last_row_of_a_repeated_key_counts(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    keys = np.array([1, 2, 1], dtype=np.int64)
    rows = rows_of(np.arange(3), 16)
    store.write(keys, rows)
    assert content(store) == {1: rows[2].tobytes(), 2: rows[1].tobytes()}
    store.write(keys[:1], rows[1:2])
    assert content(store) == {1: rows[1].tobytes(), 2: rows[1].tobytes()}
    store.close()


def test_erased_rows_are_gone_and_can_come_back(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    rows = rows_of(KEYS, 16)
    store.write(KEYS, rows)
    store.commit()
    store.erase(np.array([0, 123, 0], dtype=np.int64))
    assert read(store, KEYS)[0].tolist() == [True, True, False, True, True, True]
    store.commit()
    store = kind.reopen(store, tmp_path / "rows")
    assert len(store) == 5
    store.write(KEYS[2:3], rows[:1])
    store.commit()
    store = kind.reopen(store, tmp_path / "rows")
    assert content(store) == expected(KEYS, rows) | {0: rows[0].tobytes()}
    store.close()


def test_only_what_was_committed_survives(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 32)
    assert kind.reopen(store, tmp_path / "rows").last_commit == 0
    store = kind.create(tmp_path / "other", 32)
    rows = rows_of(KEYS, 32)
    store.write(KEYS, rows)
    assert store.commit({"step": "1"}) == 1
    store.write(KEYS, rows_of(KEYS, 32, version=1))
    store.erase(KEYS[:2])
    store = kind.reopen(store, tmp_path / "other")
    assert (content(store), dict(store.metadata), store.last_commit) == (expected(KEYS, rows), {"step": "1"}, 1)
    store.erase(KEYS[1:])
    assert store.commit({"step": "2", "name": "é"}) == 2
    store = kind.reopen(store, tmp_path / "other")
    assert content(store) == expected(KEYS[:1], rows[:1])
    assert (dict(store.metadata), store.last_commit) == ({"step": "2", "name": "é"}, 2)
    store.close()


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_a_scan_yields_every_row_once(kind: Kind, tmp_path: Path, chunk_rows: int) -> None:
    store = kind.create(tmp_path / "rows", 24)
    keys = np.arange(-40, 61, dtype=np.int64)
    store.write(keys, rows_of(keys, 24))
    store.write(keys[10:50], rows_of(keys[10:50], 24, version=1))
    assert content(store, chunk_rows) == expected(keys, rows_of(keys, 24)) | expected(
        keys[10:50], rows_of(keys[10:50], 24, version=1)
    )
    with pytest.raises(ConfigError):
        next(store.items(0))
    store.close()


def test_a_change_ends_a_scan(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    store.write(KEYS, rows_of(KEYS, 16))
    for change in (lambda: store.write(KEYS[:1], rows_of(KEYS[:1], 16)), lambda: store.erase(KEYS[:1])):
        scan = store.items(1)
        next(scan)
        change()
        with pytest.raises(StorageError):
            next(scan)
    store.close()


def test_a_snapshot_holds_the_last_commit(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    store.write(KEYS, rows_of(KEYS, 16))
    store.commit({"step": "9"})
    store.write(KEYS, rows_of(KEYS, 16, version=1))
    store.snapshot(tmp_path / "copy")
    store.commit()
    store.erase(KEYS)
    store.commit()
    copy = kind.load(tmp_path / "copy")
    assert (content(copy), dict(copy.metadata)) == (expected(KEYS, rows_of(KEYS, 16)), {"step": "9"})
    assert len(store) == 0
    with pytest.raises(ConfigError):
        store.snapshot(tmp_path / "copy")
    copy.close()
    store.close()


def test_a_closed_store_says_so(kind: Kind, tmp_path: Path) -> None:
    """RocksDB raised errors of its own, which no tier expects: so would a damaged database."""
    held = kind.create(tmp_path / "rows", 16)
    if isinstance(held, MemoryRowStore):
        pytest.skip("closing it empties it")
    held.close()
    out = np.zeros((1, 16), np.uint8)
    for use in (lambda: held.read(np.array([1]), out), lambda: len(held), lambda: list(held.items())):
        with pytest.raises(StorageError):
            use()


@pytest.mark.parametrize("row_bytes", [15, 4097, 0, -1])
def test_rows_have_16_to_4096_bytes(kind: Kind, tmp_path: Path, row_bytes: int) -> None:
    with pytest.raises(ConfigError):
        kind.create(tmp_path / "rows", row_bytes)
    assert not (tmp_path / "rows").exists()


def test_arrays_of_other_types_and_shapes_are_rejected(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    rows = rows_of(KEYS, 16)
    for keys, wrong in (
        (KEYS.astype(np.int32), rows),
        (KEYS[:, None], rows),
        (KEYS[:5], rows),
        (KEYS, rows[:, :15]),
        (KEYS, rows.view(np.int8)),
    ):
        with pytest.raises(StorageError):
            store.write(keys, wrong)
        with pytest.raises(StorageError):
            store.read(keys, wrong)
    with pytest.raises(StorageError):
        store.erase(KEYS.astype(np.uint64))
    assert len(store) == 0
    store.close()


def test_arrays_need_not_lie_in_one_piece(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 16)
    keys, rows = np.arange(20, dtype=np.int64), rows_of(np.arange(20), 16)
    store.write(keys[::2], rows[::2])
    out = np.zeros((10, 40), dtype=np.uint8)
    assert store.read(keys[::2], out[:, 3:19]).all()
    assert (out[:, 3:19] == rows[::2]).all()
    assert (out[:, :3] == 0).all()
    assert (out[:, 19:] == 0).all()
    store.close()


def test_readers_see_whole_rows_during_writes(kind: Kind, tmp_path: Path) -> None:
    store = kind.create(tmp_path / "rows", 512)
    keys = np.arange(200, dtype=np.int64)
    versions = [rows_of(keys, 512, version) for version in range(4)]
    store.write(keys, versions[0])
    wrong: list[int] = []
    is_done = threading.Event()

    def check() -> None:
        while not is_done.is_set():
            found, out = read(store, keys)
            good = np.any([(out == rows).all(axis=1) for rows in versions], axis=0)
            wrong.extend(np.flatnonzero(~(good & found)).tolist())

    readers = [threading.Thread(target=check) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(20):
        store.write(keys, versions[step % 4])
        if step % 5 == 0:
            store.commit()
    is_done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    store.close()


OPERATIONS: st.SearchStrategy[tuple[str, list[int]]] = st.one_of(
    st.tuples(st.just("write"), st.lists(st.integers(0, 60), max_size=40)),
    st.tuples(st.just("erase"), st.lists(st.integers(0, 60), max_size=20)),
    st.tuples(st.sampled_from(["commit", "reopen", "compact"]), st.just([])),
)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "memory"])
@settings(max_examples=examples(50))
@given(operations=st.lists(OPERATIONS, max_size=25), row_bytes=st.sampled_from([16, 40, 700]))
def test_any_sequence_equals_the_reference(name: str, operations: list[tuple[str, list[int]]], row_bytes: int) -> None:
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        store, reference = kind.create(Path(folder) / "rows", row_bytes), MemoryRowStore(row_bytes)
        for version, (operation, chosen) in enumerate(operations):
            keys = np.array(chosen, dtype=np.int64)
            if operation == "write":
                rows = rows_of(keys + 1000 * np.arange(len(keys)), row_bytes, version)
                store.write(keys, rows)
                reference.write(keys, rows)
            elif operation == "erase":
                store.erase(keys)
                reference.erase(keys)
            elif operation == "commit":
                assert store.commit({"v": str(version)}) == reference.commit({"v": str(version)})
            elif operation == "reopen":
                store = kind.reopen(store, Path(folder) / "rows")
                reference.snapshot(Path(folder) / f"reference-{version}")
                reference = MemoryRowStore.load(Path(folder) / f"reference-{version}")
            elif operation == "compact" and isinstance(store, RowFile):
                store.compact()
            assert content(store, 7) == content(reference)
            assert dict(store.metadata) == dict(reference.metadata)
            wanted = np.arange(61, dtype=np.int64)
            found, out = read(store, wanted)
            wanted_found, wanted_out = read(reference, wanted)
            assert (found == wanted_found).all()
            assert (out == wanted_out).all()
        store.close()
