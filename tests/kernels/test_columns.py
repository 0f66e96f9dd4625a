# SPDX-License-Identifier: Apache-2.0
"""The compiled column kernels equal NumPy's, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.kernels.cpu import encoding as cpu
from tests.kernels import plain_encoding as ref

TYPES = (np.float32, np.float64, np.int32, np.int64)
INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


def numbers(dtype: type, count: int, seed: int) -> np.ndarray:
    """Numbers of any size, with those that float32 rounds or cannot hold."""
    words = np.random.default_rng(seed).integers(INT64.min, INT64.max, count, endpoint=True)
    if np.issubdtype(dtype, np.integer):
        return (words >> np.arange(count) % 60).astype(dtype)
    with np.errstate(all="ignore"):
        return words.view(np.float64).astype(dtype)


@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.sampled_from([1, 2, 5, -1])), max_size=11),
    st.sampled_from([0, 1, 3, 63, 64, 65, 131]),
)
def test_columns_become_the_rows_of_numpy(kinds, num_rows):
    columns = [
        numbers(dtype, num_rows * abs(step), seed)[::step][:num_rows] for seed, (dtype, step) in enumerate(kinds)
    ]
    found, expected = (np.full((num_rows, len(columns)), 7, dtype=np.float32) for _ in range(2))
    cpu.stack_columns(columns, found)
    with np.errstate(all="ignore"):
        ref.stack_columns(columns, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), ~is_number)  # the bits of a NaN are the processor's
    np.testing.assert_array_equal(found.view(np.uint32)[is_number], expected.view(np.uint32)[is_number])


@given(
    st.lists(
        st.tuples(
            st.sampled_from([np.int32, np.int64]),
            st.sampled_from([0, 1, 17, 100]),
            st.one_of(st.sampled_from([0, -1, INT32.max, INT64.max, INT64.min]), st.integers(INT64.min, INT64.max)),
        ),
        max_size=6,
    )
)
def test_keys_follow_one_another_with_their_offsets(pieces):
    arrays = [numbers(dtype, count, seed) for seed, (dtype, count, _) in enumerate(pieces)]
    for array in arrays:
        array.flags.writeable = False
    offsets = [offset for _, _, offset in pieces]
    found, expected = (np.full(sum(map(len, arrays)), 7) for _ in range(2))
    cpu.concatenate_keys(arrays, offsets, found)
    with np.errstate(over="ignore"):
        ref.concatenate_keys(arrays, offsets, expected)
    np.testing.assert_array_equal(found, expected)


def test_wrong_arrays_are_rejected():
    keys, rows = np.arange(4), np.empty((4, 1), dtype=np.float32)
    for columns, message in (
        ([], "differ in width"),
        ([keys[:3]], "differ in number"),
        ([keys.astype(np.int16)], "expected float32"),
        ([keys.astype(">i8")], "expected float32"),
        ([keys.reshape(2, 2)], "one dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.stack_columns(columns, rows)
    for arrays, offsets, message in (
        ([keys], [], "differ in number"),
        ([keys[:3]], [0], "differ in length"),
        ([keys.astype(np.uint32)], [0], "expected int32 or int64"),
        ([keys.astype(np.float64)], [0], "expected int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.concatenate_keys(arrays, offsets, np.empty(4, dtype=np.int64))
    with pytest.raises((ValueError, BufferError)):
        cpu.concatenate_keys([np.arange(8)[::2]], [0], np.empty(4, dtype=np.int64))


@given(
    st.sampled_from([np.int64, np.uint32, np.float64]),
    st.sampled_from([0, 1, 63, 64, 65, 300]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.sampled_from([0, 7, float("nan")]),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_numbers_under_nulls(dtype, count, share, fill, others, seed):
    random = np.random.default_rng(seed)
    fill = fill if dtype == np.float64 or fill == fill else 0
    missing = random.random(count) < share
    values = random.integers(0, 3, count).astype(dtype)
    values[missing] = fill
    if count:
        values[random.integers(0, count, others)] = 5  # under a null or next to it
    valid = np.packbits(~missing, bitorder="little")
    expected = ref.nulls_hold(values, valid, fill)
    assert cpu.nulls_hold(values, valid, fill) is expected
    nulls = values[missing].tolist()
    assert expected is all(value == fill or (value != value and fill != fill) for value in nulls)


def test_numbers_under_nulls_of_wrong_arrays():
    with pytest.raises(ValueError, match="bitmap is shorter"):
        cpu.nulls_hold(np.zeros(9, np.int64), np.zeros(1, np.uint8), 0)
    with pytest.raises(TypeError):
        cpu.nulls_hold(np.zeros(8, np.int32), np.zeros(1, np.uint8), 0)
