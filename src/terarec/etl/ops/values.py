# SPDX-License-Identifier: Apache-2.0
"""Values of columns as operators take them: their hashes, rejected ones, and the values of a few records.

The values of a few records are in no Arrow arrays, which would cost more than the work itself. n values are, by kind:

* number: float64[n], NaN being missing
* integer: a list of int, None being missing
* text: a list of str, None and "" being missing
* hex32: a list of 1 to 8 hexadecimal digits each, None and "" being missing
* id: int64[n]

and `terarec.ragged.Ragged` of m of them where a row holds a list.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError
from terarec.etl.columns import (
    ARROW_TYPES,
    DTYPES,
    REJECTED_SHOWN,
    ColumnType,
    Kind,
    RowFaultError,
    Rows,
    array_of,
    flat,
    from_arrow,
    ids_as_integers,
    is_list,
    kind_of,
    list_offsets,
    numbers_of,
    numpy_values,
    text_buffers,
)
from terarec.kernels.cpu.encoding import InvalidValueError, numbers_of_list, xxh64_int64, xxh64_text
from terarec.ragged import Ragged
from terarec.spec.checks import quoted

ValueType = Literal["text", "integer", "number", "hex32"]
"""Types of values that an operator makes."""
HEX_DIGITS = re.compile(r"[0-9a-fA-F]{1,8}", re.ASCII)
"""Form of a hex32."""


def rejected(rows: Rows, name: str, wrong: NDArray[np.bool_], accepted: str) -> RowFaultError:
    """Return the error for the `wrong` values, bool[m], of the m values of column `name`, which should be `accepted`.

    At least one of them is.
    """
    array = rows.columns[name]
    values, offsets = ids_as_integers(flat(array)), list_offsets(array)
    items = places = np.flatnonzero(wrong)
    if offsets is not None:
        # One fault a row, of the first wrong item of its list, as sources report bad items.
        places, first = np.unique(np.searchsorted(offsets, items, side="right") - 1, return_index=True)
        items = items[first]
    samples = values.take(array_of(items[:REJECTED_SHOWN])).to_pylist()
    if kind_of(values) == "number":
        # A missing number has no text of its own in messages: it is NaN, as in NumPy.
        samples = [math.nan if value is None else value for value in samples]
    got = [f"got {quoted(value)}" for value in samples]
    return RowFaultError(name, rows.ids[places], got, accepted)


def accepted_list(max_length: int) -> str:
    """Describe the accepted length of a list."""
    return f"at most {max_length} items"


def hashes_of(array: pa.Array, seed: int) -> NDArray[np.int64]:
    """Compute hashes int64[m] of m values that are not numbers, as in docs/workflows.md; a null gets any."""
    values = flat(array)
    if kind_of(values) == "text":
        return xxh64_text(*text_buffers(values), seed)
    # A hex32 hashes like its number, which records have as well.
    return xxh64_int64(numpy_values(values).astype(np.int64, copy=False), seed)


ValueLists = Ragged[Any, Sequence[int]]
"""Lists of the values of a few records."""


def each(lists: ValueLists) -> list[Any]:
    """Return the n lists."""
    return [lists.values[begin:end] for begin, end in pairwise(lists.offsets)]


class RecordFunction(NamedTuple):
    """A function from some columns of a few records to others. It raises `InvalidValueError` for a value it rejects.

    Attributes:
        reads: Inputs.
        writes: Outputs.
        call: Function of one argument for each input that returns a sequence of one item for each output. A matrix of
            numbers is one float64[c, n], a row for each column.
        takes: "values"; "raw" values, as a caller provided them, whose kind it checks itself: a list, or many texts,
            hexadecimal digits or integers in an Arrow array; or numbers and integers, one a row, as a "matrix".
        gives: "values" or a "matrix".
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    call: Callable[..., Any]
    takes: Literal["values", "raw", "matrix"] = "values"
    gives: Literal["values", "matrix"] = "values"


def item_function(
    name: str, output: str, call: Callable[[Any], Any], *, is_list: bool, takes: Literal["values", "raw"] = "values"
) -> RecordFunction:
    """Return the function that applies `call` to the values of one column, item by item where these are lists."""

    def of_values(values: Any) -> Sequence[Any]:
        return (call(values),)

    def of_lists(lists: ValueLists) -> Sequence[Any]:
        return (Ragged(call(lists.values), lists.offsets),)

    return RecordFunction((name,), (output,), of_lists if is_list else of_values, takes)


def as_numbers(values: Any) -> Any:
    """Return numbers or integers as float64[n], NaN where missing."""
    return numbers_of_list(values, whole=True) if isinstance(values, list) else values


def checked_integers(values: list[Any]) -> list[Any]:
    """Return `values` if they are 64-bit integers and None; else raise `InvalidValueError`."""
    numbers_of_list(values, whole=True)
    return values


def checked_texts(values: list[Any]) -> list[Any]:
    """Return `values` if they are texts and None; raise `InvalidValueError` for others and for lone surrogates."""
    for row, value in enumerate(values):
        # Most texts are ASCII, which needs no trial of encoding.
        if value is not None and not (isinstance(value, str) and (value.isascii() or is_utf8(value))):
            raise InvalidValueError(row)
    return values


def is_utf8(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def joined(lists: Sequence[Sequence[Any]], kind: Kind) -> ValueLists:
    """Return lists of values of a kind as `Ragged`."""
    offsets: list[int] = [0]
    items: list[Any] = []
    for values in lists:
        items.extend(values)
        offsets.append(len(items))
    return Ragged(np.array(items, dtype=DTYPES[kind]) if kind in ("number", "id") else items, offsets)


def values_of_array(array: pa.Array) -> Any:
    """Return the values of an array."""
    values, offsets = _values_of_flat(flat(array)), list_offsets(array)
    return values if offsets is None else Ragged(values, offsets.tolist())


def _values_of_flat(array: pa.Array) -> Any:
    kind = kind_of(array)
    if kind == "number":
        return numbers_of(array)
    if kind == "id":
        return numpy_values(array)
    values = array.to_pylist()
    return [None if value is None else f"{value:08x}" for value in values] if kind == "hex32" else values


def arrow_of_values(values: Any, kind: Kind) -> pa.Array:
    """Return an Arrow array of the type of `kind`, or a large_list of it; missing values are null."""
    if isinstance(values, Ragged):
        offsets = pa.array(values.offsets, type=pa.int64())
        return pa.LargeListArray.from_arrays(offsets, arrow_of_values(values.values, kind))
    spelled = values if isinstance(values, np.ndarray) else python_of_values(values, kind)
    value_type = pa.int64() if kind == "id" else ARROW_TYPES[kind]
    # `from_pandas` makes NaN null.
    return pa.array(spelled, type=value_type, from_pandas=True)


def python_of_values(values: Any, kind: Kind) -> list[Any]:
    """Return Python values: None for all missing ones, hex32 as int, lists as lists."""
    if isinstance(values, Ragged):
        return each(Ragged(python_of_values(values.values, kind), values.offsets))
    if kind == "text":
        return [text or None for text in values]
    if kind == "hex32":
        return [int(digits, 16) if digits else None for digits in values]
    if kind == "number":
        return [None if math.isnan(number) else number for number in values.tolist()]
    return values if isinstance(values, list) else values.tolist()


def values_of_python(values: list[Any], kind: Kind) -> Any:
    """Return the values that `python_of_values` makes such Python values of, which are not lists."""
    if kind == "number":
        return numbers_of_list(values)
    if kind == "text":
        return checked_texts(values)
    checked_integers(values)
    if kind != "hex32":
        return values
    for row, value in enumerate(values):
        if value is not None and not 0 <= value < 2**32:
            raise InvalidValueError(row)
    return [None if value is None else f"{value:08x}" for value in values]


def result_array(where: str, array: object, expected: ColumnType, num_rows: int) -> pa.Array:
    """Return an array that user code returned as that of its kind.

    Raises:
        ConfigError: It is not an array of `num_rows` values of the `expected` type; begins with `where`.
    """
    if not isinstance(array, pa.Array | pa.ChunkedArray) or len(array) != num_rows:
        shown = f"{len(array)} values" if isinstance(array, pa.Array | pa.ChunkedArray) else type(array).__name__
        raise ConfigError(where, f"returned {shown}, expected an Arrow array of {num_rows} values")
    try:
        result = from_arrow(array, expected.kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ConfigError(where, f"returned {array.type}, expected values of {expected.kind}") from None
    if is_list(result) is not expected.is_list:
        each = "lists" if expected.is_list else "one value a row"
        raise ConfigError(where, f"returned {array.type}, expected {each}")
    if expected.kind == "number" and np.isinf(numbers_of(result)).any():
        raise ConfigError(where, "returned an infinite number, expected finite ones or null")
    if expected.kind == "id" and flat(result).null_count:
        raise ConfigError(where, "returned null, expected ids, of which 0 is that of a missing value")
    return result
