"""Spark expressions for columns of a workflow: names, kinds, lists, hashes.

Kinds are held as: text string, integer and id bigint, number double, hex32 bigint (0 to 2^32 - 1); missing is null,
also for NaN and empty text. A list is an array, never null.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

from terarec.etl.columns import ColumnType, Kind

ROW = "__terarec_row"
"""Column of row ids."""
SPLIT = "__terarec_split"
"""Column of splits: 0 train, 1 valid, 2 test."""

FILE, LINE, TEXT = "__terarec_file", "__terarec_line", "__terarec_text"
"""Columns of the position of a row's file among the sources, of its line there, from 1, and of the line's text."""

SPARK_TYPES: dict[Kind, str] = {
    "text": "string",
    "integer": "bigint",
    "number": "double",
    "hex32": "bigint",
    "id": "bigint",
}

MARK = "\x1e"
"""Stands around a message of ours in an error of Spark."""

_BITS = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_SPARK_SEED = 42


def column(name: str) -> Column:
    """The column `name`, whatever characters are in it."""
    quoted = name.replace("`", "``")
    return F.col(f"`{quoted}`")


def each(kind: ColumnType, values: Column, function: Callable[[Column], Column]) -> Column:
    """`function` of every value, or of every item of lists."""
    return F.transform(values, function) if kind.is_list else function(values)


def spark_type(found: ColumnType) -> str:
    """The name of Spark's type for a column."""
    name = SPARK_TYPES[found.kind]
    return f"array<{name}>" if found.is_list else name


def hashed(values: Column, seed: int) -> Column:
    """XXH64 with `seed`, a signed 64-bit integer, of text or integers; described in docs/workflows.md."""
    if seed == _SPARK_SEED:
        return F.xxhash64(values)
    # Spark's function has the seed 42, but takes the hash of one argument as the seed for the next.
    return F.xxhash64(F.lit(_number_of_hash(seed)).cast("bigint"), values)


def _number_of_hash(target: int) -> int:
    """The int64 whose XXH64 with seed 42 is `target`: each operation of the hash of one number can be undone."""
    # https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, XXH64 of 8 bytes, from its end to its start.
    state = target & _BITS
    state ^= state >> 32
    state = state * pow(_P3, -1, 1 << 64) & _BITS
    state = _undo_shift(state, 29)
    state = state * pow(_P2, -1, 1 << 64) & _BITS
    state = _undo_shift(state, 33)
    state = (state - _P4) * pow(_P1, -1, 1 << 64) & _BITS
    state = _rotated(state, 64 - 27) ^ (_SPARK_SEED + _P5 + 8) & _BITS
    state = state * pow(_P1, -1, 1 << 64) & _BITS
    state = _rotated(state, 64 - 31) * pow(_P2, -1, 1 << 64) & _BITS
    return state - (1 << 64) if state >> 63 else state


def _undo_shift(state: int, bits: int) -> int:
    """The x for which ``x ^ (x >> bits)`` is `state`."""
    found = state
    for _ in range(64 // bits):
        found = state ^ (found >> bits)
    return found


def _rotated(state: int, bits: int) -> int:
    return ((state << bits) | (state >> (64 - bits))) & _BITS


def refuse(condition: Column, message: Column, values: Column) -> Column:
    """`values`, and an error with `message`, between two of `MARK`, where the `condition` holds."""
    return F.when(condition, F.raise_error(F.concat(F.lit(MARK), message, F.lit(MARK)))).otherwise(values)


def field_getter(name: str) -> Callable[[Column], Column]:
    """A function that takes the field `name` of a struct. Spark counts the parameters of a lambda, defaults too."""
    return lambda struct: struct.getField(name)


def literal(kind: Kind, value: Any) -> Column:
    """A value of `kind`."""
    return F.lit(value).cast(SPARK_TYPES[kind])
