# SPDX-License-Identifier: Apache-2.0
"""From files and arrays to batches: what a batch holds, and what is said about bad input."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from terarec.data import InMemorySource, Reader
from terarec.data.decode import has_shared_offsets
from terarec.data.reader import DatasetSource
from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.formats import write_dataset
from terarec.formats.parts import PARTS_FILE, write_parts
from terarec.spec import MetadataColumn
from tests.data.sources import TinyGroups, first_of_workers, row_numbers
from tests.errors import at
from tests.formats.samples import METADATA, make_block, make_spec, write_split

STORAGES = ("parquet", "raw")


@pytest.mark.parametrize("storage", STORAGES)
def test_batches_hold_the_rows_feature_major(tmp_path, storage):
    spec = make_spec(storage, labels=2, dense=3, hotness=(1, 3, 1))
    block = make_block(spec, 30)
    write_split(tmp_path, spec, block, cuts=(11,), rows_per_group=4)
    row = 0
    for batch in Reader(tmp_path, batch_size=8):
        size = batch.batch_size
        rows = slice(row, row + size)
        assert torch.equal(batch.label, torch.from_numpy(block.label[rows]))
        assert torch.equal(batch.dense, torch.from_numpy(block.dense[rows]))
        assert batch.sparse.names == ("C0", "C1", "C2")
        assert batch.sparse.batch_size == size
        keys, offsets = batch.sparse.keys, batch.sparse.offsets
        assert (int(offsets[0]), int(offsets[-1])) == (0, len(keys))
        for feature, column in enumerate(block.keys):
            for sample in range(size):
                bag = keys[offsets[feature * size + sample] : offsets[feature * size + sample + 1]]
                if isinstance(column, tuple):
                    values, starts = column
                    expected = values[starts[row + sample] : starts[row + sample + 1]].tolist()
                else:
                    expected = [int(column[row + sample])]
                assert bag.tolist() == expected
        row += size
    assert row == 30


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_and_metadata_stay_with_their_rows(tmp_path, storage):
    metadata = METADATA if storage == "parquet" else ()
    spec = make_spec(storage, weight="w", metadata=metadata)
    block = make_block(spec, 40)
    write_split(tmp_path, spec, block, cuts=(11, 23), rows_per_group=4)
    in_memory = InMemorySource(
        spec,
        block.label,
        block.dense,
        block.keys,
        weight=block.weight,
        metadata={column.name: array for column, array in zip(metadata, block.metadata, strict=True)},
    )
    for source in (tmp_path, in_memory):
        rows = []
        for batch in Reader(source, batch_size=7, shuffle=True, threads=2):
            found = batch.label[:, 0].long()
            assert torch.equal(batch.weight, torch.from_numpy(block.weight)[found])
            assert list(batch.metadata) == [column.name for column in metadata]
            for name, array in zip(batch.metadata, block.metadata, strict=True):
                assert batch.metadata[name].equals(array.take(pa.array(found.numpy())))
            rows += found.tolist()
        assert rows != sorted(rows)
        assert sorted(rows) == list(range(40))


def test_metadata_in_memory_may_be_lists_and_is_checked():
    spec = make_spec(hotness=(1,), metadata=(MetadataColumn(name="user", type="string"),))
    block = make_block(dataclasses.replace(spec, metadata=()), 3)

    def source(**columns):
        return InMemorySource(spec, block.label, block.dense, block.keys, **columns)

    batch = next(iter(Reader(source(metadata={"user": ["a", None, "b"]}), batch_size=3)))
    assert batch.metadata["user"].to_pylist() == ["a", None, "b"]
    assert batch.weight is None
    for given, place in (
        ({}, ("data set 'tiny' in memory",)),
        ({"user": ["a"]}, ("data set 'tiny' in memory, column 'user'", "got 1 values")),
        ({"user": ["a", 1, "b"]}, ("data set 'tiny' in memory, column 'user'", "Expected bytes, got a 'int' object")),
    ):
        with pytest.raises(FormatError, check=at(*place)):
            source(metadata=given)
    with pytest.raises(FormatError, check=at("data set 'tiny' in memory")):
        source(metadata={"user": ["a", None, "b"]}, weight=np.ones(3))


@pytest.mark.parametrize(("dense", "hotness"), [(0, (1,)), (2, ()), (0, (4,))])
@pytest.mark.parametrize("storage", STORAGES)
def test_data_without_dense_or_without_categorical_columns(tmp_path, storage, dense, hotness):
    spec = make_spec(storage, dense=dense, hotness=hotness)
    write_split(tmp_path, spec, make_block(spec, 10), rows_per_group=3)
    batches = list(Reader(tmp_path, batch_size=4, shuffle=True))
    assert [tuple(batch.dense.shape) for batch in batches] == [(4, dense), (4, dense), (2, dense)]
    assert all(len(batch.sparse.names) == len(hotness) for batch in batches)
    assert sorted(row_numbers(batches)) == list(range(10))


def test_batches_own_their_memory():
    source = TinyGroups((10,))
    for batch in Reader(source, batch_size=4):
        batch.dense.fill_(7)
        batch.label.fill_(7)
        batch.sparse.keys.fill_(7)
        batch.sparse.offsets.fill_(7)
    assert row_numbers(Reader(source, batch_size=4)) == list(range(10))
    assert not (source.block.dense == 7).any()


def test_a_split_without_samples(tmp_path):
    spec = make_spec()
    write_dataset(dataclasses.replace(spec, splits={"valid": ()}), tmp_path)
    reader = Reader(tmp_path, "valid", batch_size=4, shuffle=True)
    assert (len(reader), list(reader), reader.num_rows) == (0, [], 0)
    assert reader.state_dict()["epoch"] == 1


def test_a_reader_describes_itself(tmp_path):
    spec = make_spec()
    spec = write_split(tmp_path, spec, make_block(spec, 10))
    reader = Reader(str(tmp_path), batch_size=4, drop_last=True)
    assert (reader.spec, reader.num_rows, reader.batch_size, len(reader)) == (spec, 10, 4, 2)


def test_arrays_in_memory_in_groups():
    spec = make_spec(hotness=(1,))
    block = make_block(spec, 70_000)
    source = InMemorySource(spec, block.label.astype(np.float64), block.dense, block.keys)
    assert source.group_rows == (65_536, 4_464)
    batches = list(Reader(source, batch_size=50_000))
    assert torch.equal(torch.cat([batch.dense for batch in batches]), torch.from_numpy(block.dense))
    assert torch.equal(torch.cat([batch.sparse.keys for batch in batches]), torch.from_numpy(block.keys[0]))
    assert batches[0].label.dtype == torch.float32


def test_arrays_in_memory_are_checked():
    spec = make_spec(hotness=(1,))
    block = make_block(spec, 5)
    with pytest.raises(FormatError, check=at("data set 'tiny' in memory, column 'C0'")):
        InMemorySource(spec, block.label, block.dense, [np.full(5, 50)])


def test_a_missing_directory_description_and_shard(tmp_path):
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/absent")):
        Reader(tmp_path / "absent", batch_size=4)
    with pytest.raises(DataNotFoundError, check=at(tmp_path)):
        Reader(tmp_path, batch_size=4)
    spec = write_split(tmp_path, make_spec(), make_block(make_spec(), 10))
    (tmp_path / spec.splits["train"][0].file).unlink()
    with pytest.raises(DataNotFoundError, check=at(f"{tmp_path}/train/part-00000.parquet")):
        Reader(tmp_path, batch_size=4)


def test_a_split_that_does_not_exist(tmp_path):
    write_split(tmp_path, make_spec(), make_block(make_spec(), 10))
    with pytest.raises(ConfigError, check=at("data set 'tiny'")):
        Reader(tmp_path, "test", batch_size=4)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_key_outside_its_table_is_named(tmp_path, storage):
    spec = make_spec(storage, hotness=(1,), rows=50)
    spec = write_split(tmp_path, spec, make_block(spec, 30), rows_per_group=10)
    smaller = dataclasses.replace(spec, categorical=(dataclasses.replace(spec.categorical[0], rows=2),))
    write_dataset(smaller, tmp_path)
    shard = next((tmp_path / "train").glob("part-00000.*"))
    with pytest.raises(FormatError, check=at(f"{shard}: row group 0, column 'C0'", "expected 0 <= key < 2")):
        list(Reader(tmp_path, batch_size=4))


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"batch_size": 0}, ("batch_size", "got 0")),
        ({"batch_size": 2.0}, ("batch_size", "got 2.0")),
        ({"batch_size": True}, ("batch_size", "got True")),
        ({"batch_size": 1, "seed": -1}, ("seed", "got -1")),
        ({"batch_size": 1, "seed": 2**64}, ("seed", "got 18446744073709551616")),
        ({"batch_size": 1, "threads": 0}, ("threads",)),
        ({"batch_size": 1, "prefetch": -1}, ("prefetch",)),
    ],
)
def test_arguments_out_of_range(options, place):
    with pytest.raises(ConfigError, check=at(*place)):
        Reader(TinyGroups((10,)), **options)


def test_d11_a_data_loader_gives_the_batches_of_the_reader() -> None:
    expected = list(Reader(TinyGroups((10,)), batch_size=4))
    loader = DataLoader(Reader(TinyGroups((10,)), batch_size=4), batch_size=None)
    assert len(loader) == len(expected)
    for mine, theirs in zip(loader, expected, strict=True):
        assert torch.equal(mine.sparse.keys, theirs.sparse.keys)
        assert torch.equal(mine.dense, theirs.dense)


def test_d11_a_data_loader_with_workers_is_rejected() -> None:
    loader = DataLoader(Reader(TinyGroups((10,)), batch_size=4), batch_size=None, num_workers=2)
    with pytest.raises(ConfigError, check=at("", "num_workers=2")):
        first_of_workers(loader)


@pytest.fixture
def parted(tmp_path):
    spec = make_spec("parquet", hotness=(1, 3))
    write_split(tmp_path, spec, make_block(spec, 100), cuts=(37,), rows_per_group=10)
    write_parts(spec_of(tmp_path), tmp_path, "train", 3)
    return tmp_path


def by_parts(directory):
    return DatasetSource(directory, "train", by_parts=True)


def spec_of(directory):
    return Reader(directory, batch_size=1).spec


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_by_parts_hold_samples_of_one_part(parted, shuffle, drop_last):
    whole = [batch.label[:, 0] for batch in Reader(parted, batch_size=100)]
    rows = {label: row for row, label in enumerate(torch.cat(whole).tolist())}
    reader = Reader(by_parts(parted), batch_size=8, shuffle=shuffle, drop_last=drop_last)
    sizes = [part.rows for part in reader.parts]
    ends = np.cumsum(sizes)
    for _ in range(2):
        seen, parts = [], []
        for batch in reader:
            mine = [rows[label] for label in batch.label[:, 0].tolist()]
            part = {int(np.searchsorted(ends, row, side="right")) for row in mine}
            assert len(part) == 1
            assert batch.batch_size == 8 or not drop_last
            parts += part
            seen += mine
            if len(seen) < 100:
                assert reader.part_after(reader.state_dict()) in (parts[-1], (parts[-1] + 1) % 3)
        assert parts == sorted(parts)
        assert len(parts) == len(reader)
        assert len(set(seen)) == len(seen) == (sum(size // 8 * 8 for size in sizes) if drop_last else 100)
        assert (seen == sorted(seen)) is not shuffle


@pytest.mark.parametrize("drop_last", [False, True])
def test_reading_by_parts_continues_after_any_batch(parted, drop_last):
    options = {"batch_size": 8, "shuffle": True, "drop_last": drop_last}
    reader, states = Reader(by_parts(parted), **options), []
    batches = []
    for batch in reader:
        batches.append(batch.label)
        states.append(reader.state_dict())
    for done, state in enumerate(states, start=1):
        rest = Reader(by_parts(parted), **options, threads=2)
        rest.load_state_dict(state)
        assert [label.tolist() for label in (batch.label for batch in rest)] == [b.tolist() for b in batches[done:]]
    with pytest.raises(ConfigError):
        Reader(parted, batch_size=8, shuffle=True, drop_last=drop_last).load_state_dict(states[0])


def test_reading_by_parts_needs_parts_of_these_shards(parted, tmp_path):
    with pytest.raises(ConfigError):
        Reader(by_parts(parted), batch_size=8, repeat=True)
    other = tmp_path / "other"
    spec = make_spec("parquet", hotness=(1, 3))
    write_split(other, spec, make_block(spec, 60), cuts=(), rows_per_group=10)
    with pytest.raises(DataNotFoundError):
        by_parts(other)
    (other / "train" / PARTS_FILE).write_bytes((parted / "train" / PARTS_FILE).read_bytes())
    with pytest.raises(FormatError):
        by_parts(other)


@pytest.mark.parametrize(("hotness", "are_shared"), [((1, 1), True), ((1, 3), False)])
def test_batches_of_one_key_in_every_bag_share_their_offsets(hotness, are_shared):
    for batch in Reader(TinyGroups((9, 8), hotness), batch_size=6):
        assert has_shared_offsets(batch) is are_shared
        copied = dataclasses.replace(batch.sparse, offsets=batch.sparse.offsets.clone())
        assert not has_shared_offsets(dataclasses.replace(batch, sparse=copied))
