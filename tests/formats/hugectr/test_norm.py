# SPDX-License-Identifier: Apache-2.0
"""Norm files: their bytes, round trips, and one error for each way to be wrong."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr.norm import NormFile, NormWriter
from terarec.ragged import Ragged
from tests.errors import at
from tests.formats.hugectr.samples import (
    assert_same_rows,
    bags,
    framed,
    layouts,
    make_layout,
    make_rows,
    norm_bytes,
    norm_payloads,
)
from tests.params import examples

ONE_HOT = ((1, True),) * 3


def write(path, layout, rows, *, checksum):
    with NormWriter(path, layout, checksum=checksum) as writer:
        writer.write(*rows)
        assert writer.close() == len(rows[0])


def saved(tmp_path, content: bytes):
    path = tmp_path / "gen_0.data"
    path.write_bytes(content)
    return path


def test_golden_bytes_with_checksums(tmp_path):
    layout = make_layout(slots=((2, False), (1, True)))
    rows = (np.array([[1.0]]), np.array([[0.5, -2.0]]), [Ragged(np.array([7, 300]), np.array([0, 2])), np.array([9])])
    write(tmp_path / "x.data", layout, rows, checksum=True)
    header = struct.pack("<i8qB", 64, 1, 1, 1, 2, 2, 0, 0, 0, 7)
    payload = struct.pack("<3fi2IiI", 1, 0.5, -2, 2, 7, 300, 1, 9)
    assert (tmp_path / "x.data").read_bytes() == header + struct.pack("<i", 32) + payload + bytes([sum(payload) % 256])
    assert list(tmp_path.iterdir()) == [tmp_path / "x.data"]


def test_golden_bytes_without_checksums(tmp_path):
    layout = make_layout(dense=0, slots=((2, False),), key_bytes=8)
    rows = (np.array([[1.0], [0.0]]), np.zeros((2, 0)), [Ragged(np.array([-1, 2**40]), np.array([0, 2, 2]))])
    write(tmp_path / "x.data", layout, rows, checksum=False)
    expected = struct.pack("<8q", 0, 2, 1, 0, 1, 0, 0, 0) + struct.pack("<fi2qfi", 1, 2, -1, 2**40, 0, 0)
    assert (tmp_path / "x.data").read_bytes() == expected


@settings(max_examples=examples(60))
@given(layouts(), st.integers(0, 6), st.booleans(), st.integers(0, 2**32))
def test_round_trip(tmp_path_factory, layout, num_rows, checksum, seed):
    path = tmp_path_factory.mktemp("norm") / "x.data"
    rows = make_rows(layout, num_rows, seed)
    write(path, layout, rows, checksum=checksum)
    assert path.read_bytes() == norm_bytes(layout, *rows, checksum=checksum)
    file = NormFile(path, layout, checksum=checksum)
    assert file.num_records == num_rows
    block, skipped = file.read()
    assert skipped == 0
    assert_same_rows(block, *rows)


def test_a_record_that_seems_to_begin_in_another_is_read_where_it_begins(tmp_path):
    # Records of 8 and 16 bytes, as long together as two of 12; the last 12 bytes read as a label and the one key 77.
    layout = make_layout(dense=0, slots=((2, False),))
    label, keys = np.array([[5.0], [6.0]]), Ragged(np.array([1, 77]), np.array([0, 0, 2]))
    write(tmp_path / "x.data", layout, (label, np.zeros((2, 0)), [keys]), checksum=False)
    block, skipped = NormFile(tmp_path / "x.data", layout, checksum=False, group_rows=1).read(1)
    assert skipped == 0
    assert_same_rows(block, label[1:], np.zeros((1, 0)), [(keys[0], np.array([0, 2]))])


@settings(max_examples=examples(60))
@given(layouts(), st.integers(0, 20), st.booleans(), st.integers(0, 2**32), st.integers(1, 7), st.randoms())
def test_groups_in_any_order_are_parts_of_the_whole(
    tmp_path_factory, layout, num_rows, checksum, seed, at_once, random
):
    path = tmp_path_factory.mktemp("norm") / "x.data"
    label, dense, keys = make_rows(layout, num_rows, seed)
    write(path, layout, (label, dense, keys), checksum=checksum)
    file = NormFile(path, layout, checksum=checksum, group_rows=at_once)
    assert sum(file.group_rows) == num_rows
    assert max(file.group_rows) <= at_once
    order = 2 * list(range(len(file.group_rows)))
    random.shuffle(order)
    for group in order:
        block, skipped = file.read(group)
        rows = slice(group * at_once, group * at_once + file.group_rows[group])
        assert (block.num_rows, skipped) == (file.group_rows[group], 0)
        np.testing.assert_array_equal(block.label, label[rows])
        np.testing.assert_array_equal(block.dense, dense[rows])
        assert [bags(column) for column in block.keys] == [bags(column)[rows] for column in keys]


@pytest.mark.parametrize("checksum", [False, True])
def test_a_large_file_is_read_in_pieces(tmp_path, checksum):
    """No request of a group is for much more than its share of the file, whatever the sizes of its records."""
    layout = make_layout(slots=((40, False), (1, True)))
    rows = make_rows(layout, 3000)
    write(tmp_path / "x.data", layout, rows, checksum=checksum)
    file = NormFile(tmp_path / "x.data", layout, checksum=checksum, group_rows=100)
    requests = _Requests(file._file)
    file._file = requests
    assert sum(file.read(group)[0].num_rows for group in range(30)) == 3000
    assert max(requests.sizes) < requests.size / 10


class _Requests:
    """A file that notes how many bytes are requested."""

    def __init__(self, file):
        self._file, self.size, self.name = file, file.size, file.name
        self.sizes = []

    def read(self, start, stop):
        self.sizes.append(stop - start)
        return self._file.read(start, stop)


def test_a_fault_behind_the_first_group_is_reported_with_its_place_in_the_file(tmp_path):
    layout = make_layout(slots=((3, False),), key_bytes=8)
    content = bytearray(norm_bytes(layout, *make_rows(layout, 9), checksum=True))
    byte = 69
    for _ in range(7):
        byte += struct.unpack_from("<i", content, byte)[0] + 5
    struct.pack_into("<i", content, byte, -4)
    file = NormFile(saved(tmp_path, bytes(content)), layout, checksum=True, group_rows=2)
    assert file.read(2)[0].num_rows == 2
    with pytest.raises(FormatError, check=at(f"{tmp_path}/gen_0.data: record 7 at byte 304")):
        file.read(3)


@pytest.mark.parametrize("checksum", [False, True])
def test_one_key_a_slot_comes_as_plain_columns(tmp_path, checksum):
    layout = make_layout(slots=ONE_HOT)
    rows = make_rows(layout, 1200)
    write(tmp_path / "x.data", layout, rows, checksum=checksum)
    block, _ = NormFile(tmp_path / "x.data", layout, checksum=checksum).read()
    assert all(isinstance(column, np.ndarray) and column.dtype == np.int64 for column in block.keys)
    assert_same_rows(block, *rows)


@pytest.mark.parametrize("slots", [ONE_HOT, ((1, True), (3, False))])
def test_a_record_with_a_wrong_checksum_is_skipped_and_counted(tmp_path, slots):
    layout = make_layout(slots=slots)
    label, dense, keys = make_rows(layout, 50)
    content = norm_bytes(layout, label, dense, keys, checksum=True)
    byte = 69
    damaged = bytearray(content)
    for record in range(50):
        (length,) = struct.unpack_from("<i", content, byte)
        if record in (0, 7, 49):
            damaged[byte + 4 + 5] ^= 16
        byte += length + 5
    block, skipped = NormFile(saved(tmp_path, bytes(damaged)), layout, checksum=True).read()
    kept = [record for record in range(50) if record not in (0, 7, 49)]
    assert skipped == 3
    np.testing.assert_array_equal(block.label[:, 0], kept)
    np.testing.assert_array_equal(block.dense, dense[kept])
    assert all(len(column[1]) == 48 if isinstance(column, tuple) else len(column) == 47 for column in block.keys)


def test_a_file_of_nothing_but_wrong_checksums(tmp_path):
    layout = make_layout()
    content = bytearray(norm_bytes(layout, *make_rows(layout, 1), checksum=True))
    content[-1] ^= 1
    block, skipped = NormFile(saved(tmp_path, bytes(content)), layout, checksum=True).read()
    assert (block.num_rows, skipped) == (0, 1)


@pytest.mark.parametrize(
    ("word", "value", "fault"),
    [
        (0, 0, (4, "error_check is 0")),
        (1, -1, (12, "number_of_records is -1")),
        (2, 2, (20, "label_dim is 2")),
        (3, 1, (28, "dense_dim is 1")),
        (4, 27, (36, "slot_num is 27")),
    ],
)
def test_a_wrong_header(tmp_path, word, value, fault):
    byte, problem = fault
    layout = make_layout()
    fields = [1, 0, 1, 2, 2, 0, 0, 0]
    fields[word] = value
    path = saved(tmp_path, framed(struct.pack("<8q", *fields)))
    with pytest.raises(FormatError, check=at(f"{path}: byte {byte}", problem)):
        NormFile(path, layout, checksum=True)


def test_the_other_kind_of_file(tmp_path):
    layout = make_layout()
    rows = make_rows(layout, 1)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/gen_0.data: byte 0", "the header's length is 0")):
        NormFile(saved(tmp_path, norm_bytes(layout, *rows, checksum=False)), layout, checksum=True)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/gen_0.data: byte 0", "error_check is 4294967360")):
        NormFile(saved(tmp_path, norm_bytes(layout, *rows, checksum=True)), layout, checksum=False)


@pytest.mark.parametrize("size", [0, 3, 68])
def test_a_header_cut_short(tmp_path, size):
    path = saved(tmp_path, norm_bytes(make_layout(), *make_rows(make_layout(), 1), checksum=True)[:size])
    with pytest.raises(FormatError, check=at(path, f"ends at byte {size}, expected a header of 69 bytes")):
        NormFile(path, make_layout(), checksum=True)


@pytest.mark.parametrize("byte", range(4, 69))
def test_a_flipped_bit_in_a_checked_header(tmp_path, byte):
    content = bytearray(norm_bytes(make_layout(), *make_rows(make_layout(), 1), checksum=True))
    content[byte] ^= 2
    with pytest.raises(FormatError, check=at(f"{tmp_path}/gen_0.data: byte 68")):
        NormFile(saved(tmp_path, bytes(content)), make_layout(), checksum=True)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("slots", [ONE_HOT, ((1, True), (3, False))])
def test_a_file_cut_anywhere_after_its_header(tmp_path, slots, checksum):
    layout = make_layout(slots=slots)
    content = norm_bytes(layout, *make_rows(layout, 3, seed=1), checksum=checksum)
    for size in range(69 if checksum else 64, len(content)):
        path = saved(tmp_path, content[:size])
        with pytest.raises(
            FormatError, check=lambda error, path=path: error.where.partition(": record")[0] == str(path)
        ):
            NormFile(path, layout, checksum=checksum).read()


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("slots", [ONE_HOT, ((1, True), (3, False))])
def test_a_file_that_resumes(tmp_path, slots, checksum):
    layout = make_layout(slots=slots)
    content = norm_bytes(layout, *make_rows(layout, 3, seed=1), checksum=checksum)
    path = saved(tmp_path, content + b"\0\0\0\0")
    with pytest.raises(
        FormatError, check=at(path, f"holds {len(content) + 4} bytes, its 3 records end at byte {len(content)}")
    ):
        NormFile(path, layout, checksum=checksum).read()


def test_a_frame_that_leaves_the_file(tmp_path):
    layout = make_layout(slots=ONE_HOT)
    content = bytearray(norm_bytes(layout, *make_rows(layout, 3), checksum=True))
    struct.pack_into("<i", content, 69, -5)
    path = saved(tmp_path, bytes(content))
    with pytest.raises(FormatError, check=at(f"{path}: record 0 at byte 69")):
        NormFile(path, layout, checksum=True).read()


def test_a_count_of_keys_that_does_not_fit_its_record(tmp_path):
    layout = make_layout(slots=((3, False),))
    header = struct.pack("<8q", 1, 2, 1, 2, 1, 0, 0, 0)
    good = framed(struct.pack("<3fiI", 0, 0, 0, 1, 5))
    for count, message in [
        (2, "holds 20 bytes, its fields take more"),
        (0, "holds 20 bytes, its fields take fewer"),
    ]:
        wrong = framed(struct.pack("<3fiI", 0, 0, 0, count, 5))
        path = saved(tmp_path, framed(header) + good + wrong)
        with pytest.raises(FormatError, check=at(f"{path} (with 4-byte keys)", f"record at byte 98: {message}")):
            NormFile(path, layout, checksum=True).read()


def test_a_negative_count_of_keys(tmp_path):
    layout = make_layout(slots=((3, False),))
    content = struct.pack("<8q", 0, 1, 1, 2, 1, 0, 0, 0) + struct.pack("<3fi", 0, 0, 0, -1)
    with pytest.raises(FormatError, check=at(f"{tmp_path}/gen_0.data, slot 'in0.0' at byte 76")):
        NormFile(saved(tmp_path, content), layout, checksum=False).read()


def test_fewer_keys_than_the_declared_fixed_length(tmp_path):
    layout = make_layout(dense=0, slots=((30, True),))
    rows = (np.zeros((2, 1)), np.zeros((2, 0)), [Ragged(np.array([7, 8, 9, 9]), np.array([0, 2, 4]))])
    block, _ = NormFile(saved(tmp_path, norm_bytes(layout, *rows, checksum=False)), layout, checksum=False).read()
    assert_same_rows(block, *rows)


@pytest.mark.parametrize("others", [0, 1])
def test_more_keys_than_the_layout_says(tmp_path, others):
    layout = make_layout(dense=0, slots=((2, True),))
    count = 3
    usual = struct.pack("<fi2I", 0, 2, 1, 1) * others
    content = (
        struct.pack("<8q", 0, 1 + others, 1, 0, 1, 0, 0, 0)
        + usual
        + struct.pack(f"<fi{count}I", 0, count, *[1] * count)
    )
    path = saved(tmp_path, content)
    where = f"{path}, slot 'in0.0'{' at byte 84' if others else ''}"
    with pytest.raises(FormatError, check=at(where, f"record {others} holds 3 keys")):
        NormFile(path, layout, checksum=False).read()


def test_a_record_of_no_whole_number_of_words(tmp_path):
    layout = make_layout(slots=((3, False),))
    header = struct.pack("<8q", 1, 1, 1, 2, 1, 0, 0, 0)
    path = saved(tmp_path, framed(header) + framed(struct.pack("<3fiB", 0, 0, 0, 0, 5)))
    with pytest.raises(
        FormatError,
        check=at(f"{path} (with 4-byte keys)", "record at byte 73: holds 17 bytes, its fields take a multiple of 4"),
    ):
        NormFile(path, layout, checksum=True).read()


def test_an_empty_record(tmp_path):
    header = struct.pack("<8q", 1, 2, 1, 2, 2, 0, 0, 0)
    label, dense, keys = make_rows(make_layout(), 1)
    (payload,) = norm_payloads(make_layout(), label, dense, keys)
    path = saved(tmp_path, framed(header) + framed(payload) + framed(b""))
    with pytest.raises(
        FormatError, check=at(f"{path} (with 4-byte keys)", "record at byte 106: holds 0 bytes, its fields take more")
    ):
        NormFile(path, make_layout(), checksum=True).read()


def test_no_such_file(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/nowhere.data")):
        NormFile(tmp_path / "nowhere.data", make_layout(), checksum=True)


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ((np.zeros((1, 2)), np.zeros((1, 2)), [np.zeros(1, int)]), ("", "got label [1, 2]")),
        ((np.zeros((1, 1)), np.zeros((1, 1)), [np.zeros(1, int)]), ("", "got dense [1, 1]")),
        ((np.zeros((1, 1)), np.zeros((1, 2)), []), ("", "got keys of 0 slots")),
        (
            (np.zeros((1, 1)), np.zeros((1, 2)), [np.zeros(2, int)]),
            (", slot 'in0.0'", "got 2 bags of 2 keys for 1 rows"),
        ),
        ((np.zeros((1, 1)), np.zeros((1, 2)), [(np.zeros(2), np.zeros(2))]), (", slot 'in0.0'", "got tuple")),
        ((np.zeros((1, 1)), np.zeros((1, 2)), [np.array([-1])]), (", slot 'in0.0'", "key -1 at position 0")),
        (
            (np.zeros((1, 1)), np.zeros((1, 2)), [Ragged(np.zeros(3, int), np.array([0, 3]))]),
            (", slot 'in0.0'", "holds 3 keys"),
        ),
    ],
)
def test_rows_that_a_file_cannot_hold(tmp_path, rows, place):
    layout = make_layout(slots=((2, False),))
    with (
        NormWriter(tmp_path / "x.data", layout, checksum=True) as writer,
        pytest.raises(FormatError, check=at(f"{tmp_path}/x.data{place[0]}", place[1])),
    ):
        writer.write(*rows)
    assert list(tmp_path.iterdir()) == []
