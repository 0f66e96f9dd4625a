# SPDX-License-Identifier: Apache-2.0
"""The compiled id tables equal plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terarec.errors import FormatError
from terarec.kernels.cpu import encoding as cpu
from terarec.kernels.cpu.encoding import InvalidValueError
from tests.kernels import plain_encoding as ref
from tests.kernels.anything import ANYTHING, found_list
from tests.kernels.columns import INT64S, SMALL_TEXTS, text_of, validity_of
from tests.params import examples

BUCKETS = st.sampled_from([1, 1, 2, 10, 1000])


@given(st.lists(ANYTHING, max_size=8), BUCKETS)
@settings(max_examples=examples(300))
def test_lists_of_anything_are_read_or_rejected_as_in_plain_python(values, buckets):
    for name, known in (
        ("Hex32Ids", [np.array([7, 10, 0], dtype=np.uint32)]),
        ("Int64Ids", [np.array([3, -2, 0, 2**40])]),
        ("TextIds", text_of(["a", "A", "7", "\u00e9"])),
    ):
        assert found_list(getattr(cpu, name)(*known, buckets).find_list, values) == found_list(
            getattr(ref, name)(*known, buckets).find_list, values
        )


@given(st.lists(st.lists(ANYTHING, max_size=2), min_size=3, max_size=3), BUCKETS)
@settings(max_examples=examples(200))
def test_values_of_several_columns_are_found_or_rejected_as_in_plain_python(columns, buckets):
    found = []
    for module in (cpu, ref):
        codes = module.Hex32Ids(np.array([7, 10, 0], dtype=np.uint32), buckets)
        tables = [codes, module.TextIds(*text_of(["a", "A", "7"]), buckets), codes]
        found.append(found_list(module.TablesOfColumns(tables).find_lists, columns))
    assert found[0] == found[1]


def test_columns_that_do_not_fit_their_tables_are_rejected():
    table = cpu.Int64Ids(np.array([1]))
    assert cpu.TablesOfColumns([]).find_lists([]).tolist() == []
    for columns in ([], [[1], [2]]):
        with pytest.raises(ValueError, match="columns and tables differ in number"):
            cpu.TablesOfColumns([table]).find_lists(columns)


@given(
    st.lists(INT64S, unique=True, max_size=60),
    st.lists(st.tuples(INT64S, st.booleans()), max_size=60),
    st.sampled_from([("Hex32Ids", np.uint32), ("Int64Ids", np.int64)]),
    st.sampled_from([np.int32, np.int64, None]),
    BUCKETS,
)
def test_ids_of_integers_equal_those_of_plain_python(values, others, kind, out_type, buckets):
    name, dtype = kind
    known = np.unique(np.array(values, dtype=np.int64).astype(dtype))[::-1].copy()
    keys = np.concatenate([known, np.array([key for key, _ in others], dtype=np.int64).astype(dtype)])
    valid = validity_of([False] * len(known) + [gone for _, gone in others])
    tables = getattr(cpu, name)(known, buckets), getattr(ref, name)(known, buckets)
    outs = [None if out_type is None else np.empty(len(keys), dtype=out_type) for _ in tables]
    found, expected = (table.find_all(keys, valid, out) for table, out in zip(tables, outs, strict=True))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == (out_type or np.int64)
    assert found[: len(known)].tolist() == list(range(buckets + 1, buckets + 1 + len(known)))
    others = getattr(cpu, name)(known[::2].copy(), buckets)
    together = cpu.find_columns([tables[0], others], [keys, keys], [valid, None])
    assert together.dtype == np.int32
    np.testing.assert_array_equal(together, [expected, others.find_all(keys)])


@given(
    st.lists(SMALL_TEXTS.filter(bool), unique=True, max_size=40),
    st.lists(st.tuples(SMALL_TEXTS, st.booleans()), max_size=40),
    BUCKETS,
)
def test_ids_of_texts_equal_those_of_plain_python(known, others, buckets):
    table, oracle = cpu.TextIds(*text_of(known), buckets), ref.TextIds(*text_of(known), buckets)
    np.testing.assert_array_equal(table.find_all(*text_of(known)), np.arange(len(known)) + buckets + 1)
    texts, valid = text_of([row[0] for row in others]), validity_of([row[1] for row in others])
    np.testing.assert_array_equal(table.find_all(*texts, valid), oracle.find_all(*texts, valid))
    plain = [None if gone else value for value, gone in others]
    np.testing.assert_array_equal(table.find_list(plain), oracle.find_list(plain))


def test_hexadecimal_texts_are_read_or_rejected():
    for module in (cpu, ref):
        table = module.Hex32Ids(np.array([10, 255], np.uint32), 3)
        assert table.find_list(["0A", "", "ff", None]).tolist() == [4, 0, 5, 0]
        with pytest.raises(InvalidValueError) as caught:
            table.find_list(["0A", "zz"])
        assert caught.value.row == 1


@pytest.mark.parametrize("module", [cpu, ref], ids=["cpu", "ref"])
def test_a_value_that_occurs_twice_is_rejected(module):
    with pytest.raises(ValueError, match="occurs twice"):
        module.Hex32Ids(np.array([5, 0, 5], dtype=np.uint32))
    with pytest.raises(ValueError, match="occurs twice"):
        module.Int64Ids(np.array([-1, -1]))
    with pytest.raises(ValueError, match="occurs twice"):
        module.TextIds(*text_of(["a", "b", "a"]))
    with pytest.raises(ValueError, match="hash_buckets"):
        module.Int64Ids(np.array([1]), 0)


def test_arrays_that_do_not_fit_are_rejected():
    table = cpu.Hex32Ids(np.array([1], dtype=np.uint32))
    with pytest.raises(ValueError, match="shorter than the array"):
        table.find_all(np.zeros(9, np.uint32), np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="leave the text"):
        cpu.TextIds(np.zeros(2, np.uint8), np.array([0, 3]))
    with pytest.raises(ValueError, match="rising offsets"):
        cpu.TextIds(np.zeros(4, np.uint8), np.array([0, 3, 1, 4]))
    assert issubclass(InvalidValueError, FormatError)
