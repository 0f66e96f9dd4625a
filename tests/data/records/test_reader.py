# SPDX-License-Identifier: Apache-2.0
"""RecordReader: every sample once and in order, ends and new starts, errors, and no thread left behind."""

import itertools

import numpy as np
import pytest
from torch.utils.data import DataLoader

from terarec.data.records import NormSource, RecordReader
from terarec.errors import ConfigError, FormatError
from tests.data.records.samples import LAYOUT, break_checksum, norm_files, norm_source
from tests.data.sources import assert_same_batches, row_numbers
from tests.errors import at
from tests.formats.hugectr.samples import bags, make_rows

SIZES = (5, 0, 11, 1, 7)


pytestmark = pytest.mark.usefixtures("no_reading_thread_is_left")


def make_reader(source, batch_size=4, *, threads=2, **options):
    return RecordReader(source, batch_size=batch_size, threads=threads, **options)


def first_of(reader, count):
    """The first batches of an iteration, which ends after them."""
    return list(itertools.islice(reader, count))


@pytest.mark.parametrize("batch_size", [1, 4, 5, 24, 100])
def test_every_sample_comes_once_and_in_order(tmp_path, batch_size):
    batches = list(make_reader(norm_source(tmp_path, SIZES), batch_size))
    assert row_numbers(batches) == list(range(24))
    assert [batch.batch_size for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert batches[-1].batch_size == (24 % batch_size or batch_size)


def test_what_a_batch_holds(tmp_path):
    (batch,) = list(make_reader(norm_source(tmp_path, (6,)), 6))
    label, dense, keys = make_rows(LAYOUT, 6)
    assert batch.sparse.names == ("in0.0", "in1.0")
    np.testing.assert_array_equal(batch.label, label)
    np.testing.assert_array_equal(batch.dense, dense)
    offsets = batch.sparse.offsets.tolist()
    found = [batch.sparse.keys[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]
    assert found == bags(keys[0]) + bags(keys[1])


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 0), (1, 1), (3, 1), (7, 5)])
def test_threads_do_not_change_the_batches(tmp_path, threads, prefetch):
    source = norm_source(tmp_path, SIZES)
    expected = list(make_reader(source, 4, threads=1, prefetch=2))
    assert_same_batches(list(make_reader(source, 4, threads=threads, prefetch=prefetch)), expected)


def test_the_last_batch_may_be_dropped(tmp_path):
    assert row_numbers(list(make_reader(norm_source(tmp_path, SIZES), 5, drop_last=True))) == list(range(20))


def test_after_the_end_it_starts_over(tmp_path):
    reader = make_reader(norm_source(tmp_path, SIZES), 10)
    first = list(reader)
    assert len(reader) == len(first)
    assert_same_batches(list(reader), first)


def test_repeated_data_is_one_endless_stream(tmp_path):
    reader = make_reader(norm_source(tmp_path, (3, 4)), 5, repeat=True, drop_last=True)
    assert reader.repeat
    batches = first_of(reader, 7)
    assert row_numbers(batches) == list(range(7)) * 5
    assert {batch.batch_size for batch in batches} == {5}


GROUPS = {tuple(range(start, start + size)) for start, size in ((0, 5), (5, 11), (16, 1), (17, 7))}  # of SIZES


def groups_of(rows):
    """The groups that `rows` consist of, in order."""
    starts = {group[0]: group for group in GROUPS}
    return [starts[row] for row in rows if row in starts]


@pytest.mark.parametrize("threads", [1, 3])
def test_shuffled_data_comes_by_groups_and_in_another_order_every_time(tmp_path, threads):
    source = norm_source(tmp_path, SIZES)
    options = {"shuffle": True, "shuffles_rows": False, "seed": 7}
    reader = make_reader(source, 5, threads=threads, **options)
    epochs = [row_numbers(list(reader)) for _ in range(6)]
    for rows in epochs:
        assert [row for group in groups_of(rows) for row in group] == rows
        assert set(groups_of(rows)) == GROUPS
    assert len(set(map(tuple, epochs))) > 1
    again = make_reader(source, 5, **options)
    assert [row_numbers(list(again)) for _ in range(6)] == epochs
    endless = make_reader(source, 8, repeat=True, threads=threads, **options)
    assert row_numbers(first_of(endless, 18)) == list(itertools.chain(*epochs))


def test_shuffling_rows_mixes_the_groups_and_gives_every_sample_once(tmp_path):
    source = norm_source(tmp_path, SIZES)
    epochs = [row_numbers(make_reader(source, 5, shuffle=True, seed=seed)) for seed in range(4)]
    assert all(sorted(rows) == list(range(24)) for rows in epochs)
    assert any([row for group in groups_of(rows) for row in group] != rows for rows in epochs)
    (whole,), (shuffled,) = list(make_reader(source, 24)), list(make_reader(source, 24, shuffle=True, seed=1))
    order = [int(row) for row in shuffled.label[:, 0]]
    for slot in range(2):
        assert slot_bags(shuffled, slot) == [slot_bags(whole, slot)[row] for row in order]
    np.testing.assert_array_equal(shuffled.dense, whole.dense[order])


def slot_bags(batch, slot):
    """The keys of each sample in a slot."""
    offsets = batch.sparse.offsets[slot * batch.batch_size :][: batch.batch_size + 1].tolist()
    return [batch.sparse.keys[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]


def test_a_batch_may_be_larger_than_the_data(tmp_path):
    reader = make_reader(norm_source(tmp_path, (3,)), 8, repeat=True)
    assert row_numbers(first_of(reader, 1)) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_data_loader_gives_the_batches_of_the_reader(tmp_path):
    source = norm_source(tmp_path, SIZES)
    loader = DataLoader(make_reader(source, 5), batch_size=None)
    assert len(loader) == 5
    assert_same_batches(list(loader), list(make_reader(source, 5)))


def test_another_source_takes_over(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    reader = make_reader(norm_source(tmp_path / "a", (6,)), 2, repeat=True)
    batches = iter(reader)
    assert row_numbers([next(batches)]) == [0, 1]
    other = norm_source(tmp_path / "b", (3,))
    reader.set_source(other)
    assert reader.source is other
    assert list(batches) == []
    assert row_numbers(first_of(reader, 2)) == [0, 1, 2, 0]


def test_failed_checksums_are_counted_as_batches_come(tmp_path):
    file_list = norm_files(tmp_path, (4, 4, 4))
    break_checksum(tmp_path / "gen_0.data", 1)
    break_checksum(tmp_path / "gen_2.data", 0)
    break_checksum(tmp_path / "gen_2.data", 3)
    reader = make_reader(NormSource(file_list, LAYOUT, checksum=True), 7, threads=3)
    assert len(reader) == 2
    batches = iter(reader)
    assert row_numbers([next(batches)]) == [0, 2, 3, 4, 5, 6, 7]
    assert reader.num_skipped == 1
    assert row_numbers(batches) == [9, 10]
    assert reader.num_skipped == 3
    assert row_numbers(list(reader)) == [0, 2, 3, 4, 5, 6, 7, 9, 10]
    assert reader.num_skipped == 6


def test_nothing_left_to_repeat(tmp_path):
    file_list = norm_files(tmp_path, (1, 1))
    for name in ("gen_0.data", "gen_1.data"):
        break_checksum(tmp_path / name, 0)
    reader = make_reader(NormSource(file_list, LAYOUT, checksum=True), repeat=True)
    with pytest.raises(FormatError, check=at("reader", "the checksum of every record fails")):
        next(iter(reader))
    with pytest.raises(FormatError, check=at("reader", "the source holds no records")):
        make_reader(norm_source(tmp_path, (0,)), repeat=True)
    assert list(make_reader(norm_source(tmp_path, (0,)))) == []


def test_a_damaged_file_is_reported_when_its_samples_are_due(tmp_path):
    source = norm_source(tmp_path, (4, 4))
    content = (tmp_path / "gen_1.data").read_bytes()
    (tmp_path / "gen_1.data").write_bytes(content[:-3])
    reader = make_reader(source, 4, threads=3)
    for _ in range(2):
        batches = iter(reader)
        assert row_numbers([next(batches)]) == [0, 1, 2, 3]
        with pytest.raises(FormatError, check=at(f"{tmp_path}/gen_1.data")):
            next(batches)
    (tmp_path / "gen_1.data").write_bytes(content)
    assert row_numbers(list(reader)) == list(range(8))


def test_an_unreferenced_reader_ends_its_threads(tmp_path):
    reader = make_reader(norm_source(tmp_path, SIZES), repeat=True, threads=3)
    batches = iter(reader)
    next(batches)
    del reader, batches  # the fixture looks for threads


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("threads", 0), ("prefetch", -1), ("threads", True), ("seed", -1)]
)
def test_wrong_arguments(tmp_path, name, value):
    with pytest.raises(ConfigError, check=at(name)):
        make_reader(norm_source(tmp_path, (1,)), **{"batch_size": 1, name: value})
