"""Columns, Arrow arrays and Python's own spelling <-> plain values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.etl.columns import ARROW_TYPES, Column, Kind
from terarec.etl.operators.plain_function import PlainLists, checked_integers, checked_texts
from terarec.kernels.cpu.encoding import numbers_of_list
from terarec.kernels.encoding_types import RefusedValueError


def plain_of_column(column: Column) -> Any:
    """The rows of a column as plain values."""
    flat = _plain_of_flat(column)
    return flat if column.offsets is None else PlainLists(flat, column.offsets.tolist())


def _plain_of_flat(column: Column) -> Any:
    values = column.values
    if column.type == "text":
        return column.values.to_pylist()
    if column.type in ("number", "id"):
        return values
    spelled = [f"{value:08x}" for value in values.tolist()] if column.type == "hex32" else values.tolist()
    if column.missing is None:
        return spelled
    return [None if gone else value for value, gone in zip(spelled, column.missing.tolist(), strict=True)]


def arrow_of_plain(values: Any, kind: Kind) -> pa.Array:
    """Plain values as an Arrow array of their kind's type, or a large_list of it; missing values are null."""
    if isinstance(values, PlainLists):
        offsets = pa.array(values.offsets, type=pa.int64())
        return pa.LargeListArray.from_arrays(offsets, arrow_of_plain(values.items, kind))
    spelled = values if isinstance(values, np.ndarray) else python_of_plain(values, kind)
    return pa.array(spelled, type=ARROW_TYPES[kind], from_pandas=True)


def python_of_plain(values: Any, kind: Kind) -> list[Any]:
    """Plain values as Python spells them: None for all missing ones, hex32 as int, lists as lists."""
    if isinstance(values, PlainLists):
        return PlainLists(python_of_plain(values.items, kind), values.offsets).each()
    if kind == "text":
        return [text or None for text in values]
    if kind == "hex32":
        return [int(digits, 16) if digits else None for digits in values]
    if kind == "number":
        return [None if math.isnan(number) else number for number in values.tolist()]
    return values if isinstance(values, list) else values.tolist()


def plain_of_python(values: list[Any], kind: Kind) -> Any:
    """What `python_of_plain` gives as plain values, lists excepted.

    Raises:
        RefusedValueError: a value of another kind.
    """
    if kind == "number":
        return numbers_of_list(values)
    if kind == "text":
        return checked_texts(values)
    checked_integers(values)
    if kind != "hex32":
        return values
    for row, value in enumerate(values):
        if value is not None and not 0 <= value < 2**32:
            raise RefusedValueError(row)
    return [None if value is None else f"{value:08x}" for value in values]
