# SPDX-License-Identifier: Apache-2.0
"""Raw and RawAsync files: their bytes, round trips, and one error for each way to be wrong."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import ConfigError, FormatError
from terarec.formats.hugectr.raw import FixedRecordFile, FixedRecordWriter, raw_async_types, raw_types
from terarec.ragged import Ragged
from tests.errors import at
from tests.formats.hugectr.samples import assert_same_rows, layouts, make_layout, make_rows
from tests.params import examples

ONE_HOT = ((1, True),) * 2


def write(path, layout, types, rows):
    with FixedRecordWriter(path, layout, types) as writer:
        writer.write(*rows)
        assert writer.close() == len(rows[0])


@pytest.mark.parametrize(("floats", "code"), [(True, "3f2i"), (False, "5i")])
def test_golden_bytes_of_raw(tmp_path, floats, code):
    layout = make_layout(slots=ONE_HOT)
    rows = (np.array([[1.0], [0.0]]), np.array([[3.0, 0.0], [7.0, 1.0]]), [np.array([5, 6]), np.array([7, 8])])
    write(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=floats), rows)
    expected = struct.pack(f"<{code}", 1, 3, 0, 5, 7) + struct.pack(f"<{code}", 0, 7, 1, 6, 8)
    assert (tmp_path / "x.bin").read_bytes() == expected


@pytest.mark.parametrize(("key_bytes", "code"), [(4, "3I"), (8, "3q")])
@pytest.mark.parametrize(("floats", "dense_code"), [(True, "2f"), (False, "2I")])
def test_golden_bytes_of_raw_async(tmp_path, key_bytes, code, floats, dense_code):
    layout = make_layout(slots=((1, True), (2, True)), key_bytes=key_bytes)
    types = raw_async_types(layout, is_dense_float=floats, multi_hot=True)
    keys = [np.array([5]), Ragged(np.array([6, 7]), np.array([0, 2]))]
    write(tmp_path / "x.bin", layout, types, (np.array([[1.0]]), np.array([[3.0, 4.0]]), keys))
    assert (tmp_path / "x.bin").read_bytes() == struct.pack(f"<i{dense_code}{code}", 1, 3, 4, 5, 6, 7)


def test_a_record_of_multi_hot_criteo_takes_912_bytes(tmp_path):
    layout = make_layout(dense=13, slots=((100, True), (14, True), (100, True)))
    types = raw_async_types(layout, is_dense_float=False, multi_hot=True)
    write(tmp_path / "x.bin", layout, types, make_rows(layout, 2))
    assert (tmp_path / "x.bin").stat().st_size == 2 * 912


@settings(max_examples=examples(40))
@given(layouts(fixed=True), st.integers(1, 6), st.integers(0, 2**32))
def test_round_trip_of_raw_async(tmp_path_factory, layout, num_rows, seed):
    path = tmp_path_factory.mktemp("async") / "x.bin"
    types = raw_async_types(layout, is_dense_float=True, multi_hot=True)
    label, dense, keys = make_rows(layout, num_rows, seed)
    write(path, layout, types, (label, dense + 0.5, keys))
    assert_same_rows(FixedRecordFile(path, layout, types).read(0, num_rows), label, dense + 0.5, keys)


@settings(max_examples=examples(40))
@given(layouts(one_hot=True), st.booleans(), st.integers(1, 6), st.integers(0, 2**32))
def test_round_trip_of_raw(tmp_path_factory, layout, floats, num_rows, seed):
    path = tmp_path_factory.mktemp("raw") / "x.bin"
    types = raw_types(layout, float_label_dense=floats)
    label, dense, keys = make_rows(layout, num_rows, seed)
    write(path, layout, types, (label, dense, keys))
    expected = dense if floats else np.log(dense + np.float32(1))
    assert_same_rows(FixedRecordFile(path, layout, types, num_rows).read(0, num_rows), label, expected, keys)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_labels_beyond_32_bits_are_rejected(tmp_path, dtype):
    """As float32 the first one is the largest that fits, rounded."""
    layout = make_layout(dense=0, slots=())
    types = raw_types(layout, float_label_dense=False)
    with pytest.raises(FormatError):
        write(tmp_path / "x.bin", layout, types, (np.array([[2**31]], dtype=dtype), np.empty((1, 0)), []))
    write(tmp_path / "x.bin", layout, types, (np.array([[2**31 - 128]], dtype=dtype), np.empty((1, 0)), []))
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<i", 2**31 - 128)


def test_any_piece_of_a_file(tmp_path):
    layout = make_layout(slots=ONE_HOT)
    types = raw_types(layout, float_label_dense=True)
    rows = make_rows(layout, 3000)
    write(tmp_path / "x.bin", layout, types, rows)
    block = FixedRecordFile(tmp_path / "x.bin", layout, types).read(700, 2100)
    np.testing.assert_array_equal(block.label[:, 0], np.arange(700, 2100))
    np.testing.assert_array_equal(block.keys[1], rows[2][1][0][700:2100])


def test_integers_become_logarithms(tmp_path):
    layout = make_layout(slots=())
    (tmp_path / "x.bin").write_bytes(struct.pack("<3i", 3, 0, 99))
    block = FixedRecordFile(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=False)).read(0, 1)
    assert block.label.tolist() == [[3.0]]
    np.testing.assert_allclose(block.dense, [[0.0, math.log(100)]], rtol=1e-6)


def test_the_sizes_of_the_slots_before_are_added_in_raw_only(tmp_path):
    layout = make_layout(dense=0, slots=((1, True),) * 4, sizes=(10, 0, 5, 7))
    (tmp_path / "x.bin").write_bytes(struct.pack("<f4i", 0, 1, -1, 3, 6))
    raw = FixedRecordFile(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=True)).read(0, 1)
    assert [column.tolist() for column in raw.keys] == [[1], [9], [13], [21]]
    types = raw_async_types(layout, is_dense_float=True, multi_hot=False)
    one_hot = FixedRecordFile(tmp_path / "x.bin", layout, types).read(0, 1)
    assert [column.tolist() for column in one_hot.keys] == [[1], [-1], [3], [6]]


@pytest.mark.parametrize("size", [1, 19, 21])
def test_a_size_that_is_no_whole_number_of_records(tmp_path, size):
    layout = make_layout(slots=ONE_HOT)
    (tmp_path / "x.bin").write_bytes(bytes(size))
    with pytest.raises(
        FormatError, check=at(f"{tmp_path}/x.bin", f"holds {size} bytes, expected a multiple of 20 bytes each")
    ):
        FixedRecordFile(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=True))


def test_fewer_records_than_requested(tmp_path):
    layout = make_layout(slots=ONE_HOT)
    (tmp_path / "x.bin").write_bytes(bytes(40))
    types = raw_types(layout, float_label_dense=True)
    assert FixedRecordFile(tmp_path / "x.bin", layout, types, 1).num_records == 1
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.bin", "holds 40 bytes")):
        FixedRecordFile(tmp_path / "x.bin", layout, types, 3)


def test_a_file_cut_after_it_was_opened(tmp_path):
    layout = make_layout(slots=ONE_HOT)
    (tmp_path / "x.bin").write_bytes(bytes(40))
    file = FixedRecordFile(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=True))
    (tmp_path / "x.bin").write_bytes(bytes(30))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.bin", "ends at byte 30")):
        file.read(0, 2)


def test_raw_has_one_key_per_slot_for_any_layout(tmp_path):
    layout = make_layout(dense=0, slots=((2, False),) * 2)
    (tmp_path / "x.bin").write_bytes(struct.pack("<f2i", 0, 5, 6))
    block = FixedRecordFile(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=True)).read(0, 1)
    assert [column.tolist() for column in block.keys] == [[5], [6]]


def test_a_negative_integer_has_no_logarithm(tmp_path):
    layout = make_layout(slots=())
    (tmp_path / "x.bin").write_bytes(struct.pack("<6i", 0, 1, 2, 0, 3, -2))
    file = FixedRecordFile(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=False))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.bin", "record 1, dense column 1 is -2")):
        file.read(0, 2)
    assert file.read(0, 1).num_rows == 1


def test_layouts_that_records_of_one_size_cannot_have():
    with pytest.raises(ConfigError, check=at("Raw")):
        raw_types(make_layout(slots=ONE_HOT, key_bytes=8), float_label_dense=True)
    with pytest.raises(ConfigError, check=at("RawAsync without multi_hot")):
        raw_async_types(make_layout(key_bytes=8), is_dense_float=True, multi_hot=False)
    with pytest.raises(ConfigError, check=at("RawAsync")):
        raw_async_types(make_layout(), is_dense_float=True, multi_hot=True)


@pytest.mark.parametrize(
    ("label", "dense", "key", "slot", "problem"),
    [
        (0.5, 1, 1, "", "label 0.5"),
        (1, -1, 1, "", "dense -1"),
        (1, math.nan, 1, "", "dense nan"),
        (1, 1, 2**31, ", slot 'in0.0'", "key 2147483648"),
    ],
)
def test_numbers_that_a_file_of_integers_cannot_hold(tmp_path, label, dense, key, slot, problem):
    layout = make_layout(dense=1, slots=((1, True),))
    with (
        FixedRecordWriter(tmp_path / "x.bin", layout, raw_types(layout, float_label_dense=False)) as writer,
        pytest.raises(FormatError, check=at(f"{tmp_path}/x.bin{slot}", problem)),
    ):
        writer.write(np.array([[label]], float), np.array([[dense]], float), [np.array([key])])
    assert list(tmp_path.iterdir()) == []
