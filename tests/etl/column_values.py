# SPDX-License-Identifier: Apache-2.0
"""Columns from Python values and back: None is missing, a list of lists is a column of lists."""

from typing import Any

import numpy as np
import pyarrow as pa

from terarec.etl.columns import ARROW_TYPES, DTYPES, Kind, Rows, array_of, lists_of
from terarec.ragged import offsets_of

Values = list[Any]


def column_of(kind: Kind, values: Values, *, is_list: bool | None = None) -> pa.Array:
    """hex32 values are numbers; `is_list` tells for a column without rows."""
    if is_list is None:
        is_list = any(isinstance(value, list) for value in values)
    if is_list:
        flat = column_of(kind, [item for items in values for item in items or []], is_list=False)
        return lists_of(flat, offsets_of(np.array([len(items or []) for items in values], dtype=np.int64)))
    if kind == "id":
        return array_of(np.array(values, dtype=DTYPES["id"]), are_ids=True)
    present = [None if value == "" else value for value in values]
    return pa.array(present, ARROW_TYPES[kind])


def values_of(column: pa.Array) -> Values:
    return column.to_pylist()  # type: ignore[no-any-return]


def block_of(first_row: int = 0, **columns: tuple[Kind, Values]) -> Rows:
    """Rows of named (kind, values)."""
    made = {name: column_of(kind, values) for name, (kind, values) in columns.items()}
    num_rows = len(next(iter(made.values())))
    return Rows(made, np.arange(first_row, first_row + num_rows, dtype=np.int64))
