# SPDX-License-Identifier: Apache-2.0
"""Parquet files as HugeCTR reads them: columns by index, and one error for each way to be wrong."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from terarec.data.decode import to_batch
from terarec.data.records import RecordReader
from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.block import merge, slice_rows
from terarec.formats.dataset import ParquetMetadata, read_parquet_metadata, write_parquet_metadata
from terarec.formats.hugectr.parquet import ParquetRecordFile
from terarec.formats.hugectr.split_writer import add_key_offsets
from terarec.ragged import Ragged
from tests.errors import at
from tests.formats.hugectr.samples import assert_same_rows, make_layout

LAYOUT = make_layout(dense=2, slots=((1, True), (3, False)), key_bytes=8, sizes=(100, 100))
COLUMNS = {
    "y": pa.array([1.0, 0.0], pa.float32()),
    "a": pa.array([0.5, 1.5], pa.float32()),
    "b": pa.array([2.5, 3.5], pa.float32()),
    "u": pa.array([7, 8], pa.int64()),
    "v": pa.array([[1, 2], []], pa.list_(pa.int64())),
}
EXPECTED = (
    [[1.0], [0.0]],
    [[0.5, 2.5], [1.5, 3.5]],
    [np.array([7, 8]), Ragged(np.array([101, 102]), np.array([0, 2, 2]))],
)


def metadata(rows=2, labels=(0,), dense=(1, 2), keys=(3, 4)):
    return ParquetMetadata(path="m.json", num_rows={"x.parquet": rows}, labels=labels, dense=dense, keys=keys)


def saved(tmp_path, columns, **options):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", **options)
    return str(tmp_path / "x.parquet")


def read(tmp_path, columns=COLUMNS, layout=LAYOUT, **positions):
    return moved(ParquetRecordFile(saved(tmp_path, columns), layout, metadata(**positions)).read(0), layout)


def moved(block, layout=LAYOUT):
    """The rows with the keys that batches hold."""
    return dataclasses.replace(block, keys=add_key_offsets(block.keys, layout.key_offsets))


def test_rows_get_the_offsets_of_their_slots(tmp_path):
    assert_same_rows(read(tmp_path), *EXPECTED)


def test_columns_go_by_position(tmp_path):
    columns = {name: COLUMNS[name] for name in ("v", "b", "y", "u", "a")}
    block = read(
        tmp_path,
        columns,
        labels=(2,),
        dense=(1, 4),
        keys=(0, 3),
        layout=make_layout(dense=2, slots=((3, False), (1, True)), key_bytes=8, sizes=(100, 100)),
    )
    assert block.dense.tolist() == [[2.5, 0.5], [3.5, 1.5]]
    assert block.keys[0][0].tolist() == [1, 2]
    assert block.keys[1].tolist() == [107, 108]


def test_row_groups_come_one_by_one_and_empty_ones_do_not_count(tmp_path):
    writer = pq.ParquetWriter(tmp_path / "x.parquet", pa.table(COLUMNS).schema)
    for part in (slice(0, 1), slice(0, 0), slice(1, 2)):
        writer.write_table(pa.table({name: array[part] for name, array in COLUMNS.items()}))
    writer.close()
    file = ParquetRecordFile(str(tmp_path / "x.parquet"), LAYOUT, metadata())
    assert (file.num_records, file.group_rows) == (2, (1, 1))
    assert [file.read(group).dense.tolist() for group in range(2)] == [[[0.5, 2.5]], [[1.5, 3.5]]]


def test_large_row_groups_come_in_pieces_in_any_order(tmp_path):
    rows = np.random.default_rng(0)
    lengths = rows.integers(0, 4, 1000)
    columns = {
        "y": pa.array(np.arange(1000), pa.float32()),
        "a": pa.array(rows.random(1000), pa.float32()),
        "b": pa.array(rows.random(1000), pa.float32()),
        "u": pa.array(rows.integers(0, 100, 1000), pa.int64()),
        "v": pa.ListArray.from_arrays(np.concatenate([[0], lengths.cumsum()]), rows.integers(0, 100, lengths.sum())),
    }
    path = saved(tmp_path, columns, row_group_size=450)
    whole = ParquetRecordFile(path, LAYOUT, metadata(1000))
    assert whole.group_rows == (450, 450, 100)
    cut = ParquetRecordFile(path, LAYOUT, metadata(1000), piece_rows=200)
    assert cut.group_rows == (200, 200, 50, 200, 200, 50, 100)
    expected = merge([whole.read(group) for group in range(3)])
    order = [*range(7), *rows.permutation(7), 5, 5, 3]
    for group in order:
        start = sum(cut.group_rows[:group])
        piece = slice_rows(expected, start, start + cut.group_rows[group])
        assert_same_rows(cut.read(group), piece.label, piece.dense, piece.keys)
    reader = RecordReader(_Cut(cut), batch_size=1000, repeat=False, drop_last=False, threads=4)
    np.testing.assert_array_equal(next(iter(reader)).label, expected.label)
    reader.close()


class _Cut:
    """The file as a source."""

    layout, names, key_offsets = LAYOUT, LAYOUT.slot_names, LAYOUT.key_offsets
    leaves_out, ends_batches, read_part = False, False, None

    def __init__(self, file):
        self.group_rows, self.runs = file.group_rows, file.runs
        self.read = lambda group: (file.read(group), 0)


def test_a_damaged_piece_is_reported_every_time(tmp_path):
    path = saved(
        tmp_path, {name: pa.concat_arrays([array] * 500) for name, array in COLUMNS.items()}, compression="none"
    )
    file = ParquetRecordFile(path, LAYOUT, metadata(1000), piece_rows=300)
    (tmp_path / "x.parquet").write_bytes(b"\xff" * (tmp_path / "x.parquet").stat().st_size)
    for group in (0, 2, 0):
        with pytest.raises(FormatError, check=at(f"{path}: row group 0")):
            file.read(group)


def test_offsets_are_added_to_padding_keys_and_slots_of_size_0_share_them(tmp_path):
    layout = make_layout(dense=0, slots=((1, True),) * 3, key_bytes=8, sizes=(50, 0, 9))
    columns = {"y": COLUMNS["y"], **{name: pa.array([-1, 3], pa.int64()) for name in "uvw"}}
    block = read(tmp_path, columns, layout, dense=(), keys=(1, 2, 3))
    assert [column.tolist() for column in block.keys] == [[-1, 3], [49, 53], [49, 53]]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 2), pa.large_list(pa.float32())])
def test_lists_of_floats_fill_several_dense_numbers(tmp_path, kind):
    columns = {**COLUMNS, "a": pa.array([[1.0, 2.0], [3.0, 4.0]], kind)}
    layout = make_layout(dense=3, slots=((1, True), (3, False)), key_bytes=8)
    assert read(tmp_path, columns, layout).dense.tolist() == [[1.0, 2.0, 2.5], [3.0, 4.0, 3.5]]


def test_other_types_of_lists(tmp_path):
    columns = {**COLUMNS, "v": COLUMNS["v"].cast(pa.large_list(pa.int64()))}
    assert_same_rows(read(tmp_path, columns), *EXPECTED)
    columns["v"] = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    assert read(tmp_path, columns).keys[1][0].tolist() == [101, 102, 103, 104]


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.float64(), pa.bool_()])
def test_labels_of_other_types(tmp_path, kind):
    block = read(tmp_path, {**COLUMNS, "y": pa.array([1, 0]).cast(kind)})
    assert block.label.tolist() == [[1.0], [0.0]]


def test_4_byte_keys(tmp_path):
    layout = make_layout(dense=2, slots=((1, True), (3, False)), sizes=(100, 100))
    columns = {**COLUMNS, "u": COLUMNS["u"].cast(pa.int32()), "v": COLUMNS["v"].cast(pa.list_(pa.uint32()))}
    assert_same_rows(read(tmp_path, columns, layout), *EXPECTED)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"u": pa.array([7, 8], pa.int32())}, (", column 'u'", "type is int32")),
        ({"u": pa.array([7.0, 8.0])}, (", column 'u'", "type is double")),
        ({"v": pa.array([[1], []], pa.list_(pa.int32()))}, (", column 'v'", "type is list<")),
        ({"y": pa.array(["1", "0"])}, (", column 'y'", "type is string")),
        ({"a": pa.array(["1", "0"])}, (", column 'a'", "type is string")),
        ({"u": pa.array([7, None], pa.int64())}, (": row group 0, column 'u'", "1 null")),
        ({"v": pa.array([[7, None], []], pa.list_(pa.int64()))}, (": row group 0, column 'v'", "1 null")),
        ({"a": pa.array([1.0, None])}, (": row group 0, column 'a'", "1 null")),
        ({"v": pa.array([[1], [1, 2, 3, 4]])}, (": row group 0, column 'v'", "record 1 holds 4 keys")),
        ({"a": pa.array([[1.0], [2.0, 3.0]])}, (": row group 0, column 'a'", "row 1 holds 2 numbers")),
        ({"a": pa.array([[1.0, 2.0], [3.0, 4.0]])}, (": row group 0", "holds 3 dense numbers")),
    ],
)
def test_wrong_columns(tmp_path, changes, place):
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.parquet{place[0]}", place[1])):
        read(tmp_path, {**COLUMNS, **changes})


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({"rows": 3}, r"holds 2 rows, expected 3 \(m.json\)"),
        ({"keys": (3, 5)}, r"holds 5 columns, expected one at index 5"),
        ({"keys": (3,)}, r"m.json names 1 key columns \(cats\), expected 2"),
        ({"labels": (0, 1), "dense": (2,)}, r"m.json names 2 labels, expected 1"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path, positions, message):
    with pytest.raises(FormatError, check=at(f"{tmp_path}/x.parquet")):
        read(tmp_path, **positions)


def test_damaged_files(tmp_path):
    path = saved(tmp_path, COLUMNS, write_page_checksum=True, use_dictionary=False)
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    messages = []
    for byte in range(4, 400, 7):
        damaged = bytearray(content)
        damaged[byte] ^= 255
        (tmp_path / "x.parquet").write_bytes(damaged)
        file = ParquetRecordFile(path, LAYOUT, metadata())
        try:
            assert_same_rows(moved(file.read(0)), *EXPECTED)  # some bytes of a page's header say nothing
        except FormatError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert all("row group 0: cannot be read as Parquet" in message for message in messages)
    (tmp_path / "x.parquet").write_bytes(content[:-5])
    with pytest.raises(FormatError, check=at(path)):
        ParquetRecordFile(path, LAYOUT, metadata())
    (tmp_path / "x.parquet").unlink()
    with pytest.raises(DataNotFoundError, check=at(path)):
        ParquetRecordFile(path, LAYOUT, metadata())


def test_checksums_are_verified_when_a_row_group_is_read_first(tmp_path):
    path = saved(tmp_path, COLUMNS, write_page_checksum=True, use_dictionary=False, compression="none")
    content = (tmp_path / "x.parquet").read_bytes()
    place = content.index(np.array([0.5, 1.5], np.float32).tobytes())  # the page, not its statistics
    damaged = bytearray(content)
    damaged[place] ^= 1
    (tmp_path / "x.parquet").write_bytes(damaged)
    file = ParquetRecordFile(path, LAYOUT, metadata())
    for _ in range(2):  # a failure does not count as verified
        with pytest.raises(FormatError, check=at(f"{path}: row group 0")):
            file.read(0)
    (tmp_path / "x.parquet").write_bytes(content)
    for _ in range(2):
        assert_same_rows(moved(file.read(0)), *EXPECTED)


@pytest.mark.parametrize("keys", [[5, 7], [-1, 2**31 - 1], [-(2**31), -5], [0, 2**31 - 101], [0, 2**31 - 100]])
@pytest.mark.parametrize("offset", [0, 100, 2**31 - 1, 2**31 + 5])
def test_offsets_do_not_wrap(tmp_path, keys, offset):
    columns = {**COLUMNS, "u": pa.array(keys, pa.int32()), "v": pa.array(keys, pa.int32())}
    layout = dataclasses.replace(LAYOUT, key_bytes=4, slot_sizes=(offset, 1))
    block = ParquetRecordFile(saved(tmp_path, columns), layout, metadata()).read(0)
    assert [column.tolist() for column in block.keys] == [keys, keys]
    batch = to_batch(("u", "v"), [block], key_offsets=layout.key_offsets)
    assert batch.sparse.keys.tolist() == [*keys, *(key + offset for key in keys)]


def test_metadata_round_trips(tmp_path):
    write_parquet_metadata(tmp_path / "_metadata.json", [("a.parquet", 3)], ["y"], ["I1"], ["C1", "C2"])
    assert json.loads((tmp_path / "_metadata.json").read_text()) == {
        "file_stats": [{"file_name": "a.parquet", "num_rows": 3}],
        "cats": [{"col_name": "C1", "index": 2}, {"col_name": "C2", "index": 3}],
        "conts": [{"col_name": "I1", "index": 1}],
        "labels": [{"col_name": "y", "index": 0}],
    }
    found = read_parquet_metadata(tmp_path / "_metadata.json")
    assert (found.num_rows, found.labels, found.dense, found.keys) == ({"a.parquet": 3}, (0,), (1,), (2, 3))


def test_metadata_of_other_programs(tmp_path):
    content = {
        "file_stats": [{"file_name": "/data/train/a.parquet", "num_rows": 3}],
        "cats": [{"index": 7}, {"col_name": "C1", "index": 4, "more": 1}],
        "conts": [],
        "labels": [{"index": 0}],
        "data_info": {},
    }
    (tmp_path / "_metadata.json").write_text(json.dumps(content))
    found = read_parquet_metadata(tmp_path / "_metadata.json")
    assert (found.num_rows, found.keys) == ({"a.parquet": 3}, (4, 7))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"cats": None}, (".cats", "got None")),
        ({"file_stats": [{"num_rows": 3}]}, (".file_stats[0].file_name", "missing")),
        (
            {"file_stats": [{"file_name": "a", "num_rows": -1}]},
            (".file_stats[0].num_rows", "got -1"),
        ),
        ({"file_stats": [{"file_name": "a", "num_rows": True}]}, (".file_stats[0].num_rows", "got True")),
        ({"labels": [{"index": "0"}]}, (".labels[0].index", "got '0'")),
        ({"labels": [3]}, (".labels[0]", "got 3")),
        ({"conts": [{"index": 1}, {"index": 1}]}, (".conts", "an index occurs twice")),
        ({"conts": [{"index": 0}]}, ("", "column 0 is of two kinds")),
    ],
)
def test_wrong_metadata(tmp_path, changes, place):
    content = {"file_stats": [], "cats": [], "conts": [], "labels": [{"index": 0}], **changes}
    (tmp_path / "_metadata.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, check=at(f"{tmp_path}/_metadata.json: ${place[0]}", place[1])):
        read_parquet_metadata(tmp_path / "_metadata.json")


def test_metadata_that_is_no_json(tmp_path):
    (tmp_path / "_metadata.json").write_text('{"cats": [')
    with pytest.raises(FormatError, check=at(f"{tmp_path}/_metadata.json")):
        read_parquet_metadata(tmp_path / "_metadata.json")
