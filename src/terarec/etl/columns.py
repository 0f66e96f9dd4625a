# SPDX-License-Identifier: Apache-2.0
"""Rows of Arrow arrays, which sources, operators and sinks exchange; NumPy views of the arrays.

A missing value is null. The values of each kind have one Arrow type (`ARROW_TYPES`): texts are never empty, numbers are
never NaN, ids are never null, since id 0 is that of a missing value. A row may hold a large_list of values; a missing
list is an empty one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.arrays import items_type, plain_array
from terarec.formats.integers import accepted_integers, integers_of_floats
from terarec.kernels.cpu.delimited import ARROW_TYPES as PARSED_TYPES
from terarec.kernels.cpu.encoding import nulls_hold
from terarec.ragged import offsets_of
from terarec.spec.dataset import MISSING_KEY

REJECTED_SHOWN = 10
"""Largest number of rejected values in an error."""


class RowFaultError(FormatError):
    """A value of some rows is invalid. A caller that knows the source of the rows adds their places.

    Attributes:
        column: Column of the values; None where a row is invalid as a whole.
        rows: int64[k], the ids of these rows, rising.
        got: Values of the first `REJECTED_SHOWN` of them.
        expected: Accepted values.
        kind: One word for the kind of fault.
    """

    def __init__(
        self, column: str | None, rows: NDArray[np.int64], got: Sequence[str], expected: str, *, kind: str = "rejected"
    ) -> None:
        place = "" if column is None else f"column {column!r}, "
        super().__init__(f"{place}row {rows[0]}", f"{got[0]}, expected {expected}")
        self.column = column
        self.rows = rows
        self.got = tuple(got[:REJECTED_SHOWN])
        self.expected = expected
        self.kind = kind


class IdType(pa.ExtensionType):  # type: ignore[misc]
    """Arrow type of ids: int64 or int32, where 0 is the id of a missing value."""

    def __init__(self, storage: pa.DataType | None = None) -> None:
        super().__init__(pa.int64() if storage is None else storage, "terarec.id")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> IdType:
        return cls(storage_type)

    def __hash__(self) -> int:
        return hash(self.storage_type)


pa.register_extension_type(IdType())

Kind: TypeAlias = Literal["text", "integer", "number", "hex32", "id"]

ARROW_TYPES: Mapping[Kind, pa.DataType] = {**cast(Mapping[Kind, pa.DataType], PARSED_TYPES), "id": IdType()}
"""Arrow type of the values of each kind; ids may also be int32."""

DTYPES: Mapping[str, type[np.generic]] = {
    "number": np.float64,
    "integer": np.int64,
    "hex32": np.uint32,
    "id": np.int64,
}
"""NumPy type of the values of each kind but text; ids may also be int32."""

_KINDS: Mapping[type[pa.Array], Kind] = {
    pa.LargeStringArray: "text",
    pa.Int64Array: "integer",
    pa.DoubleArray: "number",
    pa.UInt32Array: "hex32",
    pa.ExtensionArray: "id",
}
"""Class of an array -> kind of its values; to look a type up takes Arrow 2 us, as much as a view."""
_TYPES: Mapping[tuple[np.dtype[Any], bool], pa.DataType] = {
    (np.dtype(np.float64), False): pa.float64(),
    (np.dtype(np.int64), False): pa.int64(),
    (np.dtype(np.uint32), False): pa.uint32(),
    (np.dtype(np.int64), True): IdType(),
    (np.dtype(np.int32), True): IdType(pa.int32()),
}
"""NumPy type, and whether values are ids -> Arrow type."""
_DTYPES: Mapping[type[pa.Array], np.dtype[Any]] = {
    pa.Int32Array: np.dtype(np.int32),
    **{array: np.dtype(DTYPES[kind]) for array, kind in _KINDS.items() if kind in ("number", "integer", "hex32")},
}


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column.

    Attributes:
        kind: Kind of the values.
        is_list: Whether a row holds a list of them.
        max_length: The longest list; None for no bound.
    """

    kind: Kind
    is_list: bool = False
    max_length: int | None = None

    def __str__(self) -> str:
        return f"lists of {self.kind}" if self.is_list else self.kind


def kind_of(array: pa.Array) -> Kind:
    """Return the kind of the values of an array or of its lists."""
    return _KINDS[type(array.values if is_list(array) else array)]


def is_list(array: pa.Array) -> bool:
    """Return whether each row holds a list."""
    return isinstance(array, pa.LargeListArray)


# Arrays from NumPy: the buffers are shared, not copied.
def array_of(values: NDArray[Any], missing: NDArray[np.bool_] | None = None, *, are_ids: bool = False) -> pa.Array:
    """Return an Arrow array of ``values[m]`` that shares their memory.

    Args:
        values: float64, int64 or uint32, for ids int64 or int32, contiguous. Numbers are missing where they are NaN.
        missing: Values that are missing, bool[m]; None for none of them.
        are_ids: Whether they are ids.
    """
    if values.dtype == np.float64:
        missing = np.isnan(values)
    nulls = 0 if missing is None else np.count_nonzero(missing)
    # Arrow sets the bit of a value that is there, and takes no bitmap where none is null.
    validity = pa.py_buffer(np.packbits(~missing, bitorder="little")) if missing is not None and nulls else None
    buffers = [validity, pa.py_buffer(values)]
    return pa.Array.from_buffers(_TYPES[values.dtype, are_ids], len(values), buffers, nulls)


def number_arrays(rows: NDArray[np.float64]) -> list[pa.Array]:
    """Return `array_of` each row of a contiguous matrix float64[c, n], all of which share its memory."""
    # `min` is NaN if any number is: one pass, and no mask.
    if not rows.size or np.isnan(rows.min()):
        return [array_of(values) for values in rows]
    # Slices of one array take a quarter of the time of arrays.
    count = rows.shape[1]
    every = pa.Array.from_buffers(pa.float64(), rows.size, [None, pa.py_buffer(rows)], 0)
    return [every.slice(first, count) for first in range(0, rows.size, count)]


def texts_of(
    text: NDArray[np.uint8], offsets: NDArray[np.int64], missing: NDArray[np.bool_] | None = None
) -> pa.LargeStringArray:
    """Return m texts that share the memory of their bytes and their offsets, int64[m + 1].

    Args:
        text: UTF-8 of all texts.
        offsets: Position in `text` at which each begins.
        missing: Texts that are missing, bool[m]; None for none of them.
    """
    validity = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(text), validity)


def lists_of(items: pa.Array, offsets: NDArray[np.int64]) -> pa.LargeListArray:
    """Return n lists of m items; list i begins at ``offsets int64[n + 1][i]``."""
    return pa.LargeListArray.from_arrays(array_of(offsets), items)


def like(array: pa.Array, values: pa.Array) -> pa.Array:
    """Return m `values` in the lists of `array`, or unchanged if it has none."""
    offsets = list_offsets(array)
    return values if offsets is None else lists_of(values, offsets)


def missing_values(column_type: ColumnType, count: int) -> pa.Array:
    """Return `count` missing values; of lists, empty ones."""
    if column_type.is_list:
        return lists_of(missing_values(ColumnType(column_type.kind), 0), np.zeros(count + 1, dtype=np.int64))
    return pa.nulls(count, ARROW_TYPES[column_type.kind])


def from_arrow(array: pa.Array | pa.ChunkedArray, kind: Kind) -> pa.Array:
    """Return the array of `kind` of any Arrow array whose values cast to it without loss.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError: Values of another type.
    """
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type)
    array = plain_array(array)
    if items_type(array.type)[1]:
        # `flatten` leaves out items under null lists, so these lists count as empty.
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        return lists_of(from_arrow(array.flatten(), kind), offsets_of(lengths))
    if isinstance(array.type, IdType):
        array = array.storage
    if pa.types.is_floating(array.type) and kind in ("integer", "id", "hex32"):
        floats = array.to_numpy(zero_copy_only=False)
        integers, bad = integers_of_floats(floats)
        if bad.any():
            raise pa.ArrowInvalid(f"got {floats[bad][0]}, expected {accepted_integers(floats.dtype)}")
        array = array_of(integers, np.isnan(floats))
    values = array.cast(pa.int64() if kind == "id" else ARROW_TYPES[kind])
    if kind == "text":
        return without_empty(values)
    if kind == "number":
        return array_of(numbers_of(values))
    return pa.ExtensionArray.from_storage(IdType(), values) if kind == "id" else values


def without_empty(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return texts with null in place of empty ones."""
    empty = np.equal(_text_lengths(texts), 0)
    # `_text_lengths` is 0 for a null: equal counts mean that all empty texts are null already.
    if np.count_nonzero(empty) == texts.null_count:
        return texts
    return pc.if_else(pa.array(empty), pa.scalar(None, pa.large_string()), texts)


def without_lowest(integers: pa.Array) -> pa.Array:
    """Return integers, or lists of them, with null in place of the lowest int64.

    It stands for a missing value in tensors, which have no null, and where NumPy makes an integer of NaN.
    """
    items = flat(integers)
    values = numpy_values(items)
    is_lowest = values == MISSING_KEY
    if not is_lowest.any():
        return integers
    return like(integers, array_of(np.where(is_lowest, 0, values), is_lowest | is_missing(items)))


# NumPy views of arrays.
def flat(array: pa.Array) -> pa.Array:
    """Return the m values of an array without their lists."""
    return array.flatten() if is_list(array) else array


def list_offsets(array: pa.Array) -> NDArray[np.int64] | None:
    """Return where each list begins among the values of `flat`, int64[n + 1] from 0; None for one value a row."""
    if not is_list(array):
        return None
    offsets: NDArray[np.int64] = array.offsets.to_numpy()
    # The offsets of a slice still count from the first list of the whole array, its flattened values do not.
    return offsets - offsets[0] if offsets[0] else offsets


def list_lengths(array: pa.LargeListArray) -> NDArray[np.int64]:
    """Return the lengths of the lists, int64[n]."""
    lengths: NDArray[np.int64] = np.diff(array.offsets.to_numpy())
    return lengths


def numpy_values(array: pa.Array) -> NDArray[Any]:
    """Return the numbers, integers or ids of an array without lists, as a view; values under nulls are undefined.

    They are float64, int64, uint32 (hex32), or for ids int64 or int32.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    dtype, count = _DTYPES[type(array)], len(array)
    if not count:  # whose buffer Arrow may leave out
        return np.empty(0, dtype=dtype)
    # Two thirds of the time of `to_numpy`, which counts where blocks have dozens of columns.
    return np.frombuffer(array.buffers()[1], dtype, count, array.offset * dtype.itemsize)


def validity(array: pa.Array) -> NDArray[np.uint8] | None:
    """Return the validity bitmap of an array without lists, a bit for each value; None if none is null."""
    if not array.null_count:
        return None
    bits, offset = np.frombuffer(array.buffers()[0], dtype=np.uint8), array.offset
    if not offset:
        return bits
    if offset % 8 == 0:
        return bits[offset // 8 :]
    # A slice may begin inside a byte, the kernels take bitmaps that begin with one.
    return np.packbits(np.unpackbits(bits, bitorder="little")[offset:], bitorder="little")


def null_mask(array: pa.Array) -> NDArray[np.bool_] | None:
    """Return which values of an array without lists are null, bool[m]; None if none is."""
    if not array.null_count:
        return None
    bits = ~np.frombuffer(array.buffers()[0], dtype=np.uint8)
    return np.unpackbits(bits, bitorder="little", count=array.offset + len(array))[array.offset :].view(np.bool_)


def is_missing(array: pa.Array) -> NDArray[np.bool_]:
    """Return which of the m values are missing, bool[m]; of ids none is."""
    values = flat(array)
    mask = null_mask(values)
    return np.zeros(len(values), dtype=np.bool_) if mask is None else mask


def numbers_of(array: pa.Array) -> NDArray[np.float64]:
    """Return the m numbers, integers or ids as float64, NaN where missing; may share the array's memory."""
    items = flat(array)
    if kind_of(items) == "number":
        return filled(items, math.nan)
    if not items.null_count:
        return numpy_values(items).astype(np.float64)
    out = np.empty(len(items))
    write_numbers(items, out)
    return out


def write_numbers(array: pa.Array, out: NDArray[np.floating[Any]]) -> None:
    """Write the `numbers_of` an array without lists into ``out[m]``; rounded to float64 first, as in records."""
    out[:] = numpy_values(array).astype(np.float64, copy=False)
    missing = null_mask(array)
    if missing is not None:
        out[missing] = np.nan


def filled(array: pa.Array, value: float) -> NDArray[Any]:
    """Return the `numpy_values` of numbers, integers or hex32 with `value` where one is null.

    The parser leaves 0 under the nulls of integers, and NaN under those of numbers: a column that is filled so is not
    copied, which would take ten times as long as looking.
    """
    values, valid = numpy_values(array), validity(array)
    if valid is None or nulls_hold(values, valid, value):
        return values
    return np.where(is_missing(array), value, values).astype(values.dtype, copy=False)


def text_buffers(array: pa.LargeStringArray) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of Arrow text and its offsets int64[n + 1], as views. A null may have bytes, too."""
    _, offsets, text = array.buffers()
    if offsets is None or offsets.size == 0:  # Arrow may leave the buffers of an empty array out
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    all_offsets = np.frombuffer(offsets, dtype=np.int64, count=array.offset + len(array) + 1)
    return np.frombuffer(text or b"", dtype=np.uint8), all_offsets[array.offset :]


def _text_lengths(array: pa.LargeStringArray) -> NDArray[np.int64]:
    """Return the bytes of each text, int64[n]; 0 for a null."""
    _, offsets = text_buffers(array)
    lengths = np.diff(offsets)
    mask = null_mask(array)
    if mask is not None:
        lengths[mask] = 0
    return lengths


def ids_as_integers(array: pa.Array) -> pa.Array:
    """Return an array of ids, or lists of them, as int64; other arrays unchanged."""
    if kind_of(array) != "id":
        return array
    return like(array, flat(array).storage.cast(pa.int64()))


TRAIN, VALID, TEST, LEFT_OUT = 0, 1, 2, 3
"""Values of `Rows.split`; no sample is made of a row that is left out, but other rows look at it."""
SPLIT_NAMES = ("train", "valid", "test")
"""Names of the splits in a data set, by the values of `Rows.split`."""


NANOSECONDS_PREFIX = "\x1fnanoseconds\x1f"
"""Begin of the names of `Rows.nanoseconds` in files, which no source has."""


@dataclass(frozen=True, slots=True)
class Rows:
    """n rows. Each step makes new ones, which share the columns that it leaves alone.

    Attributes:
        columns: Name -> array of n values.
        ids: int64[n], row ids, rising; described in docs/workflows.md.
        split: uint8[n], `TRAIN`, `VALID` or `TEST`; None before rows are split, and for records that are served.
        zero_nulls: Some columns of integers that are known to have 0 under their nulls, which saves a check.
        nanoseconds: Column of times, in seconds -> int32[n], the nanoseconds of the second, 0 for a missing time: of
            each column of single times, as the source has it. They order rows; a step that writes the column drops
            them.
    """

    columns: Mapping[str, pa.Array]
    ids: NDArray[np.int64]
    split: NDArray[np.uint8] | None = None
    zero_nulls: frozenset[str] = frozenset()
    nanoseconds: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return len(self.ids)

    @property
    def batch(self) -> pa.RecordBatch:
        """The columns as a record batch."""
        return pa.RecordBatch.from_arrays(list(self.columns.values()), names=list(self.columns))

    def with_columns(self, columns: Mapping[str, pa.Array]) -> Rows:
        """Return these rows with `columns` added or replaced."""
        return replace(
            self,
            columns={**self.columns, **columns},
            zero_nulls=self.zero_nulls.difference(columns),
            nanoseconds={name: parts for name, parts in self.nanoseconds.items() if name not in columns},
        )

    def select(self, names: Sequence[str]) -> Rows:
        """Return these rows with the columns `names` alone, in this order."""
        nanoseconds = {name: parts for name, parts in self.nanoseconds.items() if name in names}
        return replace(self, columns={name: self.columns[name] for name in names}, nanoseconds=nanoseconds)

    def with_split(self, split: NDArray[np.uint8]) -> Rows:
        """Return these rows with their split, uint8[n]."""
        return replace(self, split=split)

    def take(self, positions: NDArray[np.int64]) -> Rows:
        """Return the rows at these positions, int64[k], in this order."""
        chosen = array_of(positions)
        columns = {name: array.take(chosen) for name, array in self.columns.items()}
        # Without `zero_nulls`: Arrow promises nothing about what `take` leaves under a null.
        split = None if self.split is None else self.split[positions]
        nanoseconds = {name: parts[positions] for name, parts in self.nanoseconds.items()}
        return Rows(columns, self.ids[positions], split, nanoseconds=nanoseconds)

    def slice(self, start: int, stop: int) -> Rows:
        """Return rows ``start <= i < stop``, sharing memory."""
        columns = {name: array.slice(start, stop - start) for name, array in self.columns.items()}
        split = None if self.split is None else self.split[start:stop]
        nanoseconds = {name: parts[start:stop] for name, parts in self.nanoseconds.items()}
        return Rows(columns, self.ids[start:stop], split, nanoseconds=nanoseconds)

    def filter(self, kept: NDArray[np.bool_]) -> Rows:
        """Return the rows that are `kept`, bool[n]."""
        # Most blocks lose no row: without this every column would be copied.
        return self if kept.all() else self.take(np.flatnonzero(kept))

    def training(self) -> Rows:
        """Return the rows of the training part; all where rows are not split."""
        return self if self.split is None else self.filter(self.split == TRAIN)


def concatenate_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate at least one part; all have the same columns, and splits or none."""
    columns = {name: pa.concat_arrays([part.columns[name] for part in parts]) for name in parts[0].columns}
    splits = [part.split for part in parts if part.split is not None]
    ids = np.concatenate([part.ids for part in parts])
    nanoseconds = {name: np.concatenate([part.nanoseconds[name] for part in parts]) for name in parts[0].nanoseconds}
    return Rows(columns, ids, np.concatenate(splits) if splits else None, nanoseconds=nanoseconds)
