# SPDX-License-Identifier: Apache-2.0
"""open_reader and read_spec: the same columns and the same batches from a data set and from HugeCTR's files of it."""

import dataclasses

import pytest

from terarec.data import Reader, open_reader, read_spec
from terarec.data.records import RecordReader, write_as_dataset, write_as_records
from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats import read_dataset
from terarec.formats.hugectr.records import read_records, write_records
from terarec.spec import RecordOptions
from tests.data.records.samples import break_checksum
from tests.data.records.test_convert import ROWS, make_dataset
from tests.data.sources import assert_replays, assert_same_batches, row_numbers
from tests.errors import at

KINDS = [
    ("norm", "parquet", (1, 3)),
    ("parquet", "parquet", (1, 3)),
    ("raw", "raw", (1, 1)),
    ("raw_async", "raw", (1, 3)),
]


@pytest.fixture(params=KINDS, ids=lambda case: case[0])
def both(request, tmp_path):
    """A data set, and HugeCTR's files of it."""
    kind, storage, hotness = request.param
    dataset = make_dataset(tmp_path / "data", storage, hotness)
    write_as_records(dataset, tmp_path / "records", RecordOptions(kind=kind))
    return dataset, tmp_path / "records"


def test_both_have_the_same_columns_and_rows(both):
    dataset, records = both
    expected, found = read_spec(dataset), read_spec(records)
    assert expected == read_dataset(dataset)
    for field in ("labels", "dense", "categorical"):
        assert getattr(found, field) == getattr(expected, field)
    assert {split: found.num_rows(split) for split in found.splits} == ROWS
    assert read_spec(records / "records.json") == found


@pytest.mark.parametrize("split", list(ROWS))
def test_both_give_the_same_batches(both, split):
    dataset, records = both
    expected = list(open_reader(dataset, split, batch_size=7))
    for path in (records, str(records), records / "records.json"):
        reader = open_reader(path, split, batch_size=7, threads=2)
        assert len(reader) == len(expected)
        assert not reader.repeat
        assert_same_batches(list(reader), expected)


def test_both_shuffle_repeat_and_resume(both):
    for path, kind in zip(both, (Reader, RecordReader), strict=True):
        reader = open_reader(path, batch_size=7, shuffle=True, seed=3, drop_last=True)
        assert isinstance(reader, kind)
        rows = row_numbers(reader)
        assert rows != sorted(rows)
        assert len(set(rows)) == 98
        assert_replays(lambda path=path: open_reader(path, batch_size=7, shuffle=True, seed=3, threads=2))
        repeating = open_reader(path, batch_size=70, repeat=True)
        stream = iter(repeating)
        # An epoch of Raw and RawAsync files ends its last batch.
        ends = isinstance(repeating, RecordReader) and repeating.source.ends_batches
        assert row_numbers([next(stream), next(stream)]) == [*range(100), *range(0 if ends else 40)]


def test_slots_without_sizes_are_columns_of_any_keys(tmp_path):
    dataset = make_dataset(tmp_path / "data")
    records = write_as_records(dataset, tmp_path / "out", RecordOptions(kind="norm"))
    layout = dataclasses.replace(records.layout, slot_sizes=())
    write_records(dataclasses.replace(records, layout=layout), tmp_path / "out" / "records.json")
    assert [column.rows for column in read_spec(tmp_path / "out").categorical] == [None, None]
    (found,) = open_reader(tmp_path / "out", batch_size=100)
    (expected,) = open_reader(dataset, batch_size=100)
    split = int(expected.sparse.offsets[100])
    assert found.sparse.keys[:split].equal(expected.sparse.keys[:split])
    assert found.sparse.keys[split:].equal(expected.sparse.keys[split:] + 50)  # Norm files hold keys with offsets
    write_as_dataset(tmp_path / "out" / "records.json", tmp_path / "again")
    assert_same_batches(list(open_reader(tmp_path / "again", batch_size=100)), [found])


@pytest.mark.parametrize("kind", ["norm", "parquet", "raw", "raw_async"])
def test_keys_are_those_of_a_column_of_the_files_or_of_a_hash_table(tmp_path, kind):
    records = write_as_records(
        make_dataset(tmp_path / "data", hotness=(1, 1)), tmp_path / "out", RecordOptions(kind=kind)
    )
    second = {}
    for keys, sizes in (("columns", (50, 50)), ("as_read", (50, 0)), ("with_offsets", (50, 50))):
        layout = dataclasses.replace(records.layout, slot_sizes=sizes)
        write_records(dataclasses.replace(records, layout=layout, keys=keys), tmp_path / "out" / "records.json")
        (batch,) = open_reader(tmp_path / "out", batch_size=100)
        second[keys] = batch.sparse.keys[100:]
        rows = [column.rows for column in read_spec(tmp_path / "out").categorical]
        assert rows == {"columns": [50, 50], "as_read": [50, None], "with_offsets": [None, None]}[keys]
    moved = {"norm": (50, 50), "parquet": (0, 50), "raw": (0, 50), "raw_async": (0, 0)}[kind]
    assert second["as_read"].equal(second["columns"] + moved[0])
    assert second["with_offsets"].equal(second["columns"] + moved[1])


def test_an_input_of_several_slots_names_its_columns(tmp_path):
    records = write_as_records(
        make_dataset(tmp_path / "data", hotness=(1, 1)), tmp_path / "out", RecordOptions(kind="raw")
    )
    joined = dataclasses.replace(records.layout.inputs[0], name="deep", nnz_per_slot=(1, 1))
    layout = dataclasses.replace(records.layout, inputs=(joined,))
    write_records(dataclasses.replace(records, layout=layout), tmp_path / "out" / "records.json")
    names = ("deep.0", "deep.1")
    assert tuple(column.name for column in read_spec(tmp_path / "out").categorical) == names
    assert next(iter(open_reader(tmp_path / "out", batch_size=5))).sparse.names == names


def test_damaged_records_are_left_out(tmp_path):
    write_as_records(make_dataset(tmp_path / "data"), tmp_path / "out", RecordOptions(kind="norm"))
    break_checksum(tmp_path / "out" / "train" / "part-00000.data", 0)
    reader = open_reader(tmp_path / "out", batch_size=200)
    assert sum(batch.batch_size for batch in reader) == 99
    assert reader.num_skipped == 1


@pytest.mark.parametrize("kind", ["norm", "parquet"])
def test_a_key_outside_its_slot(tmp_path, kind):
    records = write_as_records(make_dataset(tmp_path / "data"), tmp_path / "out", RecordOptions(kind=kind))
    layout = dataclasses.replace(records.layout, slot_sizes=(3, 98))
    write_records(dataclasses.replace(records, layout=layout), tmp_path / "out" / "records.json")
    with pytest.raises(FormatError, check=at(f"{tmp_path}/out/train/_file_list.txt, column 'C0'")):
        list(open_reader(tmp_path / "out", batch_size=4))


def test_what_is_not_there(tmp_path, both):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent")):
        open_reader(tmp_path / "absent", batch_size=4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/empty")):
        read_spec(tmp_path / "empty")
    for path, where in zip(both, ("data set 'tiny'", "split"), strict=True):
        with pytest.raises(ConfigError, check=at(where, "'test'")):
            open_reader(path, "test", batch_size=4)
        with pytest.raises(ConfigError, check=at("batch_size")):
            open_reader(path, batch_size=0)
    assert read_records(both[1] / "records.json").splits["valid"].rows == 30
