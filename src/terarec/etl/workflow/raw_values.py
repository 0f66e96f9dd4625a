# SPDX-License-Identifier: Apache-2.0
"""Raw values of records, as callers pass them -> columns; errors name the column, the record and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import (
    ColumnType,
    array_of,
    from_arrow,
    lists_of,
    null_mask,
    numbers_of,
    text_buffers,
    validity,
    without_empty,
    without_lowest,
)
from terarec.etl.ops.values import HEX_DIGITS, checked_texts
from terarec.etl.times import FIRST_SECOND, LAST_SECOND, MOMENTS, SECONDS, arrow_times, is_moment, read_time
from terarec.formats.arrays import is_list, is_number, plain_array, plain_column, plain_type, value_type
from terarec.formats.integers import accepted_integers, float_bound, integers_of_floats
from terarec.kernels.cpu.encoding import InvalidValueError, numbers_of_list, read_hex32
from terarec.ragged import Ragged, offsets_of
from terarec.spec import SourceColumn
from terarec.spec.checks import quoted
from terarec.spec.dataset import MISSING_KEY

RawValues: TypeAlias = Sequence[Any] | NDArray[Any] | pa.Array | pa.ChunkedArray
"""A column of raw values, None (Arrow: null) or ``""`` being missing; lists of them for a multi-hot column."""

SMALL_ROWS = 128
"""Up to this many rows arrays become lists: a call of an Arrow function costs as much as 100 to 200 values of a
list (Zen 3)."""


class _RejectedError(Exception):
    """Values of a column that are not accepted.

    Attributes:
        got: Values that were received.
        accepted: Accepted values.
        row: Position of the first such value; None for a column of another type.
    """

    def __init__(self, got: str, accepted: str, row: int | None = None) -> None:
        super().__init__(got, accepted, row)
        self.got, self.accepted, self.row = got, accepted, row


def _rejected(values: Any, row: int, accepted: str) -> _RejectedError:
    """Return the error for the value at position `row`."""
    return _RejectedError(quoted(_python_value(values[row])), accepted, row)


def _python_value(value: Any) -> Any:
    if isinstance(value, pa.Scalar):
        # Python has no times of other years than 1 to 9999, and without pandas none of nanoseconds.
        return (value.cast(pa.string()) if pa.types.is_temporal(value.type) else value).as_py()
    return value


def _mistyped(values: Any, accepted: str) -> _RejectedError:
    """Return the error for a column of another type."""
    kind = values.type if isinstance(values, pa.Array) else getattr(values, "dtype", "list")
    return _RejectedError(f"values of type {kind}", accepted)


def few_as_list(values: Any) -> Any:
    """Return a NumPy or Arrow array of at most `SMALL_ROWS` values as a list; anything else unchanged.

    Floats that their type holds only rounded, which are no ids, keep it; so do times.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray | np.ndarray) and len(values) <= SMALL_ROWS:
        return values if are_rounded(values) or _are_times(values) else as_list(values)
    return values


def _are_times(values: pa.Array | pa.ChunkedArray | NDArray[Any]) -> bool:
    """Return whether the values are times: lists hold those of the years 1 to 9999 alone, and NumPy's as integers."""
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "mM"
    return bool(pa.types.is_temporal(value_type(plain_type(values.type))))


def as_list(values: Any) -> Any:
    """Return a NumPy or Arrow array as a list; anything else unchanged."""
    if isinstance(values, np.ndarray):
        return values.tolist()
    return values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else values


def fault_of_array(values: pa.Array | pa.ChunkedArray) -> str | None:
    """Return what is wrong with an Arrow array, such as text that is not UTF-8; None for a valid one."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error).splitlines()[0]
    return None


def are_rounded(values: pa.Array | pa.ChunkedArray | NDArray[Any]) -> bool:
    """Return whether some of the values are integers from the bound of a float type below float64 on."""
    if isinstance(values, np.ndarray):
        floats = values
    else:
        arrow_type = value_type(plain_type(values.type))
        if not pa.types.is_floating(arrow_type) or arrow_type == pa.float64():
            return False
        floats = _flat(values).to_numpy(zero_copy_only=False)
    is_narrow = floats.dtype.kind == "f" and floats.itemsize < np.dtype(np.float64).itemsize
    # The comparison is false for NaN, which is missing.
    return is_narrow and bool((np.abs(floats) >= float_bound(floats.dtype)).any())


def _flat(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the values of an Arrow array and of its lists."""
    values = _in_one_piece(values)
    while is_list(values.type):
        values = values.flatten()
    return values


def _in_one_piece(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a plain array of values; see `plain_array`."""
    if isinstance(values, pa.Array):
        return plain_array(values)
    column = plain_column(values)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)


def one_column(values: Any) -> Any:
    """Return a NumPy array [n, 1] as [n]; anything else unchanged."""
    is_column = isinstance(values, np.ndarray) and values.ndim == 2 and values.shape[1] == 1
    return values[:, 0] if is_column else values


def _times_of_numpy(values: NDArray[Any]) -> pa.Array:
    """Return a NumPy array [n] of times or durations as one of Arrow, which has fewer units."""
    unit = np.datetime_data(values.dtype)[0]
    return pa.array(values if unit in ("s", "ms", "us", "ns") else values.astype(f"{values.dtype.kind}8[s]"))


def as_seconds(values: Any, where: str) -> Any:
    """Return an array [n] of times as seconds since 1970, None where missing; anything else unchanged.

    Raises:
        ConfigError: A time of other years than 1 to 9999, or durations.
    """
    if isinstance(values, np.ndarray) and values.ndim == 1 and _are_times(values):
        values = _times_of_numpy(values)
    if not (isinstance(values, pa.Array | pa.ChunkedArray) and _are_times(values)):
        return values
    array = _in_one_piece(values)
    if not is_moment(array.type):
        raise ConfigError(where, f"got values of type {array.type}, expected {SECONDS}")
    times = arrow_times(array)
    if times.bad.any():
        row = int(times.bad.argmax())
        raise ConfigError(f"{where}, row {row}", f"got {quoted(_python_value(array[row]))}, expected {MOMENTS}")
    return array_of(times.seconds, null_mask(array)).to_pylist()


def _plain(values: Any) -> Any:
    """Return values as a list, a NumPy array of numbers, or an Arrow array of times or of more than `SMALL_ROWS`."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and _are_times(values):
        values = _times_of_numpy(values)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        if (fault := fault_of_array(values)) is not None:
            raise _RejectedError(f"values of type {values.type} ({fault})", "valid ones, with text in UTF-8")
        values = few_as_list(values)
    if isinstance(values, list):
        return values
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = _in_one_piece(values)
        # A column of nulls has no type of its own: each reader takes None.
        return values.to_pylist() if pa.types.is_null(values.type) else values
    if isinstance(values, np.ndarray) and values.ndim >= 1:
        # Arrays of objects, texts or booleans are read value by value, as lists are.
        if values.dtype.kind in "iuf" and values.ndim == 1:
            return values
        # Rows of rounded floats and of times keep their type.
        keeps_type = values.ndim > 1 and (are_rounded(values) or _are_times(values))
        return list(values) if keeps_type else values.tolist()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return list(values)
    raise _RejectedError(type(values).__name__, "a list, a NumPy array or an Arrow array")


def _flattened(values: Any, max_length: int | None) -> Ragged[Any, NDArray[np.int64]]:
    """Return a column of lists as `Ragged`; a missing list is an empty one."""
    accepted = "list" if max_length is None else f"list of at most {max_length} values"
    if isinstance(values, pa.Array):
        if not is_list(values.type):
            raise _mistyped(values, accepted.replace("list", "lists", 1))
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = values.flatten()
    else:
        listed = [_listed(item) for item in (values.tolist() if isinstance(values, np.ndarray) else values)]
        if None in listed:
            raise _rejected(values, listed.index(None), f"a {accepted}")
        lengths = np.fromiter(map(len, listed), dtype=np.int64, count=len(listed))  # type: ignore[arg-type]
        flat = [value for item in listed for value in item or ()]
    if max_length is not None and lengths.size and lengths.max() > max_length:
        raise _rejected(values, int(np.argmax(lengths > max_length)), f"a {accepted}")
    return Ragged(flat, offsets_of(lengths))


def _listed(item: Any) -> Sequence[Any] | None:
    """Return a list unchanged, () for a missing one, None for anything else."""
    if item is None or (isinstance(item, float) and math.isnan(item)):
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


def read_raw_values(
    name: str, values: RawValues, column_type: ColumnType, source: SourceColumn | None, cleaning: Cleaning
) -> pa.Array:
    """Return the Arrow array of n raw values.

    Args:
        name: Name of the column.
        values: Values as a caller gives them; see `RawValues`.
        column_type: Type of the result.
        source: Description of the column in files: its separator cuts text into a list, its format reads times; None
            for a column that is in no file.
        cleaning: Cleaning of texts.
    """
    offsets: NDArray[np.int64] | None = None
    try:
        plain = _cleaned(_plain(values if column_type.is_list else one_column(values)), cleaning)
        if column_type.is_list:
            plain = _without_nan(plain)
            if source is not None and source.separator is not None:
                plain = _cut_texts(plain, source.separator)
            items, offsets = _flattened(plain, column_type.max_length)
            plain = _cleaned(_plain(items), cleaning)
        read = _read(plain, column_type.kind, source)
        if column_type.kind == "integer" and (source is None or source.type != "time"):
            read = without_lowest(read)
        elif column_type.kind == "number" and source is not None and source.type == "integer":
            numbers = numbers_of(read)
            lowest = numbers == MISSING_KEY
            # Larger integers may be rounded to it.
            lowest[lowest] = [_python_value(plain[row]) == MISSING_KEY for row in np.flatnonzero(lowest).tolist()]
            read = array_of(np.where(lowest, np.nan, numbers))
    except _RejectedError as error:
        where = f"column {name!r}"
        if error.row is not None:
            record = error.row if offsets is None else int(np.searchsorted(offsets, error.row, side="right")) - 1
            where += f", row {record}"
        raise ConfigError(where, f"got {error.got}, expected {error.accepted}") from None
    return read if offsets is None else lists_of(read, offsets)


def _cleaned(values: Any, cleaning: Cleaning) -> Any:
    if not cleaning.is_needed:
        return values
    if isinstance(values, list):
        return cleaning.values(values)
    return cleaning.texts(values) if isinstance(values, pa.Array) and _is_text(values.type) else values


def _cut_texts(values: Any, separator: str) -> Any:
    """Split texts at the separator into lists."""
    if isinstance(values, list):
        return [cut_text(value, separator) if isinstance(value, str) else value for value in values]
    if isinstance(values, pa.Array) and _is_text(values.type):
        there = pc.if_else(pc.equal(values, ""), pa.scalar(None, values.type), values)
        return pc.split_pattern(there, separator)
    return values


def cut_text(text: str, separator: str) -> list[str]:
    """Return the list in a text with a separator between its values."""
    return text.split(separator) if text else []


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _without_nan(values: Any) -> Any:
    """Return values that are no numbers, of which NaN is a missing one, as tables write it."""
    if isinstance(values, list):
        return [None if isinstance(value, float) and math.isnan(value) else value for value in values]
    if isinstance(values, np.ndarray):
        is_missing = values.dtype.kind == "f" and bool(np.isnan(values).all())
    else:
        is_missing = values.null_count == len(values) or bool(
            pa.types.is_floating(values.type) and pc.all(pc.is_null(values, nan_is_null=True)).as_py()
        )
    return [None] * len(values) if is_missing else values


def _read(values: Any, kind: str, source: SourceColumn | None) -> pa.Array:
    if kind == "number" and not isinstance(values, pa.Array):
        return array_of(_numbers(values))
    values = _without_nan(values)
    if kind == "number":
        return array_of(_numbers(values))
    if kind == "text":
        return without_empty(_texts(values))
    if isinstance(values, pa.Array) and pa.types.is_temporal(values.type):
        return _seconds(values, kind, source)
    if kind == "hex32":
        return _digits(values)
    if source is not None and source.type == "time":
        accepted = SECONDS if source.format is None else f"a time such as {source.format!r} describes, or {SECONDS}"
        return _read_each(values, time_reader(source.format), accepted, np.int64)
    if isinstance(values, list):
        return _read_each(values, _integer, _ACCEPTED["integer"], np.int64)
    return _integers(values)


def _numbers(values: Any) -> NDArray[np.float64]:
    """Return float64[n], NaN where missing."""
    if isinstance(values, list):
        try:
            return numbers_of_list(values)
        except InvalidValueError as error:
            raise _rejected(values, error.row, _ACCEPTED["number"]) from None
    if isinstance(values, pa.Array) and not is_number(values.type):
        raise _mistyped(values, _ACCEPTED["number"])
    is_array = isinstance(values, pa.Array)
    # Integers of more than 53 bits are rounded, as files of numbers are.
    array = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) if is_array else values
    numbers: NDArray[np.float64] = np.ascontiguousarray(array, dtype=np.float64)
    infinite = np.isinf(numbers)
    if infinite.any():
        raise _rejected(values, int(np.argmax(infinite)), _ACCEPTED["number"])
    return numbers


def _read_each(values: Any, read: Callable[[Any], int], accepted: str, dtype: Any) -> pa.Array:
    """Return the results of `read` for Python values, as integers; it raises ValueError for an invalid value."""
    if isinstance(values, pa.Array):
        # Floats as NumPy's, which keep their type.
        is_float = pa.types.is_floating(values.type)
        values = values.to_numpy(zero_copy_only=False) if is_float else values.to_pylist()
    integers = np.zeros(len(values), dtype=dtype)
    missing = np.zeros(len(values), dtype=np.bool_)
    for row, value in enumerate(values):
        if value is None or value == "" or value != value:  # NaN is what tables write for a missing integer
            missing[row] = True
            continue
        try:
            integers[row] = read(value)
        except ValueError:
            raise _rejected(values, row, accepted) from None
    return array_of(integers, missing)


def _seconds(values: pa.Array, kind: str, source: SourceColumn | None) -> pa.Array:
    """Return the seconds of times of Arrow."""
    if source is None or source.type != "time" or not is_moment(values.type):
        raise _mistyped(values, _ACCEPTED[kind])
    times = arrow_times(values)
    if times.bad.any():
        row = int(np.argmax(times.bad))
        raise _RejectedError(str(values[row].cast(pa.string())), MOMENTS, row)
    return array_of(times.seconds, values.is_null().to_numpy(zero_copy_only=False))


def _digits(values: Any) -> pa.Array:
    """Return the numbers of hexadecimal digits."""
    if not isinstance(values, pa.Array) or not _is_text(values.type):
        return _read_each(values, _hex, _ACCEPTED["hex32"], np.uint32)
    texts = pc.cast(values, pa.large_string())
    try:
        return array_of(*read_hex32(*text_buffers(texts), validity(texts)))
    except InvalidValueError as error:
        raise _rejected(values, error.row, _ACCEPTED["hex32"]) from None


def _hex(value: Any) -> int:
    if not isinstance(value, str) or not HEX_DIGITS.fullmatch(value):
        raise ValueError
    return int(value, 16)


_FLOAT64_BOUND = float_bound(np.dtype(np.float64))


def _integer(value: Any) -> int:
    """Return an integer, or a float that is one, as tables with missing values hold them."""
    if isinstance(value, float | np.floating):
        number = float(value)
        bound = float_bound(value.dtype) if isinstance(value, np.floating) else _FLOAT64_BOUND
        if not (number.is_integer() and abs(number) < bound):
            raise ValueError
        return int(number)
    # True is an int in Python.
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
        return read_time(value, form)[0]

    return read


def _integers(values: Any) -> pa.Array:
    """Return the integers of a NumPy or Arrow column."""
    floats = pa.types.is_floating(values.type) if isinstance(values, pa.Array) else values.dtype.kind == "f"
    if floats:
        array = values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values
        integers, bad = integers_of_floats(array)
        if bad.any():
            accepted = f"{accepted_integers(array.dtype)}, or nothing where it is missing"
            raise _rejected(values, int(np.argmax(bad)), accepted)
        return array_of(integers, np.isnan(array))
    if not isinstance(values, pa.Array):
        values = pa.array(values)
    if not pa.types.is_integer(values.type):
        raise _mistyped(values, _ACCEPTED["integer"])
    if values.type == pa.uint64():
        most = pa.scalar(np.iinfo(np.int64).max, pa.uint64())
        beyond = pc.fill_null(pc.greater(values, most), False).to_numpy(zero_copy_only=False)
        if beyond.any():
            raise _rejected(values, int(np.argmax(beyond)), _ACCEPTED["integer"])
    return from_arrow(values, "integer")


def _texts(values: Any) -> Any:
    if isinstance(values, list):
        try:
            return pa.array(checked_texts(values), type=pa.large_string())
        except InvalidValueError as error:
            raise _rejected(values, error.row, _ACCEPTED["text"]) from None
    if not isinstance(values, pa.Array) or not _is_text(values.type):
        raise _mistyped(values, _ACCEPTED["text"])
    return pc.cast(values, pa.large_string())
