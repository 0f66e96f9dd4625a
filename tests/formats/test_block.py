# SPDX-License-Identifier: Apache-2.0
"""Slicing, joining and permuting rows, against plain Python lists, and memory that readers use again."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.formats.block import empty_from_pool, merge, slice_rows
from tests.formats.samples import METADATA, make_block, make_spec
from tests.params import examples


def rows_of(block):
    """One tuple of plain values per row."""
    rows = []
    for row in range(block.num_rows):
        keys = []
        for column in block.keys:
            if isinstance(column, tuple):
                values, offsets = column
                keys.append(values[offsets[row] : offsets[row + 1]].tolist())
            else:
                keys.append(int(column[row]))
        weight = None if block.weight is None else float(block.weight[row])
        metadata = [array[row].as_py() for array in block.metadata]
        rows.append((block.label[row].tolist(), block.dense[row].tolist(), keys, weight, metadata))
    return rows


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    hotness=st.tuples(st.integers(1, 4)),
)
@settings(max_examples=examples(80))
def test_merge_takes_rows_in_the_order_requested(sizes, seed, hotness):
    spec = make_spec(hotness=(1, *hotness), weight="w" if seed % 2 else None, metadata=METADATA[: seed % 4])
    blocks = [make_block(spec, size, seed + index) for index, size in enumerate(sizes)]
    rows = [row for block in blocks for row in rows_of(block)]
    assert rows_of(merge(blocks)) == rows
    order = np.random.default_rng(seed).permutation(len(rows))
    assert rows_of(merge(blocks, order)) == [rows[index] for index in order]


@given(size=st.integers(0, 12), bounds=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_slices_are_rows(size, bounds):
    block = make_block(make_spec(hotness=(1, 3), weight="w", metadata=METADATA), size)
    start, stop = sorted(min(bound, size) for bound in bounds)
    assert rows_of(slice_rows(block, start, stop)) == rows_of(block)[start:stop]


def test_a_slice_of_a_slice():
    block = make_block(make_spec(hotness=(3,)), 12)
    assert rows_of(slice_rows(slice_rows(block, 2, 10), 3, 6)) == rows_of(block)[5:8]


def test_one_block_is_not_copied():
    block = make_block(make_spec(), 5)
    assert merge([block]) is block


LARGE = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_of_a_dropped_array_is_used_again() -> None:
    first = empty_from_pool((LARGE,), np.uint8)
    at = address(first)
    del first
    assert address(empty_from_pool((LARGE,), np.uint8)) == at


def test_memory_is_kept_while_a_view_of_it_lives() -> None:
    first = empty_from_pool((2, LARGE), np.uint8)
    view = first[1, 5:].view(np.uint8)
    view[:] = 7
    del first
    others = [empty_from_pool((2, LARGE), np.uint8) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert (view == 7).all()
    assert len({address(other) for other in others}) == 4


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1,), (131_071,), (131_073,), (1000, 333)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64, "<i8"])
def test_arrays_have_the_shape_and_type(shape: tuple[int, ...], dtype: str) -> None:
    array = empty_from_pool(shape, dtype)
    assert array.shape == shape
    assert array.dtype == np.dtype(dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert not address(array) % array.itemsize


def test_threads_never_share_memory() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            array = empty_from_pool((LARGE // 8,), np.int64)
            array[:] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
