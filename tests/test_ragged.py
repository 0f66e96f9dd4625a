# SPDX-License-Identifier: Apache-2.0
"""Lists as values and offsets, against plain Python lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from terarec.ragged import (
    Ragged,
    concatenate_lists,
    flat_values,
    like_values,
    offsets_of,
    slice_lists,
    take_lists,
)

LISTS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=8)


def ragged(lists):
    values = np.array([value for values in lists for value in values], dtype=np.int64)
    return Ragged(values, offsets_of(np.array([len(values) for values in lists], dtype=np.int64)))


def plain(lists):
    assert lists.offsets.dtype == np.int64
    ends = zip(lists.offsets[:-1], lists.offsets[1:], strict=True)
    return [lists.values[begin:end].tolist() for begin, end in ends]


@given(LISTS, st.data())
def test_slices_and_positions(lists, data):
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    assert plain(slice_lists(ragged(lists), start, stop)) == lists[start:stop]
    order = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=10)) if lists else []
    taken = take_lists(ragged(lists), np.array(order, dtype=np.int64))
    assert plain(taken) == [lists[position] for position in order]


@given(st.lists(LISTS, min_size=1, max_size=3))
def test_parts_one_after_the_other(parts):
    assert plain(concatenate_lists([ragged(part) for part in parts])) == [values for part in parts for values in part]


def test_values_without_their_lists_and_back():
    lists = ragged([[1, 2], [], [3]])
    assert flat_values(lists) is lists.values
    assert flat_values(lists.values) is lists.values
    assert plain(like_values(lists, lists.values * 2)) == [[2, 4], [], [6]]
    assert like_values(lists.values, lists.offsets) is lists.offsets
