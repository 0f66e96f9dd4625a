# SPDX-License-Identifier: Apache-2.0
"""Which samples come when: input order, or a shuffle that is a permutation, new in every epoch, the same for a seed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.data import Reader
from terarec.data.sampling import SHUFFLE_GROUPS, Sampler
from tests.data.sources import TinyGroups, row_numbers

GROUPS = (50,) * 12


def epochs_of(count=1, **options):
    reader = Reader(TinyGroups(GROUPS), batch_size=32, **options)
    return [row_numbers(reader) for _ in range(count)]


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 2), (1, 0), (3, 4)])
def test_input_order(threads, prefetch):
    assert epochs_of(2, threads=threads, prefetch=prefetch) == [list(range(600))] * 2


def test_a_shuffle_is_a_permutation_and_differs_per_epoch_and_seed():
    first, second, third = epochs_of(3, shuffle=True, seed=1)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(600))
    assert len({tuple(first), tuple(second), tuple(third), tuple(epochs_of(1, shuffle=True, seed=2)[0])}) == 4


def test_the_same_seed_gives_the_same_order_for_any_threads():
    expected = epochs_of(2, shuffle=True, seed=1, prefetch=0)
    for threads, prefetch in [(1, 1), (2, 2), (5, 7)]:
        assert epochs_of(2, shuffle=True, seed=1, threads=threads, prefetch=prefetch) == expected


def test_groups_are_shuffled_and_mixed_within_a_window():
    (order,) = epochs_of(1, shuffle=True, seed=1)
    windows = [order[start : start + 50 * SHUFFLE_GROUPS] for start in range(0, 600, 50 * SHUFFLE_GROUPS)]
    groups = [sorted({row // 50 for row in window}) for window in windows]
    assert sorted(itertools.chain(*groups)) == list(range(12))
    assert groups != [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    for window in windows:  # the first samples of a window come from all of its groups
        assert len({row // 50 for row in window[:50]}) == SHUFFLE_GROUPS


def test_the_order_of_a_seed_is_fixed_for_ever():
    sampler = Sampler([6] * 9, shuffle=True, seed=7)
    assert sampler.windows(0) == [(8, 4, 1, 6), (3, 2, 7, 5), (0,)]
    assert sampler.order(0, 2, 6).tolist() == [4, 0, 2, 1, 5, 3]


def test_seeds_beyond_63_bits_are_reported_apart():
    orders = [Sampler([50], shuffle=True, seed=2**64 - 1 - i).order(0, 0, 50).tolist() for i in range(4)]
    assert len({tuple(order) for order in orders}) == 4


@given(size=st.integers(0, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 99))
def test_orders_are_permutations_of_any_size(size, seed, epoch):
    sampler = Sampler([size], shuffle=True, seed=seed)
    assert sorted(sampler.order(epoch, 0, size).tolist()) == list(range(size))


def test_places_are_equally_likely():
    """Each of 5 samples comes first in about a fifth of the epochs: within 5 standard deviations."""
    sampler = Sampler([5], shuffle=True, seed=0)
    firsts = [int(sampler.order(epoch, 0, 5)[0]) for epoch in range(2000)]
    for sample in range(5):
        assert abs(firsts.count(sample) - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 599, 600, 1000])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sizes(shuffle, batch_size, drop_last):
    reader = Reader(TinyGroups(GROUPS), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    sizes = [batch.batch_size for batch in reader]
    expected = [batch_size] * (600 // batch_size) + ([600 % batch_size] if 600 % batch_size and not drop_last else [])
    assert sizes == expected
    assert len(reader) == len(sizes)
