"""Columns and blocks: taking, slicing and joining rows gives what Python's lists would."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terarec.etl.columns import Block, Column, concatenate_blocks, concatenate_columns, text_buffers
from terarec.formats.block import offsets_of

rows = st.lists(st.none() | st.integers(0, 2**31), max_size=12)
lists = st.lists(rows, max_size=8)


def column_of(kind: str, values: list[int | None]) -> Column:
    if kind == "text":
        return Column("text", pa.array([None if v is None else str(v) for v in values], type=pa.large_string()))
    if kind == "number":
        return Column("number", np.array([np.nan if v is None else v for v in values], dtype=np.float64))
    missing = np.array([v is None for v in values], dtype=bool)
    dtype = np.uint32 if kind == "hex32" else np.int64
    return Column(kind, np.array([v or 0 for v in values], dtype=dtype), missing if missing.any() else None)


def list_column(kind: str, values: list[list[int | None]]) -> Column:
    flat = column_of(kind, [item for items in values for item in items])
    offsets = offsets_of(np.array([len(items) for items in values], dtype=np.int64))
    return Column(flat.type, flat.values, flat.missing, offsets)


def values_of(column: Column) -> list:
    values = column.values.to_pylist() if isinstance(column.values, pa.Array) else list(column.values)
    flat = [None if gone else int(value) for value, gone in zip(values, column.is_missing(), strict=True)]
    if column.offsets is None:
        return flat
    return [flat[first:last] for first, last in itertools.pairwise(column.offsets.tolist())]


kinds = pytest.mark.parametrize("kind", ["text", "number", "integer", "hex32"])


@kinds
@given(values=rows, data=st.data())
def test_take_slice_and_concatenate_scalars(kind: str, values: list[int | None], data: st.DataObject) -> None:
    check(column_of(kind, values), values, data)


@kinds
@given(values=lists, data=st.data())
def test_take_slice_and_concatenate_lists(kind: str, values: list[list[int | None]], data: st.DataObject) -> None:
    check(list_column(kind, values), values, data)


def check(column: Column, values: list, data: st.DataObject) -> None:
    assert len(column) == len(values)
    picked = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=10)) if values else []
    assert values_of(column.take(np.array(picked, dtype=np.int64))) == [values[row] for row in picked]
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    part = column.slice(start, stop)
    assert values_of(part) == values[start:stop]
    assert values_of(concatenate_columns([part, column, part])) == values[start:stop] + values + values[start:stop]


def test_a_block_keeps_its_row_ids_and_splits() -> None:
    block = Block({"a": column_of("integer", [5, None, 7])}, np.arange(3, dtype=np.int64)).with_split(
        np.array([0, 1, 0], dtype=np.uint8)
    )
    assert block.training().rows.tolist() == [0, 2]
    both = concatenate_blocks([block.slice(1, 3), block.keep(np.array([True, False, False]))])
    assert both.rows.tolist() == [1, 2, 0]
    assert values_of(both.columns["a"]) == [None, 7, 5]
    assert both.split is not None
    assert both.split.tolist() == [1, 0, 0]


def test_text_buffers_of_a_slice() -> None:
    text, offsets = text_buffers(pa.array(["ab", None, "cde"], type=pa.large_string()).slice(1))
    assert bytes(text[offsets[0] : offsets[2]]) == b"cde"
    assert text_buffers(pa.array([], type=pa.large_string()))[1].tolist() == [0]


def test_numbers_of_integers_have_nan_where_missing():
    column = Column("integer", np.array([3, 0, -2]), np.array([False, True, False]))
    assert np.array_equal(column.numbers(), [3.0, np.nan, -2.0], equal_nan=True)
    assert Column("id", np.array([1, 2], dtype=np.int32)).numbers().tolist() == [1.0, 2.0]
