# SPDX-License-Identifier: Apache-2.0
"""The compiled counting tables equal plain Python."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.kernels.cpu import encoding as cpu
from tests.kernels import plain_encoding as ref
from tests.kernels.columns import INT64S, SMALL_TEXTS, text_of, validity_of


def same(found, expected):
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
        assert mine.dtype == other.dtype


def check(tables, batches, min_count):
    for batch in batches:
        for table in tables:
            table.add(*batch)
    assert len(tables[0]) == len(tables[1])
    same(tables[0].at_least(min_count), tables[1].at_least(min_count))
    same(tables[0].drain(), tables[1].drain())
    assert len(tables[0]) == 0
    for table in tables:
        table.add(*batches[0])
    same(tables[0].at_least(1), tables[1].at_least(1))


ROWS = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(1, 3)), max_size=200)


@given(ROWS, st.integers(1, 6), st.sampled_from([("Hex32Counts", np.uint32), ("Int64Counts", np.int64)]))
def test_counts_of_integers_equal_those_of_plain_python(rows, min_count, kind):
    name, dtype = kind
    values = np.array([row[0] * 0x9E3779B1 % 2**32 for row in rows], dtype=np.uint32).astype(dtype)
    valid, times = validity_of([row[1] for row in rows]), np.array([row[2] for row in rows], dtype=np.int64)
    tables = getattr(cpu, name)(), getattr(ref, name)()
    check(tables, [(values, valid), (values, None, times)], min_count)


@given(st.lists(st.tuples(INT64S, st.booleans()), max_size=60))
def test_any_64_bit_integer_is_counted(rows):
    values = np.array([row[0] for row in rows], dtype=np.int64)
    check((cpu.Int64Counts(), ref.Int64Counts()), [(values, validity_of([row[1] for row in rows]))], 1)


@given(st.lists(st.tuples(SMALL_TEXTS, st.booleans(), st.integers(1, 3)), max_size=80), st.integers(1, 3))
def test_counts_of_texts_equal_those_of_plain_python(rows, min_count):
    texts, valid = text_of([row[0] for row in rows]), validity_of([row[1] for row in rows])
    times = np.array([row[2] for row in rows], dtype=np.int64)
    check((cpu.TextCounts(), ref.TextCounts()), [(*texts, valid), (*texts, None, times)], min_count)


def test_counts_of_32_bit_values_stop_at_their_largest():
    table = cpu.Hex32Counts()
    for _ in range(2):
        table.add(np.array([7, 0], np.uint32), None, np.array([2**32 - 2, 1]))
    same(table.at_least(1), (np.array([7, 0], np.uint32), np.array([2**32 - 1, 2])))


def add_from_threads(table, batches):
    threads = [threading.Thread(target=table.add, args=batch) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("table", "dtype"), [(cpu.Hex32Counts, np.uint32), (cpu.Int64Counts, np.int64)])
def test_counts_of_many_integers_survive_growth_and_threads(table, dtype):
    values = np.random.default_rng(0).integers(0, 40_000, 200_000).astype(dtype)
    values[:3] = [0, 2**32 - 1, 0]
    counts = table()
    small = counts.memory_bytes
    add_from_threads(counts, [(values[part::4].copy(),) for part in range(4)])
    distinct, expected = np.unique(values, return_counts=True)
    order = np.lexsort((distinct, -expected))
    same(counts.at_least(1), (distinct[order], expected[order]))
    assert counts.memory_bytes > small
    same(counts.drain(), (distinct, expected))
    assert counts.memory_bytes == small


def test_counts_of_many_texts_survive_growth_and_threads():
    values = np.random.default_rng(0).integers(0, 8_000, 40_000)
    names = [f"value {value} " + "x" * (value % 30) for value in values]
    table = cpu.TextCounts()
    small = table.memory_bytes
    add_from_threads(table, [text_of(names[part::4]) for part in range(4)])
    oracle = ref.TextCounts()
    oracle.add(*text_of(names))
    same(table.at_least(3), oracle.at_least(3))
    assert table.memory_bytes > small + sum(map(len, set(names)))
    same(table.drain(), oracle.drain())
    assert table.memory_bytes < 2 * small


def test_arrays_that_do_not_fit_are_rejected():
    with pytest.raises(ValueError, match="shorter than the array"):
        cpu.Int64Counts().add(np.zeros(9, np.int64), np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="leave the text"):
        cpu.TextCounts().add(np.zeros(2, np.uint8), np.array([0, 3]))
