# SPDX-License-Identifier: Apache-2.0
"""Ranks that share every batch: together they read it, none twice, and each decodes the groups of its samples alone."""

from collections import Counter
from itertools import accumulate, chain, pairwise, product

import pytest
import torch

from terarec.data import RankShare, Reader
from terarec.errors import ConfigError
from terarec.formats.parts import PartSpec
from tests.data.sources import TinyGroups, row_numbers
from tests.errors import at
from tests.params import in_every_run

EVEN, UNEVEN = (10,) * 12, (10, 2, 10, 8, 1, 15, 10, 10, 4)


def readers(groups, size, **options):
    """Return a reader and its source for each rank."""
    found = []
    for rank in range(size):
        source = TinyGroups(groups)
        reader = Reader(source, **options)
        reader.take_share(RankShare(rank=rank, size=size))
        found.append((reader, source))
    return found


def numbered(reader, count=None):
    """Return the row numbers of each batch, and the samples that it has on all ranks."""
    found = []
    for batch in reader:
        found.append((row_numbers([batch]), reader.batch_rows))
        if len(found) == count:
            break
    return found


def check_shared(parts, expected):
    """Check that the ranks' batches have the samples of the expected ones, each on one rank."""
    for rank in parts:
        assert [rows for _, rows in rank] == [len(rows) for rows, _ in expected]
    for index, (whole, _) in enumerate(expected):
        assert Counter(row for rank in parts for row in rank[index][0]) == Counter(whole)


@pytest.mark.parametrize(
    ("groups", "shuffle"), in_every_run([(UNEVEN, False), (EVEN, True)], product([EVEN, UNEVEN], [False, True]))
)
def test_ranks_read_the_batches_of_one_process(groups, shuffle):
    for size, (batch_size, drop_last) in product((2, 3, 8), ((7, True), (16, False), (37, True), (250, False))):
        options = {"batch_size": batch_size, "shuffle": shuffle, "seed": 3, "drop_last": drop_last, "prefetch": 0}
        alone = Reader(TinyGroups(groups), **options)
        shared = [reader for reader, _ in readers(groups, size, **options)]
        for _ in range(2):
            check_shared([numbered(reader) for reader in shared], numbered(alone))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_endless_stream_is_shared_across_its_epochs(shuffle):
    options = {"batch_size": 13, "shuffle": shuffle, "repeat": True, "prefetch": 0}
    alone = Reader(TinyGroups(UNEVEN), **options)
    parts = [numbered(reader, 20) for reader, _ in readers(UNEVEN, 3, **options)]
    check_shared(parts, numbered(alone, 20))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_position_of_ranks_continues_on_any_number_of_them(shuffle):
    options = {"batch_size": 13, "shuffle": shuffle, "seed": 5}
    alone = Reader(TinyGroups(UNEVEN), **options)
    expected = numbered(alone) + numbered(alone)
    for first, second in ((3, 1), (4, 8), (1, 3), (4, 3)):
        states = []
        for reader, _ in readers(UNEVEN, first, **options):
            assert len(numbered(reader, 3)) == 3
            states.append(reader.state_dict())
        assert all(state == states[0] for state in states)
        parts = []
        for reader, _ in readers(UNEVEN, second, **options):
            reader.load_state_dict(states[0])
            parts.append(numbered(reader) + numbered(reader))
        check_shared(parts, expected[3:])


@pytest.mark.parametrize(("size", "most"), [(2, 6), (4, 3), (3, 6), (8, 3)])
def test_a_rank_decodes_the_groups_of_its_samples_alone(size, most):
    """Windows are of four even groups: whole ones for 2 and 4 ranks, and at most half a window for 3."""
    every = Counter()
    for reader, source in readers(EVEN, size, batch_size=15, shuffle=True):
        samples = sum(len(rows) for rows, _ in numbered(reader))
        assert abs(samples - 120 / size) < 3  # a sample for each window
        assert len(source.reads) == len(set(source.reads)) <= most
        every.update(source.reads)
    assert set(every) == set(range(12))
    if 4 % size == 0:
        assert set(every.values()) == {1}


def test_batches_of_many_groups_in_order_are_decoded_in_spans():
    reads = [source.reads for reader, source in readers(EVEN, 4, batch_size=40) if numbered(reader)]
    assert sorted(reads[0] + reads[1] + reads[2] + reads[3]) == list(range(12))
    assert reads[1] == [1, 5, 9]


def test_a_rank_without_samples_has_empty_batches_of_all_columns():
    (other, _), (reader, _) = readers((1,), 2, batch_size=8)
    (whole,) = Reader(TinyGroups((1,)), batch_size=8)
    empty, _ = sorted((next(iter(reader)), next(iter(other))), key=lambda batch: batch.batch_size)
    assert (empty.batch_size, reader.batch_rows) == (0, 1)
    for mine, theirs in ((empty.dense, whole.dense), (empty.label, whole.label)):
        assert mine.shape == (0, theirs.shape[1])
        assert mine.dtype == theirs.dtype
    assert empty.sparse.names == whole.sparse.names
    assert torch.equal(empty.sparse.offsets, torch.zeros(1, dtype=torch.int64))


def by_parts(groups, parts, **options):
    """Return a reader by parts of so many groups."""
    source, ends = TinyGroups(groups), [0, *accumulate(parts)]
    source.parts = tuple(
        PartSpec(groups=stop - start, rows=sum(groups[start:stop])) for start, stop in pairwise(ends)
    )  # fmt: skip
    return Reader(source, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_are_shared_and_continue_on_any_number_of_ranks(shuffle):
    for batch_size, drop_last in ((7, True), (16, False)):
        options = {"batch_size": batch_size, "shuffle": shuffle, "seed": 3, "drop_last": drop_last}
        alone = by_parts(UNEVEN, (4, 2, 3), **options)
        expected = numbered(alone) + numbered(alone)
        for first, second in ((3, 2), (1, 4)):
            states = []
            for rank in range(first):
                reader = by_parts(UNEVEN, (4, 2, 3), **options)
                reader.take_share(RankShare(rank=rank, size=first))
                assert len(numbered(reader, 3)) == 3
                states.append(reader.state_dict())
            parts = []
            for rank in range(second):
                reader = by_parts(UNEVEN, (4, 2, 3), **options)
                reader.take_share(RankShare(rank=rank, size=second))
                reader.load_state_dict(states[-1])
                parts.append(numbered(reader) + numbered(reader))
            check_shared(parts, expected[3:])


@pytest.mark.parametrize("shuffle", [False, True])
def test_spans_of_ranks_one_after_the_other_are_the_batch(shuffle):
    options = {"batch_size": 13, "shuffle": shuffle, "seed": 2}
    parts = []
    for rank in range(3):
        reader = Reader(TinyGroups(UNEVEN), **options)
        reader.take_share(RankShare(rank=rank, size=3, is_span=True))
        parts.append([row_numbers([batch]) for batch in reader])
    whole = [row_numbers([batch]) for batch in Reader(TinyGroups(UNEVEN), **options)]
    assert [list(chain(*of_ranks)) for of_ranks in zip(*parts, strict=True)] == whole


def test_a_share_is_given_back():
    reader = Reader(TinyGroups(UNEVEN), batch_size=16)
    whole = numbered(reader)
    reader.take_share(RankShare(rank=0, size=2))
    assert numbered(reader) != whole
    reader.take_share(None)
    assert reader.share is None
    assert numbered(reader) == whole


def test_a_rank_that_is_not_there_is_rejected():
    with pytest.raises(ConfigError, check=at("rank")):
        RankShare(rank=2, size=2)
