# SPDX-License-Identifier: Apache-2.0
"""Operators that make ids without a vocabulary, and crosses of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import ConfigError
from terarec.etl.columns import (
    REJECTED_SHOWN,
    ColumnType,
    Kind,
    RowFaultError,
    Rows,
    array_of,
    flat,
    is_missing,
    kind_of,
    like,
    list_offsets,
    null_mask,
    numpy_values,
    texts_of,
)
from terarec.etl.ops.base import ColumnsOperator, ColumnTypes, MappedColumns
from terarec.etl.ops.states import State
from terarec.etl.ops.values import RecordFunction, accepted_list, each, hashes_of, item_function, rejected
from terarec.kernels.cpu.encoding import HASH_SEED, InvalidValueError, xxh64_list
from terarec.ragged import Ragged, flat_values, like_values
from terarec.spec import checks
from terarec.spec.dataset import MISSING_ID
from terarec.spec.registry import register


@register("hash_bucket")
@dataclass(frozen=True, kw_only=True)
class HashBucket(MappedColumns):
    """Value -> id without fitting: 0 missing, else ``1 + hash mod buckets``.

    Attributes:
        buckets: Number of ids besides that of missing values.
        seed: Seed of the hash.
    """

    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32")
    output_kind: ClassVar[Kind | None] = "id"
    buckets: checks.PositiveInt64
    seed: checks.NonNegativeInt64 = HASH_SEED

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        return dict.fromkeys(self.writes, self.buckets + 1)

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs = {}
        for name, output in self.pairs:
            array = rows.columns[name]
            ids = self._ids(hashes_of(array, self.seed))
            ids[is_missing(array)] = MISSING_ID
            outputs[output] = like(array, array_of(ids, are_ids=True))
        return rows.with_columns(outputs)

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        return [
            item_function(
                name,
                output,
                self._ids_of_digits if types[name].kind == "hex32" else self._ids_of_values,
                is_list=types[name].is_list,
            )
            for name, output in self.pairs
        ]

    def _ids(self, hashes: NDArray[np.int64]) -> NDArray[np.int64]:
        # NumPy's remainder has the sign of the divisor, so that negative hashes have a bucket, too.
        return hashes % self.buckets + 1

    def _ids_of_values(self, values: list[Any]) -> NDArray[np.int64]:
        ids = self._ids(xxh64_list(values, self.seed))
        if None in values or "" in values:
            ids[[value is None or value == "" for value in values]] = MISSING_ID
        return ids

    def _ids_of_digits(self, values: list[str | None]) -> NDArray[np.int64]:
        return self._ids_of_values([int(digits, 16) if digits else None for digits in values])


@register("given_ids")
@dataclass(frozen=True, kw_only=True)
class GivenIds(MappedColumns):
    """Integer -> the same number as an id or a key, for data that already has ids. Saved workflows have its name.

    Attributes:
        rows: Number of ids of each of `columns`, 0 <= id < rows, none missing; None: its integers are keys.
        max_length: The longest list where `columns` are lists; a longer one is invalid.
        zero_is_missing: Whether the source has id 0 for missing values, as in padded lists, and no value has it.
    """

    accepted: ClassVar[tuple[str, ...]] = ("integer",)
    may_reject: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = True
    rows: tuple[int | None, ...]
    max_length: checks.Width | None = None
    zero_is_missing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rows) != len(self.columns):
            checks.fail(self, "rows", f"{len(self.columns)} numbers, one for each of columns")
        try:
            checks.list_of(checks.integer(1, checks.MOST)).read([rows for rows in self.rows if rows is not None])
        except ValueError:
            checks.fail(self, "rows", "an integer >= 1 or None for each of columns")

    @property
    @override
    def has_missing_id(self) -> bool:
        return self.zero_is_missing

    @property
    @override
    def max_list_length(self) -> int | None:
        return self.max_length

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        types_of_outputs: dict[str, ColumnType] = {}
        for (name, output), rows in zip(self.pairs, self.rows, strict=True):
            column_type = self.input_type(types, name)
            bounds = [bound for bound in (column_type.max_length, self.max_length) if bound is not None]
            longest = min(bounds, default=None) if column_type.is_list else None
            types_of_outputs[output] = ColumnType("integer" if rows is None else "id", column_type.is_list, longest)
        return types_of_outputs

    @override
    def cardinalities(self, rows: Mapping[str, int], state: State | None) -> Mapping[str, int]:
        return {output: rows for output, rows in zip(self.writes, self.rows, strict=True) if rows is not None}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        outputs = {}
        for (name, output), num_ids in zip(self.pairs, self.rows, strict=True):
            self._check_lengths(rows, name)
            array = rows.columns[name]
            if num_ids is not None:
                ids = numpy_values(flat(array))
                # The number under a null is arbitrary, mostly 0, which would be an id.
                wrong = (ids < 0) | (ids >= num_ids) | is_missing(array)
                if wrong.any():
                    raise rejected(rows, name, wrong, accepted_id(num_ids))
                array = like(array, array_of(ids, are_ids=True))
            outputs[output] = array
        return rows.with_columns(outputs)

    @override
    def _of_each_column(self) -> dict[str, tuple[Any, ...]]:
        return {**super()._of_each_column(), "rows": self.rows}

    def _check_lengths(self, rows: Rows, name: str) -> None:
        offsets, most = list_offsets(rows.columns[name]), self.max_length
        if offsets is None or most is None:
            return
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths > most)
        if long.size:
            got = [f"got a list of {length}" for length in lengths[long][:REJECTED_SHOWN].tolist()]
            raise RowFaultError(name, rows.ids[long], got, accepted_list(most))

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        return [
            RecordFunction((name,), (output,), partial(self._convert, rows), takes="values" if rows is None else "raw")
            for (name, output), rows in zip(self.pairs, self.rows, strict=True)
        ]

    def _convert(self, rows: int | None, values: Any) -> Sequence[Any]:
        items = flat_values(values)
        if rows is not None:
            for row, value in enumerate(items):
                # Not `isinstance`: True is an int.
                if type(value) is not int or not 0 <= value < rows:
                    raise InvalidValueError(row)
            items = np.array(items, dtype=np.int64)
        most = self.max_length
        if most is not None and isinstance(values, Ragged) and max(map(len, each(values)), default=0) > most:
            raise InvalidValueError(0)
        return (like_values(values, items),)


def accepted_id(rows: int) -> str:
    """Describe one of `rows` ids."""
    return f"an id, 0 <= id < {rows}"


SEPARATOR = "\x1f"
_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)


@register("cross")
@dataclass(frozen=True, kw_only=True)
class Cross(ColumnsOperator):
    r"""Several columns -> one text column: their values joined by ``"\x1f"``; a missing part is empty.

    Attributes:
        output: Name of the text column.
    """

    accepted: ClassVar[tuple[str, ...]] = ("text", "integer", "hex32")
    output: checks.ColumnName

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.columns) < 2:
            checks.fail(self, "columns", "at least two column names")

    @property
    @override
    def writes(self) -> tuple[str, ...]:
        return (self.output,)

    @override
    def output_types(self, types: ColumnTypes) -> ColumnTypes:
        for name in self.columns:
            if self.input_type(types, name).is_list:
                raise ConfigError(f"column {name!r}", f"holds {types[name]}, expected one value a row")
        return {self.output: ColumnType("text")}

    @override
    def transform(self, rows: Rows, state: State | None) -> Rows:
        arrays = [rows.columns[name] for name in self.columns]
        joined = pc.binary_join_element_wise(*map(_texts, arrays), pa.scalar(SEPARATOR, pa.large_string()))
        all_missing = np.logical_and.reduce(list(map(is_missing, arrays)))
        # A cross of missing parts is missing, and not the text of separators alone.
        if all_missing.any():
            joined = pc.if_else(pa.array(all_missing), pa.scalar(None, pa.large_string()), joined)
        return rows.with_columns({self.output: joined})

    @override
    def record_functions(self, types: ColumnTypes, state: State | None) -> Sequence[RecordFunction]:
        spell = [_SPELLINGS[types[name].kind] for name in self.columns]

        def call(*columns: list[Any]) -> Sequence[Any]:
            spelled = [[one(value) for value in values] for one, values in zip(spell, columns, strict=True)]
            return ([SEPARATOR.join(parts) if any(parts) else None for parts in zip(*spelled, strict=True)],)

        return [RecordFunction(self.columns, (self.output,), call)]


_SPELLINGS: Mapping[str, Callable[[Any], str]] = {
    "text": lambda text: text or "",
    "integer": lambda number: "" if number is None else str(number),
    "hex32": lambda digits: digits.lower().zfill(8) if digits else "",
}


def _texts(array: pa.Array) -> pa.LargeStringArray:
    """Return the values as text, "" where missing."""
    if kind_of(array) != "hex32":
        return array.cast(pa.large_string()).fill_null("")
    # (n, 8) characters: Arrow has no function that spells hexadecimal digits.
    digits = _DIGITS[(numpy_values(array)[:, None] >> _SHIFTS) & np.uint32(15)]
    offsets = np.arange(0, 8 * len(array) + 1, 8, dtype=np.int64)
    return texts_of(np.ascontiguousarray(digits).reshape(-1), offsets, null_mask(array)).fill_null("")
