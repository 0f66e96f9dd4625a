# SPDX-License-Identifier: Apache-2.0
"""A state saved after any batch replays the rest exactly: every kind of file, damaged records, and repeated data."""

import itertools
import json

import pytest

from terarec.data import Reader
from terarec.data.records import NormSource, ParquetSource, RawAsyncSource, RawSource, RecordReader
from terarec.errors import ConfigError, FormatError
from terarec.formats.hugectr.parquet import ParquetRecordFile
from terarec.formats.hugectr.raw import FixedRecordWriter, raw_async_types, raw_types
from terarec.spec import RecordLayout, SparseInput
from tests.data.records.samples import LAYOUT, break_checksum, norm_files, norm_source
from tests.data.sources import TinyGroups, assert_replays, assert_same_batches, row_numbers
from tests.errors import at
from tests.formats.hugectr.samples import make_layout, make_rows
from tests.formats.samples import make_block, make_spec, write_split
from tests.params import in_every_run

SIZES = (5, 0, 11, 1, 7)
ONE_HOT = make_layout(slots=((1, True),) * 2, sizes=(1000, 1000))


def damaged_source(directory):
    """24 records; 6 fail their checksum: some first, some last, all of one file."""
    files = norm_files(directory, SIZES)
    for file, record in ((0, 0), (2, 3), (2, 10), (3, 0), (4, 5), (4, 6)):
        break_checksum(directory / f"gen_{file}.data", record)
    return NormSource(files, LAYOUT, checksum=True)


def parquet_source(directory, monkeypatch):
    """Four row groups of up to 16 rows, each decoded in pieces of 5."""
    spec = make_spec()
    write_split(directory, spec, make_block(spec, 50), cuts=(30,), rows_per_group=16)
    monkeypatch.setattr(ParquetRecordFile.__init__, "__kwdefaults__", {"piece_rows": 5})
    layout = RecordLayout(
        label_dim=1,
        dense_dim=2,
        inputs=(SparseInput(name="data", nnz_per_slot=(1, 3), is_fixed_length=False),),
        slot_sizes=(50, 51),
    )
    return ParquetSource(directory / "train" / "_file_list.txt", layout)


def fixed_source(directory, kind):
    """40,000 records in groups of 16,384."""
    types = raw_types(ONE_HOT, float_label_dense=True)
    if kind == "raw_async":
        types = raw_async_types(ONE_HOT, is_dense_float=True, multi_hot=True)
    path = directory / "data.bin"
    with FixedRecordWriter(path, ONE_HOT, types) as writer:
        writer.write(*make_rows(ONE_HOT, 40_000))
        writer.close()
    if kind == "raw":
        return RawSource(path, ONE_HOT, num_samples=40_000, float_label_dense=True)
    return RawAsyncSource(path, ONE_HOT, num_samples=40_000)


@pytest.fixture(params=["norm", "damaged", "parquet"])
def source(request, tmp_path, monkeypatch):
    if request.param == "parquet":
        made = parquet_source(tmp_path, monkeypatch)
        assert made.runs == [4, 3, 4, 1]
        return made
    return norm_source(tmp_path, SIZES) if request.param == "norm" else damaged_source(tmp_path)


ORDERS = [{}, {"shuffle": True}, {"shuffle": True, "shuffles_rows": False}]


def assert_resumes(make_reader, count):
    """Restoring after any of `count` batches, whatever the epochs, gives exactly those that followed.

    States travel as JSON text into a new reader, whose iterations follow each other.
    """
    reader = make_reader()
    states, batches, skipped = [json.dumps(reader.state_dict())], [], [0]
    for batch in itertools.islice(endless(reader), count):
        batches.append(batch)
        states.append(json.dumps(reader.state_dict()))
        skipped.append(reader.num_skipped)
    for position, state in enumerate(states):
        resumed = make_reader()
        resumed.load_state_dict(json.loads(state))
        assert resumed.num_skipped == skipped[position]
        rest = list(itertools.islice(endless(resumed), count - position))
        assert_same_batches(rest, batches[position:])
        assert resumed.num_skipped == skipped[-1]
        assert json.dumps(resumed.state_dict()) == states[-1]


def endless(reader):
    while True:
        yield from reader


CASES = list(itertools.product(range(3), (False, True), ((1, 1, 0), (4, 3, 2), (30, 2, 1))))
# A batch a row takes 200 states, and one batch of all rows tests little of the order: in every run in one order alone.
QUICK = [case for number, case in enumerate(CASES) if number in (1, 7, 10, 16)]


@pytest.mark.parametrize(("order", "repeat", "batches"), in_every_run(QUICK, CASES))
def test_every_position_over_several_epochs(source, order, repeat, batches):
    batch_size, threads, prefetch = batches
    options = {**ORDERS[order], "seed": 5, "repeat": repeat}
    count = 2 + 2 * (sum(source.group_rows) // batch_size)
    assert_resumes(
        lambda: RecordReader(source, batch_size=batch_size, threads=threads, prefetch=prefetch, **options), count
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_damaged_records_are_counted_once_over_a_stop(tmp_path, drop_last):
    source = damaged_source(tmp_path)
    assert_resumes(lambda: RecordReader(source, batch_size=4, drop_last=drop_last, threads=2), 10)
    reader = RecordReader(source, batch_size=4)
    assert len(reader) == 6
    assert row_numbers(reader) == [*range(1, 5), *(5, 6, 7, 9, 10, 11, 12, 13, 14), *range(17, 22)]
    assert reader.num_skipped == 6
    assert reader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("kind", ["raw", "raw_async"])
@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"shuffle": True, "repeat": True}, {"repeat": True, "drop_last": True}]
)
def test_files_of_fixed_records(tmp_path, kind, options):
    """Also where they repeat, the end of the file ends a batch, or is left out: HugeCTR cuts them so."""
    source = fixed_source(tmp_path, kind)
    assert_resumes(lambda: RecordReader(source, batch_size=15_000, threads=2, **options), 5)
    sizes = [batch.batch_size for batch in itertools.islice(RecordReader(source, batch_size=15_000, **options), 3)]
    assert sizes == ([15_000] * 3 if "drop_last" in options else [15_000, 15_000, 10_000])


def test_a_file_without_a_whole_batch_cannot_repeat_without_short_ones(tmp_path):
    source = fixed_source(tmp_path, "raw")
    with pytest.raises(FormatError, check=at("reader", "the source holds 40,000 records")):
        RecordReader(source, batch_size=40_001, repeat=True, drop_last=True)


@pytest.mark.parametrize("source", ["norm", "parquet"], indirect=True)
@pytest.mark.parametrize("shuffle", [False, True])
def test_files_without_damage_replay_as_data_sets_do(source, shuffle):
    assert_replays(lambda: RecordReader(source, batch_size=4, shuffle=shuffle, threads=2))


def test_a_state_fits_any_number_of_threads(tmp_path):
    source = damaged_source(tmp_path)
    whole = list(RecordReader(source, batch_size=3, shuffle=True, seed=3))
    ahead = RecordReader(source, batch_size=3, shuffle=True, seed=3, threads=4, prefetch=4)
    iterator = iter(ahead)
    next(iterator)
    next(iterator)
    plain = RecordReader(source, batch_size=3, shuffle=True, prefetch=0)
    plain.load_state_dict(ahead.state_dict())
    assert_same_batches(list(plain), whole[2:])


READING = [(1, 1, 0), (6, 3, 2), (34, 2, 1), (100, 1, 2)]
REPEATED = [(shuffle, *reading) for shuffle in (False, True) for reading in READING]


@pytest.mark.parametrize(
    ("shuffle", "batch_size", "threads", "prefetch"), in_every_run(REPEATED[1:4] + REPEATED[5:7], REPEATED)
)
def test_data_sets_that_repeat(shuffle, batch_size, threads, prefetch):
    source = TinyGroups((7, 3, 0, 5, 8, 1, 6, 4))

    def make_reader(**options):
        return Reader(source, batch_size=batch_size, shuffle=shuffle, threads=threads, prefetch=prefetch, **options)

    once = make_reader()
    rows = [row for _ in range(9) for row in row_numbers(once)]
    stream = make_reader(repeat=True)
    count = 2 * 34 // batch_size + 3
    batches = list(itertools.islice(stream, count))
    assert {batch.batch_size for batch in batches} == {batch_size}
    assert row_numbers(batches) == rows[: count * batch_size]
    reader = make_reader(repeat=True)
    for position, batch in enumerate(itertools.islice(reader, count)):
        assert_same_batches([batch], batches[position : position + 1])
        resumed = make_reader(repeat=True)
        resumed.load_state_dict(reader.state_dict())
        assert_same_batches(list(itertools.islice(resumed, count - position - 1)), batches[position + 1 :])


def test_another_kind_of_state_is_rejected(tmp_path):
    reader = RecordReader(norm_source(tmp_path, SIZES), batch_size=4, repeat=True)
    for field, value in (("repeat", False), ("rows", 25), ("batch_size", 5), ("shuffle", True)):
        with pytest.raises(ConfigError, check=at("reader state")):
            reader.load_state_dict({**reader.state_dict(), field: value})
    with pytest.raises(ConfigError, check=at("state['rows_skipped']")):
        reader.load_state_dict({**reader.state_dict(), "rows_skipped": -1})
