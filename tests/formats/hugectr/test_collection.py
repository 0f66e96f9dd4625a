# SPDX-License-Identifier: Apache-2.0
"""Dumps of embedding collections: golden bytes, round trips, damage."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr.collection import DumpedTable, open_collection, write_collection
from terarec.formats.hugectr.weights import SparseRows
from tests.errors import at
from tests.params import examples

TABLES = [DumpedTable(table_id=1, count=2, width=2), DumpedTable(table_id=4, count=1, width=3)]


def rows(table):
    keys = np.arange(table.count) * 3
    return SparseRows(keys, np.arange(table.count * table.width, dtype=np.float32).reshape(table.count, table.width))


def write(path, key_bytes=8):
    write_collection(path, TABLES, lambda table: iter([rows(table)]), key_bytes=key_bytes)


@pytest.mark.parametrize(("key_bytes", "key_type", "code"), [(4, 0, "I"), (8, 1, "q")])
def test_golden_bytes(tmp_path, key_bytes, key_type, code):
    folder = tmp_path / "embedding_collection_0"
    write(folder, key_bytes)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "meta_data": struct.pack("<5i2i2Q2i", 2, key_type, 0, 0, 3, 1, 4, 2, 1, 2, 3),
        "key1": struct.pack("<2i", 1, 1) + bytes(120) + struct.pack(f"<2{code}", 0, 3),
        "key4": struct.pack("<2i", 1, 4) + bytes(120) + struct.pack(f"<1{code}", 0),
        "weight1": struct.pack("<2i", 2, 1) + bytes(120) + struct.pack("<4f", 0, 1, 2, 3),
        "weight4": struct.pack("<2i", 2, 4) + bytes(120) + struct.pack("<3f", 0, 1, 2),
    }


@pytest.mark.parametrize("key", [-1, 2**32])
def test_keys_that_4_bytes_do_not_hold_are_rejected(tmp_path, key):
    folder = tmp_path / "embedding_collection_0"
    content = SparseRows(np.array([0, key]), np.zeros((2, 2), np.float32))
    with pytest.raises(FormatError, check=at(f"{folder}, table 1", f"key {key}")):
        write_collection(folder, TABLES[:1], lambda _: iter([content]), key_bytes=4)
    assert list(tmp_path.iterdir()) == []


@given(
    sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=4), chunk=st.integers(1, 21)
)
@settings(max_examples=examples(30))
def test_tables_come_back_in_any_chunks(tmp_path_factory, sizes, chunk):
    folder = tmp_path_factory.mktemp("dump") / "embedding_collection_0"
    tables = [DumpedTable(2 * index, *size) for index, size in enumerate(sizes)]
    write_collection(folder, tables, lambda table: iter([rows(table)]), key_bytes=8)
    dump = open_collection(folder)
    assert dump.tables == tuple(tables)
    for table in tables:
        chunks = list(dump.chunks(table, chunk))
        assert sum(len(part.keys) for part in chunks) == table.count
        if chunks:
            np.testing.assert_array_equal(np.concatenate([part.keys for part in chunks]), rows(table).keys)
            np.testing.assert_array_equal(np.concatenate([part.vectors for part in chunks]), rows(table).vectors)


def test_half_precision_is_read(tmp_path):
    write(tmp_path / "x")
    meta = bytearray((tmp_path / "x" / "meta_data").read_bytes())
    meta[8] = 1
    (tmp_path / "x" / "meta_data").write_bytes(meta)
    (tmp_path / "x" / "weight4").write_bytes(
        struct.pack("<2i", 2, 4) + bytes(120) + np.array([1, 2, 0.5], "<f2").tobytes()
    )
    dump = open_collection(tmp_path / "x")
    (part,) = dump.chunks(dump.tables[1])
    assert part.vectors.dtype == np.float32
    np.testing.assert_array_equal(part.vectors, [[1, 2, 0.5]])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds 0 bytes and 0 tables"),
        (struct.pack("<5i", 0, 1, 0, 0, 0), "holds 20 bytes and 0 tables"),
        (struct.pack("<5ii", 1, 1, 0, 0, 0, 0), "holds 24 bytes and 1 tables"),
        (struct.pack("<5iiQi", 1, 2, 0, 0, 0, 0, 5, 2), "got key type 2 at byte 4"),
        (struct.pack("<5iiQi", 1, 1, 7, 0, 0, 0, 5, 2), "value type 7 at byte 8"),
        (struct.pack("<5iiQi", 1, 1, 0, 0, 0, -1, 5, 2), "got tables [-1]"),
        (struct.pack("<5iiQi", 1, 1, 0, 0, 0, 0, 5, 0), "of widths [0]"),
        (struct.pack("<5iiQi", 1, 1, 0, 0, 0, 0, 5, 2**30), "got tables [0] of widths [1073741824]"),
        (struct.pack("<5i2i2Q2i", 2, 1, 0, 0, 3, 4, 4, 2, 1, 2, 3), "got tables [4, 4]"),
    ],
)
def test_damaged_meta_data_is_rejected(tmp_path, content, problem):
    (tmp_path / "meta_data").write_bytes(content)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/meta_data", problem)):
        open_collection(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("key1", bytes(100), ("/x/key1", "holds 100 bytes")),
        ("key1", bytes(128 + 16), ("/x/key1", "starts with [0, 0]")),
        ("key1", struct.pack("<2i", 1, 1) + bytes(128), ("/x/key1", "holds 1 rows")),
        ("weight1", struct.pack("<2i", 2, 1) + bytes(120 + 24), ("/x/weight1", "holds 3 rows")),
        ("weight1", struct.pack("<2i", 2, 1) + bytes(120 + 9), ("/x/weight1", "holds 137 bytes")),
    ],
)
def test_a_damaged_table_is_rejected(tmp_path, name, content, place):
    write(tmp_path / "x")
    (tmp_path / "x" / name).write_bytes(content)
    dump = open_collection(tmp_path / "x")
    with pytest.raises(FormatError, check=at(f"{tmp_path}{place[0]}", *place[1:])):
        list(dump.chunks(dump.tables[0]))


def test_missing_parts_are_named(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/meta_data")):
        open_collection(tmp_path)
    write(tmp_path / "x")
    (tmp_path / "x" / "weight1").unlink()
    dump = open_collection(tmp_path / "x")
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/x/weight1")):
        list(dump.chunks(dump.tables[0]))
