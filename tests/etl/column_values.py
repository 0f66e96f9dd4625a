"""Columns from Python values and back: None is missing, a list of lists is a column of lists."""

import itertools
from typing import Any

import numpy as np
import pyarrow as pa

from terarec.etl.columns import DTYPES, Block, Column
from terarec.formats.block import offsets_of

Values = list[Any]


def column_of(kind: str, values: Values, *, is_list: bool | None = None) -> Column:
    """hex32 values are numbers; `is_list` tells for a column without rows."""
    if is_list is None:
        is_list = any(isinstance(value, list) for value in values)
    if is_list:
        flat = column_of(kind, [item for items in values for item in items or []], is_list=False)
        lengths = np.array([len(items or []) for items in values], dtype=np.int64)
        return Column(flat.type, flat.values, flat.missing, offsets_of(lengths))
    if kind == "text":
        return Column("text", pa.array(values, type=pa.large_string()))
    if kind == "number":
        return Column("number", np.array([np.nan if value is None else value for value in values], dtype=np.float64))
    missing = np.array([value is None for value in values], dtype=bool)
    filled = np.array([0 if value is None else value for value in values], dtype=DTYPES[kind])
    return Column(kind, filled, missing if missing.any() else None)  # type: ignore[arg-type]


def values_of(column: Column) -> Values:
    listed = column.values.to_pylist() if isinstance(column.values, pa.Array) else np.asarray(column.values).tolist()
    flat = [None if gone else value for value, gone in zip(listed, column.is_missing().tolist(), strict=True)]
    if column.offsets is None:
        return flat
    return [flat[first:last] for first, last in itertools.pairwise(column.offsets.tolist())]


def block_of(first_row: int = 0, **columns: tuple[str, Values]) -> Block:
    """A block of named (kind, values)."""
    made = {name: column_of(kind, values) for name, (kind, values) in columns.items()}
    num_rows = len(next(iter(made.values())))
    return Block(made, np.arange(first_row, first_row + num_rows, dtype=np.int64))
