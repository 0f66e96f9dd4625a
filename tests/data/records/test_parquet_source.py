# SPDX-License-Identifier: Apache-2.0
"""ParquetSource: files of a list, those that the metadata knows; terarec's own data sets, too."""

import dataclasses

import fsspec
import numpy as np
import pytest

from terarec.data.records import ParquetSource, RecordReader
from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr import write_file_list
from terarec.spec import RecordLayout, SparseInput
from tests.data.sources import row_numbers
from tests.errors import at
from tests.formats.samples import make_block, make_spec, write_split

LAYOUT = RecordLayout(
    label_dim=1,
    dense_dim=2,
    inputs=(SparseInput(name="data", nnz_per_slot=(1, 3), is_fixed_length=False),),
    slot_sizes=(50, 51),
)


@pytest.fixture
def split(tmp_path):
    """A terarec data set of three shards of a few row groups: the split's directory, and its rows."""
    spec = make_spec()
    block = make_block(spec, 100)
    write_split(tmp_path, spec, block, cuts=(30, 70), rows_per_group=16)
    return tmp_path / "train", block


def read_all(source, batch_size=9, threads=2):
    return list(RecordReader(source, batch_size=batch_size, repeat=False, drop_last=False, threads=threads))


def test_a_data_set_of_terarec_is_read_without_conversion(split):
    directory, block = split
    source = ParquetSource(directory / "_file_list.txt", LAYOUT)
    assert sum(source.group_rows) == 100
    (batch,) = read_all(source, 100)
    assert batch.sparse.names == ("data.0", "data.1")
    np.testing.assert_array_equal(batch.label, block.label)
    np.testing.assert_array_equal(batch.dense, block.dense)
    np.testing.assert_array_equal(batch.sparse.keys[:100], block.keys[0])
    np.testing.assert_array_equal(batch.sparse.keys[100:], block.keys[1][0] + 50)
    np.testing.assert_array_equal(batch.sparse.offsets[100:] - 100, block.keys[1][1])


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_come_in_the_order_of_the_list(split, threads):
    directory, _ = split
    write_file_list(directory / "turned.txt", [directory / f"part-0000{i}.parquet" for i in (2, 0)])
    batches = read_all(ParquetSource(directory / "turned.txt", LAYOUT), threads=threads)
    assert row_numbers(batches) == [*range(70, 100), *range(30)]


def test_files_that_the_metadata_does_not_know_are_passed_over(split):
    directory, _ = split
    unknown = directory / "other.parquet"
    write_file_list(directory / "list.txt", [directory / "part-00001.parquet", unknown])
    source = ParquetSource(directory / "list.txt", LAYOUT)
    assert source.left_out == (str(unknown),)
    assert row_numbers(read_all(source)) == list(range(30, 70))


def test_behind_a_url(split):
    directory, _ = split
    files = fsspec.filesystem("memory")
    for path in directory.iterdir():
        files.pipe(f"/terarec/{path.name}", path.read_bytes())
    files.pipe("/terarec/list.txt", b"2\n/terarec/part-00000.parquet\n/terarec/part-00001.parquet\n")
    try:
        assert row_numbers(read_all(ParquetSource("memory://terarec/list.txt", LAYOUT))) == list(range(70))
    finally:
        files.rm("/terarec", recursive=True)


def test_wrong_lists(split):
    directory, _ = split
    write_file_list(directory / "list.txt", [])
    with pytest.raises(FormatError, check=at(f"{directory}/list.txt")):
        ParquetSource(directory / "list.txt", LAYOUT)
    write_file_list(directory / "list.txt", [directory / "other.parquet"])
    with pytest.raises(FormatError, check=at(f"{directory}/_metadata.json")):
        ParquetSource(directory / "list.txt", LAYOUT)
    (directory / "part-00000.parquet").unlink()
    with pytest.raises(DataNotFoundError, check=at(f"{directory}/part-00000.parquet")):
        ParquetSource(directory / "_file_list.txt", LAYOUT)
    (directory / "_metadata.json").unlink()
    with pytest.raises(DataNotFoundError, check=at(f"{directory}/_metadata.json")):
        ParquetSource(directory / "_file_list.txt", LAYOUT)


def test_the_other_key_type(split):
    directory, _ = split
    with pytest.raises(FormatError, check=at(f"{directory}/part-00000.parquet, column 'C0'")):
        ParquetSource(directory / "_file_list.txt", dataclasses.replace(LAYOUT, key_bytes=8))


@pytest.mark.parametrize(("sizes", "slots"), [((50, 51), []), ((7, 51), ["data.0"]), ((7, 1), ["data.0"])])
def test_keys_beyond_the_size_of_their_slot_are_warned_of_once(split, caplog, sizes, slots):
    """Finding N14: with the offsets of slots they are keys of the next slot, as in HugeCTR."""
    directory, _ = split
    layout = dataclasses.replace(LAYOUT, slot_sizes=sizes)
    read_all(ParquetSource(directory / "_file_list.txt", layout))
    assert [record.args[0] for record in caplog.records] == slots
