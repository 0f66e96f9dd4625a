# SPDX-License-Identifier: Apache-2.0
"""Rows of Arrow arrays, and NumPy views of these: what Python's lists would give."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.etl.columns import (
    IdType,
    Kind,
    Rows,
    array_of,
    concatenate_rows,
    flat,
    from_arrow,
    ids_as_integers,
    is_missing,
    kind_of,
    like,
    list_lengths,
    list_offsets,
    lists_of,
    null_mask,
    number_arrays,
    numbers_of,
    numpy_values,
    text_buffers,
    texts_of,
    without_empty,
)
from terarec.etl.ops import FillMissing
from terarec.etl.values import lookup_values
from tests.etl.column_values import block_of, column_of, values_of

rows = st.lists(st.none() | st.integers(0, 2**31), max_size=12)
lists = st.lists(rows, max_size=8)
kinds = pytest.mark.parametrize("kind", ["text", "number", "integer", "hex32"])


def value_of(kind: Kind, value: int | None) -> object:
    return str(value) if kind == "text" and value is not None else value


@kinds
@given(values=rows, data=st.data())
def test_views_of_scalars(kind: Kind, values: list[int | None], data: st.DataObject) -> None:
    check(column_of(kind, [value_of(kind, value) for value in values]), values, data)


@kinds
@given(values=lists, data=st.data())
def test_views_of_lists(kind: Kind, values: list[list[int | None]], data: st.DataObject) -> None:
    listed = [[value_of(kind, value) for value in items] for items in values]
    check(column_of(kind, listed, is_list=True), values, data)


def check(array: pa.Array, values: list, data: st.DataObject) -> None:
    """Take, slice and join rows; the views of a part see the part alone."""
    whole = Rows({"x": array}, np.arange(len(values)))
    picked = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=10)) if values else []
    assert read(whole.take(np.array(picked, dtype=np.int64)).columns["x"]) == [values[row] for row in picked]
    start = data.draw(st.integers(0, len(values)))
    part = whole.slice(start, data.draw(st.integers(start, len(values))))
    assert read(part.columns["x"]) == values[part.ids[0] : part.ids[-1] + 1] if part.num_rows else not part.num_rows
    joined = concatenate_rows([part, whole, part])
    assert read(joined.columns["x"]) == [values[row] for row in joined.ids]


def read(array: pa.Array) -> list:
    """Return the values as integers, by the NumPy views."""
    values, missing, offsets = flat(array), is_missing(array), list_offsets(array)
    if kind_of(array) == "text":
        text, ends = text_buffers(values)
        raw = [int(bytes(text[ends[row] : ends[row + 1]]) or b"0") for row in range(len(values))]
    else:
        numbers = numbers_of(array)
        assert np.isnan(numbers).tolist() == missing.tolist()
        raw = numpy_values(values).tolist()
        assert all(a == b for a, b, gone in zip(raw, numbers, missing, strict=True) if not gone)
    found = [None if gone else int(value) for value, gone in zip(raw, missing, strict=True)]
    if offsets is None:
        return found
    assert np.diff(offsets).tolist() == list_lengths(array).tolist()
    return [found[begin:end] for begin, end in itertools.pairwise(offsets)]


def test_rows_keep_their_ids_and_splits() -> None:
    block = block_of(a=("integer", [5, None, 7])).with_split(np.array([0, 1, 0], dtype=np.uint8))
    assert block.training().ids.tolist() == [0, 2]
    both = concatenate_rows([block.slice(1, 3), block.filter(np.array([True, False, False]))])
    assert both.ids.tolist() == [1, 2, 0]
    assert values_of(both.columns["a"]) == [None, 7, 5]
    assert both.split is not None
    assert both.split.tolist() == [1, 0, 0]


def test_rows_without_columns() -> None:
    block = block_of(a=("integer", [5, None, 7])).select([])
    assert block.num_rows == 3
    assert block.take(np.array([2, 2])).ids.tolist() == block.slice(2, 3).ids.tolist() * 2
    assert values_of(block.with_columns({"b": array_of(np.arange(3))}).columns["b"]) == [0, 1, 2]


def test_text_buffers_of_a_slice() -> None:
    text, offsets = text_buffers(pa.array(["ab", None, "cde"], type=pa.large_string()).slice(1))
    assert bytes(text[offsets[0] : offsets[2]]) == b"cde"
    assert text_buffers(pa.array([], type=pa.large_string()))[1].tolist() == [0]


def test_arrays_share_the_memory_of_numpy() -> None:
    numbers = np.array([1.0, np.nan, 3.0])
    array = array_of(numbers)
    assert array.to_pylist() == [1.0, None, 3.0]
    assert np.shares_memory(numpy_values(array), numbers)
    integers = np.arange(4)
    array = array_of(integers, np.array([False, True, False, False]))
    assert array.slice(1).to_pylist() == [None, 2, 3]
    assert np.shares_memory(numpy_values(array), integers)
    assert null_mask(array.slice(2)) is None
    texts = texts_of(np.frombuffer(b"abc", dtype=np.uint8), np.array([0, 1, 3]), np.array([True, False]))
    assert texts.to_pylist() == [None, "bc"]


def test_ids_are_integers_of_a_type_of_their_own() -> None:
    ids = array_of(np.array([3, 0, 2], dtype=np.int32), are_ids=True)
    assert kind_of(ids) == "id"
    assert ids.type == IdType(pa.int32())
    assert lookup_values(ids).to_pylist() == [3, None, 2]
    listed = lists_of(ids, np.array([0, 1, 3]))
    assert ids_as_integers(listed).type == pa.large_list(pa.int64())
    assert ids_as_integers(listed).to_pylist() == [[3], [0, 2]]
    assert from_arrow(pa.array([1, 2]), "id").type == IdType()
    assert numbers_of(ids).tolist() == [3.0, 0.0, 2.0]


def test_arrays_of_other_types() -> None:
    assert from_arrow(pa.chunked_array([["a", ""], [None]]), "text").to_pylist() == ["a", None, None]
    assert from_arrow(pa.array([[1], None, []], pa.list_(pa.int8())), "integer").to_pylist() == [[1], [], []]
    assert from_arrow(pa.array([1.5, float("nan")]), "number").to_pylist() == [1.5, None]
    assert from_arrow(pa.array(["x", "x"]).dictionary_encode(), "text").to_pylist() == ["x", "x"]
    with pytest.raises(pa.ArrowInvalid):
        from_arrow(pa.array([1.5]), "integer")


def test_values_in_the_lists_of_others() -> None:
    lists = column_of("integer", [[1, 2], [], [3]]).slice(1)
    assert like(lists, array_of(np.array([0.5]))).to_pylist() == [[], [0.5]]
    assert without_empty(pa.array(["", "a", None], pa.large_string())).null_count == 2


def test_zero_nulls_are_known_until_a_column_is_replaced() -> None:
    missing = np.array([True, False, True])
    columns = {name: array_of(np.array([0, 5, 0]), missing) for name in "ab"}
    rows = Rows(columns, np.arange(3), zero_nulls=frozenset("ab"))
    filled = FillMissing(columns=("a",), value=0.0).transform(rows, None)
    assert filled.columns["a"].to_pylist() == [0, 5, 0]
    assert filled.zero_nulls == {"b"}
    assert FillMissing(columns=("b",), value=2.0).transform(rows, None).columns["b"].to_pylist() == [2, 5, 2]
    assert filled.select(["b"]).with_split(np.zeros(3, np.uint8)).zero_nulls == {"b"}
    # Arrow does not promise what it leaves under the nulls of rows that it takes.
    assert rows.take(np.array([2, 1])).zero_nulls == frozenset()
    assert concatenate_rows([rows, rows]).zero_nulls == frozenset()
    other = Rows({"a": array_of(np.array([7, 5, 7]), missing)}, np.arange(3))
    assert FillMissing(columns=("a",), value=0.0).transform(other, None).columns["a"].to_pylist() == [0, 5, 0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 5), (3, 8)])
@pytest.mark.parametrize("missing", [False, True])
def test_rows_of_a_matrix_are_arrays(shape: tuple[int, int], missing: bool) -> None:
    matrix = np.arange(shape[0] * shape[1], dtype=np.float64).reshape(shape)
    if missing and matrix.size:
        matrix[-1, 2] = np.nan
    made = number_arrays(matrix)
    assert [array.to_pylist() for array in made] == [array_of(row).to_pylist() for row in matrix]
    for array, row in zip(made, matrix, strict=True):
        np.testing.assert_array_equal(numbers_of(array), row)
