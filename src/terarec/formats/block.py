# SPDX-License-Identifier: Apache-2.0
"""Decoded rows of a shard, column by column: slicing, merging, sizes that follow from the columns, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from terarec.errors import FormatError
from terarec.ragged import ArrayLists, Ragged, concatenate_lists, flat_values, slice_lists, take_lists
from terarec.spec import CategoricalColumn, DatasetSpec, MetadataColumn

Keys = NDArray[Any] | ArrayLists
"""Keys of one column for n rows: integers[n], or n lists of integers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnBlock:
    """Columns of n rows.

    Attributes:
        label: float32[n, L].
        dense: float32[n, F].
        keys: For each categorical column int32[n] or int64[n], or n lists of them.
        weight: float32[n], sample weights; None for a data set without.
        metadata: For each metadata column an Arrow array of n int64, double or large_string.
    """

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    keys: tuple[Keys, ...]
    weight: NDArray[np.float32] | None = None
    metadata: tuple[pa.Array, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows n."""
        return int(self.label.shape[0])


def slice_rows(block: ColumnBlock, start: int, stop: int) -> ColumnBlock:
    """Return the rows ``start <= i < stop`` of `block`, as views."""
    return ColumnBlock(
        label=block.label[start:stop],
        dense=block.dense[start:stop],
        keys=tuple(slice_keys(column, start, stop) for column in block.keys),
        weight=None if block.weight is None else block.weight[start:stop],
        metadata=tuple(array[start:stop] for array in block.metadata),
    )


def slice_keys(keys: Keys, start: int, stop: int) -> Keys:
    """Return the keys of the rows ``start <= i < stop``, as views."""
    return slice_lists(keys, start, stop) if isinstance(keys, Ragged) else keys[start:stop]


def merge(blocks: Sequence[ColumnBlock], order: NDArray[np.int64] | None = None) -> ColumnBlock:
    """Concatenate the rows of `blocks`, or ``order int64[n]`` of them, column by column.

    A single block without an order is returned as it is.
    """
    if len(blocks) == 1 and order is None:
        return blocks[0]
    # Column by column, each in as many pieces as there are blocks.
    columns = [list(column) for column in zip(*(block.keys for block in blocks), strict=True)]
    # Some readers return an array where all samples of a block have one key, so that a column may be both.
    is_list = [any(isinstance(keys, Ragged) for keys in column) for column in columns]
    scalars = iter(_merge_scalars([column for column, lists in zip(columns, is_list, strict=True) if not lists], order))
    return ColumnBlock(
        label=_merge_arrays([block.label for block in blocks], order),
        dense=_merge_arrays([block.dense for block in blocks], order),
        keys=tuple(
            _merge_lists([bags_of(keys) for keys in column], order) if lists else next(scalars)
            for column, lists in zip(columns, is_list, strict=True)
        ),
        weight=_merge_weights(blocks, order),
        metadata=tuple(
            _merge_metadata(list(column), order) for column in zip(*(block.metadata for block in blocks), strict=True)
        ),
    )


def _merge_weights(blocks: Sequence[ColumnBlock], order: NDArray[np.int64] | None) -> NDArray[np.float32] | None:
    weights = [block.weight for block in blocks if block.weight is not None]
    return _merge_arrays(weights, order) if weights else None


def _merge_metadata(arrays: list[pa.Array], order: NDArray[np.int64] | None) -> pa.Array:
    joined = pa.concat_arrays(arrays)
    return joined if order is None else joined.take(pa.array(order))


def _merge_arrays(arrays: list[NDArray[Any]], order: NDArray[np.int64] | None) -> NDArray[Any]:
    joined = np.concatenate(arrays)
    return joined if order is None else np.take(joined, order, axis=0)


def _merge_scalars(columns: list[list[Any]], order: NDArray[np.int64] | None) -> NDArray[Any]:
    """Merge scalar key columns, each in pieces, into keys[S, n].

    All columns go to one array, and through one buffer: 26 columns of 262,144 int32 keys take 49 ns a row so, against
    190 with new arrays for each column, most of it page faults (Zen 3; NumPy requests huge pages from 4 MiB on).
    """
    if not columns:
        return np.empty((0, 0), dtype=np.int32)
    dtype = np.result_type(*(array.dtype for column in columns for array in column))
    joined = np.empty(sum(len(array) for array in columns[0]), dtype=dtype)
    merged = np.empty((len(columns), len(joined) if order is None else len(order)), dtype=dtype)
    for column, target in zip(columns, merged, strict=True):
        if order is None:
            np.concatenate(column, out=target)
        else:
            np.concatenate(column, out=joined)
            np.take(joined, order, out=target, mode="clip")  # the default mode would go through a hidden copy
    return merged


def _merge_lists(columns: list[ArrayLists], order: NDArray[np.int64] | None) -> ArrayLists:
    joined = concatenate_lists(columns)
    return joined if order is None else take_lists(joined, order)


def bags_of(keys: Keys) -> ArrayLists:
    """Return the keys of one slot as lists, even if each sample has one key."""
    return keys if isinstance(keys, Ragged) else Ragged(keys, np.arange(len(keys) + 1, dtype=np.int64))


def check_keys(column: CategoricalColumn, keys: Keys, where: str, *, promise: str = "rows in dataset.json") -> None:
    """Raise `FormatError` if a key of `column` is not 0 <= key < rows, where it has rows, or if a list is too long.

    Args:
        column: Description of the column.
        keys: The column's keys.
        where: Start of the message, for example ``"train/part-00000.parquet: row group 3"``.
        promise: Source of the number of rows, for the error.
    """
    values = flat_values(keys)
    if isinstance(keys, Ragged):
        lengths = np.diff(keys.offsets)
        if lengths.size and (lengths.max() > column.hotness or lengths.min() < 0):
            row = int(np.argmax((lengths > column.hotness) | (lengths < 0)))
            raise FormatError(
                f"{where}, column {column.name!r}",
                f"row {row} holds {int(lengths[row])} keys, expected 0 to {column.hotness}",
            )
    # The place of a wrong key is searched only once there is one: the check itself is a single pass.
    if column.rows is not None and values.size and _leave(values, column.rows):
        position = int(np.argmax((values < 0) | (values >= column.rows)))
        raise FormatError(
            f"{where}, column {column.name!r}",
            f"key {int(values[position])} at position {position}, expected 0 <= key < {column.rows} ({promise})",
        )


def _leave(keys: NDArray[Any], rows: int) -> bool:
    """Return whether some of the keys are not 0 <= key < rows."""
    sign_bit = 1 << (8 * keys.itemsize - 1)
    if keys.dtype.kind == "i" and rows <= sign_bit:  # read as unsigned, the negative ones are the highest
        return bool(keys.view(f"u{keys.itemsize}").max() >= rows)
    return int(keys.min()) < 0 or int(keys.max()) >= rows


INT32_ROWS = 2**31
"""Most rows that a table may have for its keys to fit int32."""

# A group is read, decoded and shuffled as a whole, by one thread: its size bounds the memory of a reader.
MAX_GROUP_ROWS = 65_536
MIN_GROUP_ROWS = 1_024
GROUP_BYTES = 16 * 2**20


def key_dtype(spec: DatasetSpec) -> np.dtype[Any]:
    """Return the type of all key columns in files: int32, or int64 if one has more than 2^31 rows or any keys."""
    is_wide = any(column.rows is None or column.rows > INT32_ROWS for column in spec.categorical)
    return np.dtype(np.int64 if is_wide else np.int32)


def record_words(spec: DatasetSpec) -> int:
    """Count the 4-byte words of a raw record: labels, dense, ``hotness`` keys of each column, and the weight."""
    keys = sum(column.hotness for column in spec.categorical)
    return len(spec.labels) + len(spec.dense) + keys + (spec.weight is not None)


def default_group_rows(spec: DatasetSpec) -> int:
    """Return the rows of a group: a power of two from 1,024 to 65,536 with at most 16 MiB of int32 records."""
    rows = MAX_GROUP_ROWS
    while rows > MIN_GROUP_ROWS and rows * record_words(spec) * 4 > GROUP_BYTES:
        rows //= 2
    return rows


METADATA_TYPES: Mapping[str, pa.DataType] = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.large_string()}
"""Type of a metadata column -> the Arrow type of its values in memory."""


def check_weights(name: str, weight: NDArray[np.floating], where: str) -> None:
    """Raise `FormatError` unless the weights ``weight[n]`` of column `name` are finite float32 numbers >= 0.

    Args:
        name: Name of the column.
        weight: The weights.
        where: Start of the message, for example ``"train/part-00000.parquet: row group 3"``.
    """
    # A float64 weight beyond float32 becomes infinity, which is rejected below.
    with np.errstate(over="ignore"):
        stored = weight.astype(np.float32, copy=False)
    good = (weight >= 0) & (stored < np.inf)
    if not good.all():
        row = int(np.argmin(good))
        raise FormatError(
            f"{where}, column {name!r}",
            f"row {row} has the weight {weight[row]}, expected a finite float32 number >= 0",
        )


def check_sample_columns(
    spec: DatasetSpec, num_rows: int, weight: object, metadata: Sequence[pa.Array], where: str
) -> None:
    """Raise `FormatError` unless `weight` and `metadata` are the columns of `spec` for `num_rows` rows.

    Args:
        spec: Description of the data set.
        num_rows: Number of rows n.
        weight: floats[n], or None where the data set has no weights.
        metadata: An array of n values for each metadata column.
        where: Start of the message.
    """
    if spec.weight is None or weight is None:
        if spec.weight is not None:
            raise FormatError(f"{where}, column {spec.weight!r}", f"got no weights, expected {num_rows}")
        if weight is not None:
            raise FormatError(where, "got weights, expected none for a data set without a weight column")
    else:
        if not isinstance(weight, np.ndarray) or weight.shape != (num_rows,) or weight.dtype.kind not in "fiu":
            got = f"{weight.dtype}{list(weight.shape)}" if isinstance(weight, np.ndarray) else type(weight).__name__
            raise FormatError(f"{where}, column {spec.weight!r}", f"got weights {got}, expected numbers[{num_rows}]")
        check_weights(spec.weight, weight, where)
    if len(metadata) != len(spec.metadata):
        raise FormatError(where, f"got {len(metadata)} metadata columns, expected {len(spec.metadata)}")
    for column, array in zip(spec.metadata, metadata, strict=True):
        if len(array) != num_rows or array.type != METADATA_TYPES[column.type]:
            expected = f"{num_rows} values of {METADATA_TYPES[column.type]}"
            raise FormatError(
                f"{where}, column {column.name!r}", f"got {len(array)} values of {array.type}, expected {expected}"
            )


def metadata_array(values: pa.Array | pa.ChunkedArray, column: MetadataColumn, where: str) -> pa.Array:
    """Return the values of a metadata column in one array of its type in memory.

    Raises:
        FormatError: Text that is not UTF-8, or values of another type; the message starts with `where`.
    """
    try:
        array = values.cast(METADATA_TYPES[column.type])
        if isinstance(array, pa.ChunkedArray):
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()  # which copies even one chunk
        if column.type == "string":
            array.validate(full=True)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"{where}, column {column.name!r}", f"{reason}, expected {column.type} values") from None
    return array


def check_rows(
    spec: DatasetSpec,
    label: object,
    dense: object,
    keys: Sequence[Keys],
    where: str,
    *,
    weight: object = None,
    metadata: Sequence[pa.Array] = (),
) -> int:
    """Return the number of rows of ``label[n, L]``, ``dense[n, F]`` and `keys`, one per categorical column.

    `weight` and `metadata` are as in `ColumnBlock`.

    Raises:
        FormatError: A wrong shape, number of columns, type of column, key or weight; the message starts with `where`.
    """
    if not isinstance(label, np.ndarray) or label.ndim != 2:
        raise FormatError(where, f"got label {_shape(label)}, expected an array [n, {len(spec.labels)}]")
    num_rows = int(label.shape[0])
    for name, array, columns in (("label", label, spec.labels), ("dense", dense, spec.dense)):
        if not isinstance(array, np.ndarray) or array.shape != (num_rows, len(columns)):
            raise FormatError(where, f"got {name} {_shape(array)}, expected [{num_rows}, {len(columns)}]")
    if len(keys) != len(spec.categorical):
        raise FormatError(where, f"got keys of {len(keys)} columns, expected {len(spec.categorical)}")
    for column, column_keys in zip(spec.categorical, keys, strict=True):
        if not isinstance(column_keys, Ragged if column.hotness > 1 else np.ndarray):
            expected = "Ragged(values, offsets)" if column.hotness > 1 else "an array of one key a row"
            got = f"got {type(column_keys).__name__} where hotness is {column.hotness}"
            raise FormatError(f"{where}, column {column.name!r}", f"{got}, expected {expected}")
        _check_column_shape(column_keys, num_rows, f"{where}, column {column.name!r}")
        check_keys(column, column_keys, where)
    check_sample_columns(spec, num_rows, weight, metadata, where)
    return num_rows


def _check_column_shape(keys: Keys, num_rows: int, where: str) -> None:
    values, offsets = keys if isinstance(keys, Ragged) else (keys, None)
    if not np.issubdtype(values.dtype, np.integer) or values.ndim != 1:
        raise FormatError(where, f"got {values.dtype}{_shape(values)} keys, expected integers[n]")
    if offsets is None:
        if values.shape != (num_rows,):
            raise FormatError(where, f"got {len(values)} keys for {num_rows} rows")
    elif offsets.shape != (num_rows + 1,) or offsets[0] != 0 or offsets[-1] != len(values):
        raise FormatError(where, f"got offsets {_shape(offsets)}, expected [{num_rows + 1}] from 0 to {len(values)}")


def _shape(array: object) -> str:
    return str(list(array.shape)) if isinstance(array, np.ndarray) else type(array).__name__


_SMALLEST = 128 << 10
"""Bytes from which memory is recycled: glibc's malloc maps larger arrays from the kernel one by one."""
_BYTES_KEPT = 64 << 20
"""Free memory kept for each size."""
_SIZES_KEPT = 16

_free: dict[int, list[NDArray[np.uint8]]] = {}


def empty_from_pool(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array in memory of an earlier one, if one of its size has been dropped.

    Fresh memory costs a page fault every 4 KiB, 3 us each in a virtual machine: as much as decoding the Parquet columns
    that the memory is for, and twice as much as building a batch (Zen 4, 65,536 Criteo samples).
    """
    kind = np.dtype(dtype)
    size = kind.itemsize
    for length in shape:
        size *= length
    if size < _SMALLEST:
        return np.empty(shape, dtype=kind)
    # Eight sizes an octave, so that batches of about as many keys share memory.
    step = 1 << (size.bit_length() - 4)
    memory = _Memory(-(-size // step) * step)
    return np.asarray(memory)[:size].view(kind).reshape(shape)


class _Memory:
    """Bytes that become free again when the last array that views them is dropped."""

    __slots__ = ("__array_interface__", "_bytes")

    def __init__(self, size: int) -> None:
        try:
            # Not `if size in _free`: another thread may take the last one in between.
            self._bytes = _free[size].pop()
        except (KeyError, IndexError):
            self._bytes = np.empty(size, dtype=np.uint8)
        self.__array_interface__ = self._bytes.__array_interface__

    def __del__(self) -> None:
        # Called by any thread, and inside other calls of this module: each step is one that the interpreter never
        # interrupts, and none depends on the previous one.
        size = len(self._bytes)
        # Blocks of batch sizes that are no longer used: all are dropped, and sizes in use return within a few batches.
        if size not in _free and len(_free) >= _SIZES_KEPT:
            _free.clear()
        free = _free.setdefault(size, [])
        if (len(free) + 1) * size <= _BYTES_KEPT:
            free.append(self._bytes)
