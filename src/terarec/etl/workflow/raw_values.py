"""Raw values of records, as callers hold them -> columns; errors name the column, the record and what is accepted."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.cleaning import FIRST_SECOND, LAST_SECOND, SECONDS, Cleaning
from terarec.etl.columns import ColumnType, array_of, from_arrow, lists_of, without_empty
from terarec.etl.ops.record_values import checked_texts
from terarec.etl.ops.values import HEX_DIGITS
from terarec.kernels.cpu.encoding import numbers_of_list
from terarec.kernels.encoding_types import InvalidValueError
from terarec.spec import SourceColumn
from terarec.spec.quoting import quoted

RawValues: TypeAlias = Sequence[Any] | NDArray[Any] | pa.Array | pa.ChunkedArray
"""A column of raw values, None (Arrow: null) or ``""`` being missing; lists of them for a multi-hot column."""

SMALL_ROWS = 128
"""Up to so many rows, arrays are taken as lists: a call of an Arrow function costs as much as 100 to 200 values of a
list (Zen 3)."""


class RawColumn:
    """One column of n raw values.

    Attributes:
        name: of the raw column.
        values: a list, a NumPy array of numbers, or an Arrow array of more than `SMALL_ROWS` values.
        offsets: int64[records + 1], where the values of each record begin, for a flattened column of lists.
    """

    __slots__ = ("name", "offsets", "values")

    def __init__(self, name: str, values: RawValues, offsets: NDArray[np.int64] | None = None) -> None:
        self.name = name
        self.values = values if type(values) is list else _plain(name, values)
        self.offsets = offsets

    def __len__(self) -> int:
        """Number of values n."""
        return len(self.values)

    def flatten(self, hotness: int | None) -> tuple[RawColumn, NDArray[np.int64]]:
        """Return the values of a column of lists, and their offsets int64[n + 1]; a missing list is an empty one.

        Args:
            hotness: the longest list; None for any.

        Raises:
            ConfigError: not a column of lists, or a list of more than `hotness` values.
        """
        values = self.values
        accepted = "list" if hotness is None else f"list of at most {hotness} values"
        if isinstance(values, pa.Array):
            if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
                raise self.mistyped(accepted.replace("list", "lists", 1))
            lengths = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            flat: RawValues = values.flatten()
        else:
            lists = values.tolist() if isinstance(values, np.ndarray) else values
            listed = [_listed(item) for item in lists]
            if None in listed:
                raise self.refused(listed.index(None), f"a {accepted}")
            lengths = np.fromiter(map(len, listed), dtype=np.int64, count=len(listed))  # type: ignore[arg-type]
            flat = [value for item in listed for value in item or ()]
        if hotness is not None and lengths.size and lengths.max() > hotness:
            raise self.refused(int(np.argmax(lengths > hotness)), f"a {accepted}")
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return RawColumn(self.name, flat, offsets), offsets

    def refused(self, row: int, accepted: str) -> ConfigError:
        """Return the error for the value at position `row`; it names the record that holds it."""
        value = self.values[row]
        if isinstance(value, pa.Scalar):
            value = value.as_py()
        record = row if self.offsets is None else int(np.searchsorted(self.offsets, row, side="right")) - 1
        return ConfigError(f"column {self.name!r}, row {record}: got {quoted(value)}, expected {accepted}")

    def mistyped(self, accepted: str) -> ConfigError:
        """Return the error for a column of another type."""
        kind = self.values.type if isinstance(self.values, pa.Array) else getattr(self.values, "dtype", "list")
        return ConfigError(f"column {self.name!r}: got values of type {kind}, expected {accepted}")


def few_as_list(values: Any) -> Any:
    """A NumPy or Arrow array of at most `SMALL_ROWS` values as a list; anything else as it is."""
    if isinstance(values, pa.Array | pa.ChunkedArray | np.ndarray) and len(values) <= SMALL_ROWS:
        return values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
    return values


def _plain(name: str, values: Any) -> Any:
    values = few_as_list(values) if isinstance(values, pa.Array | pa.ChunkedArray) else values
    if isinstance(values, list):
        return values
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], type=values.type)
    if isinstance(values, pa.Array):
        if pa.types.is_dictionary(values.type):
            return values.dictionary_decode()
        return values.to_pylist() if pa.types.is_null(values.type) else values
    if isinstance(values, np.ndarray) and values.ndim >= 1:
        return values if values.dtype.kind in "iuf" and values.ndim == 1 else values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return list(values)
    raise ConfigError(f"column {name!r}: got {type(values).__name__}, expected a list, a NumPy array or an Arrow array")


def _listed(item: Any) -> Sequence[Any] | None:
    """A list as it is, () for a missing one, None for anything else."""
    if item is None:
        return ()
    if isinstance(item, np.ndarray):
        return list(item)
    return item if isinstance(item, list | tuple) else None


_ACCEPTED = {
    "number": "a finite number, or nothing where it is missing",
    "hex32": "up to 8 hexadecimal digits as text, or nothing where it is missing",
    "text": "text, or nothing where it is missing",
    "integer": "a 64-bit integer, or nothing where it is missing",
}


def read_array(
    name: str, values: RawValues, found: ColumnType, source: SourceColumn | None, cleaning: Cleaning
) -> pa.Array:
    """Return the Arrow array of n raw values.

    Args:
        name: of the column.
        values: see `RawValues`.
        found: the type that is wanted.
        source: how files spell the column: its separator cuts text into a list, its format reads times; None for one
            that is in no file.
        cleaning: what is done to texts first.

    Raises:
        ConfigError: a value of another type.
    """
    separator = source.separator if source is not None else None
    raw = _cleaned(RawColumn(name, values), cleaning)
    if not found.is_list:
        return _read(raw, found.kind, source)
    if separator is not None:
        raw = _cut_texts(raw, separator)
    flat, offsets = raw.flatten(found.max_length)
    return lists_of(_read(_cleaned(flat, cleaning), found.kind, source), offsets)


def _cleaned(raw: RawColumn, cleaning: Cleaning) -> RawColumn:
    values: Any = raw.values
    if not cleaning.is_needed:
        return raw
    if isinstance(values, list):
        return RawColumn(raw.name, cleaning.values(values), raw.offsets)
    if isinstance(values, pa.Array) and _is_text(values.type):
        return RawColumn(raw.name, cleaning.texts(values), raw.offsets)
    return raw


def _cut_texts(raw: RawColumn, separator: str) -> RawColumn:
    """`raw` with lists in the place of texts between whose values a separator stands."""
    values: Any = raw.values
    if isinstance(values, list):
        cut = [cut_text(value, separator) if isinstance(value, str) else value for value in values]
    elif isinstance(values, pa.Array) and _is_text(values.type):
        there = pc.if_else(pc.equal(values, ""), pa.scalar(None, values.type), values)
        cut = pc.split_pattern(there, separator)
    else:
        return raw
    return RawColumn(raw.name, cut)


def cut_text(text: str, separator: str) -> list[str]:
    """Return the list in a text with a separator between its values."""
    return text.split(separator) if text else []


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _read(raw: RawColumn, kind: str, source: SourceColumn | None) -> pa.Array:
    if kind == "number":
        return array_of(_numbers(raw))
    if kind == "text":
        return without_empty(_texts(raw))
    if kind == "hex32":
        return _read_each(raw, _hex, _ACCEPTED["hex32"], np.uint32)
    if source is not None and source.type == "time":
        accepted = SECONDS if source.format is None else f"a time such as {source.format!r} describes, or {SECONDS}"
        return _read_each(raw, time_reader(source.format), accepted, np.int64)
    if isinstance(raw.values, list):
        return _read_each(raw, _integer, _ACCEPTED["integer"], np.int64)
    return _integers(raw)


def _numbers(raw: RawColumn) -> NDArray[np.float64]:
    """float64[n], NaN where missing."""
    values = raw.values
    if isinstance(values, list):
        try:
            return numbers_of_list(values)
        except InvalidValueError as error:
            raise raw.refused(error.row, _ACCEPTED["number"]) from None
    if isinstance(values, pa.Array):
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise raw.mistyped(_ACCEPTED["number"])
        values = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    numbers: NDArray[np.float64] = np.ascontiguousarray(values, dtype=np.float64)
    infinite = np.isinf(numbers)
    if infinite.any():
        raise raw.refused(int(np.argmax(infinite)), _ACCEPTED["number"])
    return numbers


def _read_each(raw: RawColumn, read: Callable[[Any], int], accepted: str, dtype: Any) -> pa.Array:
    """Return the integers that `read` makes of Python values; it raises ValueError for a value it does not accept."""
    values = raw.values.to_pylist() if isinstance(raw.values, pa.Array) else raw.values
    integers = np.zeros(len(values), dtype=dtype)
    missing = np.zeros(len(values), dtype=np.bool_)
    for row, value in enumerate(values):
        if value is None or value == "" or value != value:  # NaN is what tables write for a missing integer
            missing[row] = True
            continue
        try:
            integers[row] = read(value)
        except ValueError:
            raise raw.refused(row, accepted) from None
    return array_of(integers, missing)


def _hex(value: Any) -> int:
    if not isinstance(value, str) or not HEX_DIGITS.fullmatch(value):
        raise ValueError
    return int(value, 16)


def _integer(value: Any) -> int:
    """An integer, or a float that is one, as tables with missing values hold them."""
    if isinstance(value, float | np.floating):
        number = float(value)
        if not (number.is_integer() and abs(number) < 2**53):
            raise ValueError
        return int(number)
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not -(2**63) <= int(value) < 2**63:
        raise ValueError
    return int(value)


def time_reader(form: str | None) -> Callable[[Any], int]:
    """Return the function that reads a time in this form, or in seconds; it raises ValueError for another value."""

    def read(value: Any) -> int:
        if form is None or not isinstance(value, str):
            seconds = _integer(value)
            if not FIRST_SECOND <= seconds <= LAST_SECOND:
                raise ValueError
            return seconds
        moment = datetime.datetime.strptime(value, form).replace(tzinfo=datetime.UTC)
        return int(moment.timestamp())

    return read


def _integers(raw: RawColumn) -> pa.Array:
    """Return the integers of a NumPy or Arrow column."""
    values: Any = raw.values
    floats = pa.types.is_floating(values.type) if isinstance(values, pa.Array) else values.dtype.kind == "f"
    if floats:
        return _read_each(raw, _integer, _ACCEPTED["integer"], np.int64)
    if not isinstance(values, pa.Array):
        values = pa.array(values)
    if not pa.types.is_integer(values.type):
        raise raw.mistyped(_ACCEPTED["integer"])
    if values.type == pa.uint64():
        most = pa.scalar(np.iinfo(np.int64).max, pa.uint64())
        beyond = pc.fill_null(pc.greater(values, most), False).to_numpy(zero_copy_only=False)
        if beyond.any():
            raise raw.refused(int(np.argmax(beyond)), _ACCEPTED["integer"])
    return from_arrow(values, "integer")


def _texts(raw: RawColumn) -> Any:
    values = raw.values
    if isinstance(values, list):
        try:
            return pa.array(checked_texts(values), type=pa.large_string())
        except InvalidValueError as error:
            raise raw.refused(error.row, _ACCEPTED["text"]) from None
    if not isinstance(values, pa.Array) or not _is_text(values.type):
        raise raw.mistyped(_ACCEPTED["text"])
    return pc.cast(values, pa.large_string())
