"""Writing Raw and RawAsync files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import Keys
from terarec.formats.hugectr.arguments import check_records
from terarec.formats.hugectr.field_types import FLOAT, INT32, FieldTypes, record_bytes
from terarec.formats.hugectr.record_stream import RecordStream
from terarec.formats.hugectr.strided import Strided
from terarec.spec import RecordLayout


class FixedRecordWriter(RecordStream):
    """Writes a Raw or RawAsync file. As a context manager it removes the file unless `close` was called inside.

    Args:
        path: where the file appears when the writer is closed.
        layout: what its records hold.
        types: how they hold it.
    """

    def __init__(self, path: Path, layout: RecordLayout, types: FieldTypes) -> None:
        super().__init__(path)
        self._layout = layout
        self._types = types

    def write(self, label: NDArray[Any], dense: NDArray[Any], keys: Sequence[Keys]) -> None:
        """Append n records. Keys are written as they are: a reader adds the offsets of the slots.

        Args:
            label: numbers[n, L]; whole ones where the file holds integers.
            dense: numbers[n, F]; whole ones >= 0 where the file holds integers.
            keys: per slot integers[n], or (values, offsets int64[n + 1]) with exactly as many keys as the layout says.

        Raises:
            FormatError: a wrong shape, number, bag or key; nothing was appended.
            StorageError: the disk is full; the partial file is gone.
        """
        where = str(self._file.path)
        layout, types = self._layout, self._types
        bags = check_records(layout, label, dense, keys, where)
        content = np.empty((len(label), record_bytes(layout, types)), dtype=np.uint8)
        records = Strided(content.reshape(-1), 0, content.shape[1], len(label))
        records.matrix(0, types.label, layout.label_dim)[:] = _whole(label, types.label, "label", where)
        dense_fields = records.matrix(4 * layout.label_dim, types.dense, layout.dense_dim)
        dense_fields[:] = _whole(dense, types.dense, "dense", where)
        key_fields = records.matrix(4 * (layout.label_dim + layout.dense_dim), types.keys, sum(types.keys_per_slot))
        first = 0
        for name, count, (values, _) in zip(layout.slot_names, types.keys_per_slot, bags, strict=True):
            if len(values) != count * len(label):
                raise FormatError(f"{where}, slot {name!r}: got {len(values)} keys, expected {count} in each record")
            if types.keys == INT32 and values.size and values.max() > np.iinfo(np.int32).max:
                raise FormatError(f"{where}, slot {name!r}: key {int(values.max())} does not fit int32")
            key_fields[:, first : first + count] = values.reshape(-1, count)
            first += count
        self._append(content, len(label))


def _whole(values: NDArray[Any], dtype: np.dtype[Any], what: str, where: str) -> NDArray[Any]:
    """`values` as `dtype`; raises `FormatError` if integers would lose something."""
    if dtype == FLOAT:
        return values
    limits = np.iinfo(dtype)
    low = 0 if what == "dense" else limits.min
    wrong = (values != np.floor(values)) | (values < low) | (values > limits.max)
    if wrong.any():
        value = values[np.unravel_index(int(np.argmax(wrong)), wrong.shape)]
        raise FormatError(f"{where}: {what} {value:g}, expected integers from {low} to {limits.max}")
    return values.astype(dtype)
