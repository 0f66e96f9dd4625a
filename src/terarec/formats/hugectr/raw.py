# SPDX-License-Identifier: Apache-2.0
"""Raw and RawAsync files: records of one size without a header. See docs/hugectr-formats.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.formats.block import ColumnBlock, Keys
from terarec.formats.hugectr.fields import RecordStream, Strided, check_records, copy_transposed
from terarec.io.remote import locate
from terarec.ragged import Ragged
from terarec.spec import RecordLayout

FLOAT, INT32, UINT32, INT64 = np.dtype("<f4"), np.dtype("<i4"), np.dtype("<u4"), np.dtype("<i8")


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldTypes:
    """Data types of a file without a header; see `raw_types` and `raw_async_types`.

    Attributes:
        label: float32, or int32, of which float32 is made.
        dense: float32, or an integer x, of which float32 ln(x + 1) is made.
        keys: int32, uint32 or int64.
        keys_per_slot: Keys of every record in each slot.
        adds_offsets: Whether a reader adds to every key the sizes of the slots before.
    """

    label: np.dtype[Any]
    dense: np.dtype[Any]
    keys: np.dtype[Any]
    keys_per_slot: tuple[int, ...]
    adds_offsets: bool


def raw_types(layout: RecordLayout, *, float_label_dense: bool) -> FieldTypes:
    """Return the types of Raw files."""
    return _one_hot_types(layout, "Raw", is_float=float_label_dense, adds_offsets=True)


def raw_async_types(layout: RecordLayout, *, is_dense_float: bool, multi_hot: bool) -> FieldTypes:
    """Return the types of RawAsync files.

    Raises:
        ConfigError: A slot whose number of keys varies; and for the one-hot form as in `raw_types`.
    """
    if not multi_hot:
        return _one_hot_types(layout, "RawAsync without multi_hot", is_float=is_dense_float, adds_offsets=False)
    _check_fixed(layout)
    return FieldTypes(
        # Labels are integers here even where dense values are floats.
        label=INT32,
        dense=FLOAT if is_dense_float else UINT32,
        keys=UINT32 if layout.key_bytes == 4 else INT64,
        keys_per_slot=layout.most_keys,
        adds_offsets=False,
    )


def _check_fixed(layout: RecordLayout) -> None:
    for sparse in layout.inputs:
        if not sparse.is_fixed_length and sparse.nnz_per_slot != (1,) * sparse.slot_num:
            raise ConfigError(
                "RawAsync",
                f"input {sparse.name!r} has up to {max(sparse.nnz_per_slot)} keys a slot, "
                "expected is_fixed_length: the records have one size",
            )


def _one_hot_types(layout: RecordLayout, kind: str, *, is_float: bool, adds_offsets: bool) -> FieldTypes:
    if layout.key_bytes != 4:
        raise ConfigError(kind, f"got {layout.key_bytes}-byte keys, expected 4-byte keys")
    # HugeCTR's one switch, float_label_dense, is for labels and dense values together.
    number = FLOAT if is_float else INT32
    ones = (1,) * layout.num_slots
    return FieldTypes(label=number, dense=number, keys=INT32, keys_per_slot=ones, adds_offsets=adds_offsets)


def record_bytes(layout: RecordLayout, types: FieldTypes) -> int:
    """Return the number of bytes of a record."""
    return 4 * (layout.label_dim + layout.dense_dim) + types.keys.itemsize * sum(types.keys_per_slot)


class FixedRecordFile:
    """Raw or RawAsync file, read in any pieces from any thread.

    Args:
        path: A path or URL.
        layout: Layout of the records.
        types: Number types of the records.
        num_records: Records to take from the file; None for all.

    Raises:
        DataNotFoundError: No such file.
        FormatError: The size is not a whole number of records, or of fewer than `num_records`.
    """

    def __init__(
        self, path: str | Path, layout: RecordLayout, types: FieldTypes, num_records: int | None = None
    ) -> None:
        self._file = locate(path)
        self._layout = layout
        self._types = types
        self._stride = record_bytes(layout, types)
        count, rest = divmod(self._file.size, self._stride)
        if rest or (num_records is not None and count < num_records):
            promised = "a multiple" if rest else f"at least {num_records} records"
            raise FormatError(path, f"holds {self._file.size} bytes, expected {promised} of {self._stride} bytes each")
        self.num_records = count if num_records is None else num_records

    def read(self, start: int, stop: int) -> ColumnBlock:
        """Return the records ``start <= i < stop``, keys int64, with the slots' offsets where the format has them.

        Raises:
            FormatError: The file was truncated since it was opened, or holds an integer dense number below 0.
        """
        layout, types = self._layout, self._types
        # Bytes rather than a memory map, which would crash if the file is truncated at the same time.
        content = self._file.read(start * self._stride, stop * self._stride)
        records = Strided(content, 0, self._stride, stop - start)
        label = records.matrix(0, types.label, layout.label_dim).astype(np.float32)
        dense = records.matrix(4 * layout.label_dim, types.dense, layout.dense_dim)
        return ColumnBlock(
            label=label, dense=self._numbers(dense, start), keys=_keys(records, layout, types, stop - start)
        )

    def _numbers(self, dense: NDArray[Any], first: int) -> NDArray[np.float32]:
        """Return dense numbers float32[n, F]: unchanged floats, or ln(x + 1) of integers x."""
        numbers = dense.astype(np.float32)
        if self._types.dense == FLOAT:
            return numbers
        if numbers.size and numbers.min() < 0:
            record, column = np.unravel_index(int(np.argmax(numbers < 0)), numbers.shape)
            raise FormatError(
                self._file.name,
                f"record {first + int(record)}, dense column {int(column)} is "
                f"{int(numbers[record, column])}, expected an integer >= 0 to take ln(x + 1) of",
            )
        # Not log1p, which rounds differently: the format is ln(x + 1) in float32.
        numbers += 1.0
        return np.log(numbers, out=numbers)


def _keys(records: Strided, layout: RecordLayout, types: FieldTypes, num_rows: int) -> tuple[Keys, ...]:
    width = sum(types.keys_per_slot)
    matrix = records.matrix(4 * (layout.label_dim + layout.dense_dim), types.keys, width)
    # With one key in every slot, as in Criteo, one transposition makes all columns.
    if all(count == 1 for count in types.keys_per_slot):
        keys = np.empty((width, num_rows), dtype=np.int64)
        copy_transposed(matrix, keys)
        if types.adds_offsets and layout.slot_sizes:
            # Keys below 0, which pad bags, get the offset as well, as in HugeCTR's reader.
            keys += np.array(layout.key_offsets, dtype=np.int64)[:, None]
        return tuple(keys)
    # No offsets: files of several keys a slot are RawAsync's, which hold final keys.
    columns: list[Keys] = []
    first = 0
    for count in types.keys_per_slot:
        values = matrix[:, first : first + count].astype(np.int64).reshape(-1)
        columns.append(values if count == 1 else Ragged(values, np.arange(num_rows + 1, dtype=np.int64) * count))
        first += count
    return tuple(columns)


class FixedRecordWriter(RecordStream):
    """Writer of a Raw or RawAsync file. As a context manager it removes the file unless `close` was called inside."""

    def __init__(self, path: Path, layout: RecordLayout, types: FieldTypes) -> None:
        super().__init__(path)
        self._layout = layout
        self._types = types

    def write(self, label: NDArray[Any], dense: NDArray[Any], keys: Sequence[Keys]) -> None:
        """Append n records. Keys are written without changes: a reader adds the offsets of the slots.

        Args:
            label: numbers[n, L]; integers where the file holds integers.
            dense: numbers[n, F]; integers >= 0 where the file holds integers.
            keys: For each slot integers[n], or n lists of them with exactly as many keys as the layout
                says.

        Raises:
            FormatError: A wrong shape, number, bag or key; nothing was appended.
            StorageError: The disk is full; the partial file is gone.
        """
        where = str(self._file.path)
        layout, types = self._layout, self._types
        bags = check_records(layout, label, dense, keys, where)
        # Every byte is written below: the fields of a record leave no gap.
        content = np.empty((len(label), record_bytes(layout, types)), dtype=np.uint8)
        records = Strided(content.reshape(-1), 0, content.shape[1], len(label))
        records.matrix(0, types.label, layout.label_dim)[:] = _as_integers(label, types.label, "label", where)
        dense_fields = records.matrix(4 * layout.label_dim, types.dense, layout.dense_dim)
        dense_fields[:] = _as_integers(dense, types.dense, "dense", where)
        key_fields = records.matrix(4 * (layout.label_dim + layout.dense_dim), types.keys, sum(types.keys_per_slot))
        first = 0
        for name, count, (values, _) in zip(layout.slot_names, types.keys_per_slot, bags, strict=True):
            if len(values) != count * len(label):
                raise FormatError(f"{where}, slot {name!r}", f"got {len(values)} keys, expected {count} in each record")
            # `check_records` bounds 4-byte keys as uint32, which Norm and RawAsync files hold.
            if types.keys == INT32 and values.size and values.max() > np.iinfo(np.int32).max:
                raise FormatError(f"{where}, slot {name!r}", f"key {int(values.max())} does not fit int32")
            key_fields[:, first : first + count] = values.reshape(-1, count)
            first += count
        self._append(content, len(label))


def _as_integers(values: NDArray[Any], dtype: np.dtype[Any], what: str, where: str) -> NDArray[Any]:
    """Return `values` as `dtype`; raise `FormatError` if integers would lose something."""
    if dtype == FLOAT:
        return values
    limits = np.iinfo(dtype)
    low = 0 if what == "dense" else limits.min
    # A cast would cut fractions and wrap around silently. Floats hold the power of 2 behind the largest integer.
    wrong = (values != np.floor(values)) | (values < low) | (values >= limits.max + 1.0)
    if wrong.any():
        value = values[np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
        raise FormatError(where, f"{what} {value:g}, expected integers from {low} to {limits.max}")
    return values.astype(dtype)
