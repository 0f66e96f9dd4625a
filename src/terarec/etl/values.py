"""Distinct values and their ids, for all steps that look values up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.etl.columns import ARROW_TYPES, Kind, lookup_values, numpy_values, text_buffers, validity
from terarec.kernels.cpu.encoding import Hex32Ids, Int64Ids, TextIds, find_columns
from terarec.spec import MISSING_ID

ValueKind: TypeAlias = Literal["text", "integer", "hex32"]
"""Kinds that can be looked up; ids are looked up as integers."""

VALUE_TYPES: dict[pa.DataType, ValueKind] = {
    ARROW_TYPES["text"]: "text",
    ARROW_TYPES["integer"]: "integer",
    ARROW_TYPES["hex32"]: "hex32",
}
"""Arrow type -> kind of the values."""


def lookup_kind(kind: Kind) -> ValueKind:
    """Return the kind under which values of `kind`, no numbers, are looked up."""
    assert kind != "number"
    return "integer" if kind == "id" else kind


_INT32_IDS = 2**31


class ValueIds:
    """V distinct values in the order of their ids: value i has id ``1 + hash_buckets + i``.

    Id 0 is a missing value's; ids ``1 .. hash_buckets`` are those of other values: ``1 + hash mod hash_buckets``.

    Attributes:
        kind: Kind of the values.
        values: Arrow array [V] without nulls, of the kind's type in `VALUE_TYPES`.
        hash_buckets: Number of ids of other values.
    """

    def __init__(self, kind: ValueKind, values: pa.Array, hash_buckets: int = 1) -> None:
        self.kind = kind
        self.values = values
        self.hash_buckets = hash_buckets

    @property
    def first_id(self) -> int:
        """Id of value 0."""
        return 1 + self.hash_buckets

    @property
    def num_ids(self) -> int:
        """Number of ids."""
        return len(self.values) + self.first_id

    @cached_property
    def table(self) -> Hex32Ids | Int64Ids | TextIds:
        """Compiled table that finds ids, made at first use.

        Raises:
            ValueError: A value occurs twice.
        """
        if self.kind == "text":
            return TextIds(*text_buffers(self.values), hash_buckets=self.hash_buckets)
        numbers = numpy_values(self.values)
        if self.kind == "hex32":
            return Hex32Ids(numbers, hash_buckets=self.hash_buckets)
        return Int64Ids(numbers, hash_buckets=self.hash_buckets)

    def find(self, array: pa.Array) -> NDArray[np.int64]:
        """Find ids int64[m] of the m values of an array of this kind, or of ids where the kind is integer."""
        table, values = self.table, lookup_values(array)
        if isinstance(table, TextIds):
            return table.find_all(*text_buffers(values), validity(values))
        return table.find_all(numpy_values(values), validity(values))

    def find_values(self, values: list[Any] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Find ids int64[m] of a few Python values, or of ids int64[m] where the kind is integer.

        Raises:
            InvalidValueError: A value that the table does not take.
        """
        if isinstance(values, list):
            return self.table.find_list(values)
        assert isinstance(self.table, Int64Ids)
        return self.table.find_all(values, np.packbits(values != MISSING_ID, bitorder="little"))

    def inverse(self, ids: Iterable[int]) -> list[str | int | None]:
        """Return the values of `ids`; None for missing and for hashed values. hex32 gives eight lower-case digits.

        Raises:
            IndexError: An id outside 0 <= id < `num_ids`.
        """
        values: list[str | int | None] = []
        for number in ids:
            if not 0 <= number < self.num_ids:
                raise IndexError(f"got id {number}, expected 0 <= id < {self.num_ids}")
            value: Any = self.values[int(number) - self.first_id].as_py() if number >= self.first_id else None
            values.append(f"{value:08x}" if self.kind == "hex32" and value is not None else value)
        return values


def find_each(ids: Sequence[ValueIds], arrays: Sequence[pa.Array]) -> list[NDArray[Any]]:
    """Find the ids of each array in its own `ids`, like `ValueIds.find`, as int32 where all of them fit.

    Arrays of one kind and length are looked up together.
    """
    found: list[NDArray[Any]] = [np.empty(0, dtype=np.int32)] * len(arrays)
    together: dict[tuple[str, int], list[int]] = {}
    values = [lookup_values(array) for array in arrays]
    for position, (own, array) in enumerate(zip(ids, values, strict=True)):
        if own.kind == "text" or own.num_ids > _INT32_IDS:
            found[position] = own.find(array)
        else:
            together.setdefault((own.kind, len(array)), []).append(position)
    for positions in together.values():
        chosen = [values[position] for position in positions]
        tables: list[Any] = [ids[position].table for position in positions]
        rows = find_columns(tables, list(map(numpy_values, chosen)), list(map(validity, chosen)))
        for position, row in zip(positions, rows, strict=True):
            found[position] = row
    return found
