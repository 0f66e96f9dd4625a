"""Kinds of values that can be counted and looked up."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from terarec.etl.columns import ARROW_TYPES, Column, Kind

ValueKind: TypeAlias = Literal["text", "integer", "hex32"]
"""Kinds that can be looked up; ids are looked up as integers."""

VALUE_TYPES: dict[pa.DataType, ValueKind] = {
    ARROW_TYPES["text"]: "text",
    ARROW_TYPES["integer"]: "integer",
    ARROW_TYPES["hex32"]: "hex32",
}
"""The kind of the values in an Arrow array of a type."""


def lookup_kind(kind: Kind) -> ValueKind:
    """The kind under which values of `kind`, no numbers, are looked up."""
    assert kind != "number"
    return "integer" if kind == "id" else kind


def as_values(column: Column) -> Column:
    """The m values of a column, without their lists; ids as integers, id 0 being missing."""
    if column.type != "id":
        return column.flat()
    missing = column.values == 0
    return Column("integer", column.values.astype(np.int64, copy=False), missing if missing.any() else None)
