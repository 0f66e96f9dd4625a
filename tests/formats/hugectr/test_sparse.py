# SPDX-License-Identifier: Apache-2.0
"""Sparse folders, single sparse files and optimizer states: golden bytes, round trips, damage."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats.hugectr.weights import (
    SparseFileLayout,
    SparseRows,
    StateLayout,
    open_sparse_folder,
    open_sparse_states,
    read_sparse_file,
    write_sparse_file,
    write_sparse_folder,
    write_sparse_states,
)
from tests.errors import at
from tests.params import examples

GOLDEN = SparseRows(
    np.array([7, -1]), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), np.array([0, 5], dtype=np.uint64)
)


def rows_of(count, width, *, has_slots, seed=0, low=-(2**63)):
    generator = np.random.default_rng(seed)
    keys = generator.integers(low, 2**63 if low else 2**32, count, endpoint=False)
    vectors = generator.standard_normal((count, width)).astype(np.float32)
    return SparseRows(keys, vectors, generator.integers(0, 30, count).astype(np.uint64) if has_slots else None)


def cut(rows, chunk):
    for start in range(0, len(rows.keys), chunk):
        part = slice(start, start + chunk)
        yield SparseRows(rows.keys[part], rows.vectors[part], None if rows.slots is None else rows.slots[part])


def joined(chunks):
    chunks = list(chunks)
    slots = None if chunks[0].slots is None else np.concatenate([chunk.slots for chunk in chunks])
    return SparseRows(
        np.concatenate([chunk.keys for chunk in chunks]), np.concatenate([chunk.vectors for chunk in chunks]), slots
    )


def assert_same(found, expected):
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.vectors, expected.vectors)
    assert (found.slots is None) == (expected.slots is None)
    if expected.slots is not None:
        np.testing.assert_array_equal(found.slots, expected.slots)


def test_golden_bytes_of_a_folder(tmp_path):
    folder = tmp_path / "0_sparse_0.model"
    assert write_sparse_folder(folder, [GOLDEN]) == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "key": struct.pack("<2q", 7, -1),
        "slot_id": struct.pack("<2Q", 0, 5),
        "emb_vector": struct.pack("<4f", 1, 2, 3, 4),
    }


@pytest.mark.parametrize(("key_bytes", "key_code"), [(4, "I"), (8, "q")])
@pytest.mark.parametrize("has_slots", [False, True])
def test_golden_bytes_of_a_file(tmp_path, key_bytes, key_code, has_slots):
    path = tmp_path / "0_sparse_0.model"
    rows = SparseRows(np.array([7, 9]), GOLDEN.vectors, GOLDEN.slots if has_slots else None)
    write_sparse_file(path, SparseFileLayout(2, key_bytes, has_slots), [rows])
    code = f"<{key_code}{'Q' * has_slots}2f"
    slots = ([0], [5]) if has_slots else ([], [])
    assert path.read_bytes() == struct.pack(code, 7, *slots[0], 1, 2) + struct.pack(code, 9, *slots[1], 3, 4)


@given(count=st.integers(1, 40), width=st.integers(1, 5), has_slots=st.booleans(), chunk=st.integers(1, 41))
@settings(max_examples=examples(40))
def test_rows_come_back_in_any_chunks(tmp_path_factory, count, width, has_slots, chunk):
    path = tmp_path_factory.mktemp("sparse")
    rows = rows_of(count, width, has_slots=has_slots)
    write_sparse_folder(path / "folder", cut(rows, chunk))
    folder = open_sparse_folder(path / "folder", width)
    assert (folder.count, folder.has_slots) == (count, has_slots)
    assert_same(joined(folder.chunks(chunk)), rows)
    np.testing.assert_array_equal(folder.keys(), rows.keys)
    layout = SparseFileLayout(width, 8, has_slots)
    write_sparse_file(path / "file", layout, cut(rows, chunk))
    assert_same(joined(read_sparse_file(path / "file", layout, chunk)), rows)
    rows = rows_of(count, width, has_slots=has_slots, low=0)
    layout = SparseFileLayout(width, 4, has_slots)
    write_sparse_file(path / "file", layout, cut(rows, chunk))
    assert_same(joined(read_sparse_file(path / "file", layout, chunk)), rows)


def test_an_embedding_without_keys(tmp_path):
    write_sparse_folder(tmp_path / "x", [])
    folder = open_sparse_folder(tmp_path / "x", 3)
    assert folder.count == 0
    assert list(folder.chunks()) == []


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    write_sparse_folder(tmp_path / "x", [GOLDEN])
    write_sparse_folder(tmp_path / "x", [GOLDEN._replace(slots=None)])
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["emb_vector", "key"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failure_leaves_the_former_folder(tmp_path):
    def broken():
        yield GOLDEN
        raise FormatError("no more")

    write_sparse_folder(tmp_path / "x", [GOLDEN])
    with pytest.raises(FormatError, check=at("", "no more")):
        write_sparse_folder(tmp_path / "x", broken())
    assert_same(joined(open_sparse_folder(tmp_path / "x", 2).chunks()), GOLDEN)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_with_files_of_others_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, check=at("out", "holds 'thesis.tex'")):
        write_sparse_folder(tmp_path, [GOLDEN])
    with pytest.raises(ConfigError, check=at("out", "exists")):
        write_sparse_folder(tmp_path / "thesis.tex", [GOLDEN])
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "size", "place"),
    [
        ("key", 15, ("/x/key",)),
        ("key", 24, ("/x/emb_vector", "holds 16 bytes")),
        ("emb_vector", 12, ("/x/emb_vector", "holds 12 bytes")),
        ("slot_id", 8, ("/x/slot_id",)),
    ],
)
def test_a_damaged_folder_is_rejected(tmp_path, name, size, place):
    write_sparse_folder(tmp_path / "x", [GOLDEN])
    (tmp_path / "x" / name).write_bytes(bytes(size))
    with pytest.raises(FormatError, check=at(f"{tmp_path}{place[0]}", *place[1:])):
        open_sparse_folder(tmp_path / "x", 2)


def test_missing_parts_are_named(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent", "no such folder")):
        open_sparse_folder(tmp_path / "absent", 2)
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/key")):
        open_sparse_folder(tmp_path, 2)
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent", "no such file")):
        list(read_sparse_file(tmp_path / "absent", SparseFileLayout(2, 8, False)))


def test_a_folder_that_shrinks_while_it_is_read(tmp_path):
    write_sparse_folder(tmp_path / "x", [GOLDEN])
    folder = open_sparse_folder(tmp_path / "x", 2)
    (tmp_path / "x" / "emb_vector").write_bytes(bytes(8))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x/emb_vector")):
        list(folder.chunks())


def test_a_damaged_file_is_rejected(tmp_path):
    (tmp_path / "x").write_bytes(bytes(25))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x", "holds 25 bytes")):
        list(read_sparse_file(tmp_path / "x", SparseFileLayout(2, 4, False)))


@pytest.mark.parametrize(
    ("layout", "rows", "problem"),
    [
        (SparseFileLayout(2, 4, True), GOLDEN, "key -1"),
        (SparseFileLayout(3, 8, True), GOLDEN, "got vectors [2, 2]"),
        (SparseFileLayout(2, 8, False), GOLDEN, "expected keys without slots"),
        (SparseFileLayout(2, 8, True), GOLDEN._replace(slots=None), "expected a slot for each key"),
    ],
)
def test_rows_that_do_not_fit_are_not_written(tmp_path, layout, rows, problem):
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x", problem)):
        write_sparse_file(tmp_path / "x", layout, [rows])
    assert list(tmp_path.iterdir()) == []


def test_golden_bytes_of_states(tmp_path):
    path = tmp_path / "0_opt_sparse_0.model"
    used = {(0, 0): [[1, 2]], (0, 1): [], (1, 0): [[3, 4]], (1, 1): [[5, 6], [7, 8]]}
    layout = StateLayout(num_states=2, devices=2, rows=2, width=2)
    write_sparse_states(path, layout, lambda state, device: (np.array([row], "f4") for row in used[state, device]))
    assert path.read_bytes() == struct.pack("<16f", 1, 2, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0, 5, 6, 7, 8)
    states = open_sparse_states(path, num_states=2, devices=2, width=2)
    assert states.layout == layout
    np.testing.assert_array_equal(states.read(1, 1, 0, 2), [[5, 6], [7, 8]])
    np.testing.assert_array_equal(states.read(1, 0, 1, 2), [[0, 0]])


def test_states_that_do_not_fit(tmp_path):
    layout = StateLayout(num_states=1, devices=1, rows=1, width=2)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x", "device 0 holds 2 rows")):
        write_sparse_states(tmp_path / "x", layout, lambda state, device: iter([np.zeros((2, 2), np.float32)]))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").write_bytes(bytes(24))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x", "holds 24 bytes")):
        open_sparse_states(tmp_path / "x", num_states=2, devices=1, width=2)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x", "holds 24 bytes")):
        open_sparse_states(tmp_path / "x", num_states=0, devices=1, width=2)


def test_an_optimizer_without_states(tmp_path):
    write_sparse_states(tmp_path / "x", StateLayout(0, 1, 5, 2), lambda state, device: iter(()))
    assert (tmp_path / "x").read_bytes() == b""
    assert open_sparse_states(tmp_path / "x", num_states=0, devices=1, width=2).layout.rows == 0
