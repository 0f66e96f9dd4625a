# SPDX-License-Identifier: Apache-2.0
"""Ranks that share HugeCTR's files: each sample on one rank, also where records are left out."""

import itertools
import json

import numpy as np
import pytest

from terarec.data import RankShare
from terarec.data.records import NormSource, RawSource, RecordReader, sources
from terarec.formats.block import bags_of, merge, slice_rows
from terarec.formats.hugectr.norm import NormFile
from terarec.formats.hugectr.raw import FixedRecordWriter, raw_types
from tests.data.records.samples import LAYOUT, break_checksum, norm_files
from tests.data.records.test_replay import ONE_HOT, damaged_source, parquet_source
from tests.data.test_shares import check_shared, numbered
from tests.formats.hugectr.samples import make_rows
from tests.params import in_every_run

KINDS = ("damaged norm", "parquet", "raw")
ORDERS = {
    "in order": {},
    "by groups": {"shuffle": True, "shuffles_rows": False},
    "mixed": {"shuffle": True, "seed": 3},
}


@pytest.fixture(params=KINDS)
def source(request, tmp_path, monkeypatch):
    if request.param == "damaged norm":
        return damaged_source(tmp_path)
    if request.param == "parquet":
        return parquet_source(tmp_path, monkeypatch)
    monkeypatch.setattr(sources, "_GROUP_ROWS", 16)
    types = raw_types(ONE_HOT, float_label_dense=True)
    with FixedRecordWriter(tmp_path / "data.bin", ONE_HOT, types) as writer:
        writer.write(*make_rows(ONE_HOT, 50))
        writer.close()
    return RawSource(tmp_path / "data.bin", ONE_HOT, num_samples=50, float_label_dense=True)


def on_rank(source, rank, size, **options):
    mine = RecordReader(source, **options)
    mine.take_share(RankShare(rank=rank, size=size))
    return mine


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_read_the_batches_of_one_process(source, order):
    for batch_size, drop_last in ((4, False), (7, True), (100, False)):
        options = {"batch_size": batch_size, "drop_last": drop_last, "threads": 2, **ORDERS[order]}
        alone = RecordReader(source, **options)
        expected = numbered(alone) + numbered(alone)
        for size in (2, 3):
            shared = [on_rank(source, rank, size, **options) for rank in range(size)]
            check_shared([numbered(mine) + numbered(mine) for mine in shared], expected)
            assert {mine.num_skipped for mine in shared} == {alone.num_skipped}


@pytest.mark.parametrize(
    ("order", "repeat"),
    in_every_run([("by groups", False), ("mixed", True)], itertools.product(ORDERS, (False, True))),
)
def test_a_position_of_ranks_continues_on_any_number_of_them(source, order, repeat):
    options = {"batch_size": 4, "repeat": repeat, **ORDERS[order]}
    expected = numbered(RecordReader(source, **options), 8 if repeat else None)
    for first, second in ((3, 1), (1, 3), (2, 4)):
        for done in (1, 2, 3):
            states = []
            for rank in range(first):
                mine = on_rank(source, rank, first, **options)
                numbered(mine, done)
                states.append(json.dumps(mine.state_dict()))
            assert len(set(states)) == 1
            parts = []
            for rank in range(second):
                mine = on_rank(source, rank, second, **options)
                mine.load_state_dict(json.loads(states[0]))
                parts.append(numbered(mine, 8 - done if repeat else None))
            check_shared(parts, expected[done:])


@pytest.mark.parametrize("source", ["raw"], indirect=True)
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_share_the_short_batches_of_files_that_repeat(source, order):
    for drop_last, sizes in ((False, [20, 20, 10] * 2), (True, [20] * 6)):
        options = {"batch_size": 20, "repeat": True, "drop_last": drop_last, **ORDERS[order]}
        expected = numbered(RecordReader(source, **options), 6)
        assert [rows for _, rows in expected] == sizes
        check_shared([numbered(on_rank(source, rank, 3, **options), 6) for rank in range(3)], expected)


def test_records_are_counted_without_decoding_them(tmp_path):
    source = damaged_source(tmp_path)
    for group in range(len(source.group_rows)):
        block, left_out = source.read(group)
        assert source.kept(group) == block.num_rows == source.group_rows[group] - left_out
    norm_files(tmp_path, [10], checksum=False)
    file = NormFile(tmp_path / "gen_0.data", LAYOUT, checksum=False, group_rows=4)
    assert [file.kept(group) for group in range(3)] == [4, 4, 2]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("layout", [LAYOUT, ONE_HOT], ids=["uneven", "even"])
def test_parts_of_a_group_are_those_of_the_whole(tmp_path, layout, checksum):
    files = norm_files(tmp_path, (40,), layout=layout, checksum=checksum)
    if checksum:
        break_checksum(tmp_path / "gen_0.data", 9)
    for first in (0, 2):  # a file whose first group is not read before
        file = NormFile(tmp_path / "gen_0.data", layout, checksum=checksum, group_rows=15)
        for group in (first, 1):
            spans = [slice(0, 4), slice(7, 9)]
            part = file.read_part(group, spans)
            whole, _ = NormFile(tmp_path / "gen_0.data", layout, checksum=checksum, group_rows=15).read(group)
            expected = merge([slice_rows(whole, span.start, span.stop) for span in spans])
            assert np.array_equal(part.label, expected.label)
            assert np.array_equal(part.dense, expected.dense)
            for mine, theirs in zip(part.keys, expected.keys, strict=True):
                assert list(map(list, rows_of(mine))) == list(map(list, rows_of(theirs)))
    assert NormSource(files, layout, checksum=checksum).read_part(0, [slice(3, 5)]).num_rows == 2


def rows_of(keys):
    return np.split(*flat(bags_of(keys)))


def flat(bags):
    return bags.values, bags.offsets[1:-1]
