"""Reading Raw and RawAsync files: records of one size without a header. See docs/hugectr-formats.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys
from terarec.formats.hugectr.field_types import FLOAT, FieldTypes, record_bytes
from terarec.formats.hugectr.strided import Strided, copy_transposed
from terarec.io import locate
from terarec.spec import RecordLayout


class FixedRecordFile:
    """A Raw or RawAsync file, read in any pieces from any thread.

    Args:
        path: a path or URL.
        layout: what its records hold.
        types: how they hold it.
        num_records: records to take from the file; None for all.

    Attributes:
        num_records: as above.

    Raises:
        DataNotFoundError: no such file.
        FormatError: the size is no whole number of records, or of fewer than `num_records`.
    """

    def __init__(
        self, path: str | Path, layout: RecordLayout, types: FieldTypes, num_records: int | None = None
    ) -> None:
        self._file = locate(path)
        self._layout = layout
        self._types = types
        self._stride = record_bytes(layout, types)
        held, rest = divmod(self._file.size, self._stride)
        if rest or (num_records is not None and held < num_records):
            promised = "a multiple" if rest else f"at least {num_records} records"
            raise FormatError(
                f"{path}: holds {self._file.size} bytes, expected {promised} of {self._stride} bytes each"
            )
        self.num_records = held if num_records is None else num_records

    def read(self, start: int, stop: int) -> ColumnBlock:
        """The records ``start <= i < stop``, their keys int64 and with the slots' offsets where the format has them.

        Raises:
            FormatError: the file was cut short meanwhile, or holds an integer dense number below 0.
        """
        layout, types = self._layout, self._types
        content = self._file.read(start * self._stride, stop * self._stride)
        records = Strided(content, 0, self._stride, stop - start)
        label = records.matrix(0, types.label, layout.label_dim).astype(np.float32)
        dense = records.matrix(4 * layout.label_dim, types.dense, layout.dense_dim)
        return ColumnBlock(
            label=label, dense=self._numbers(dense, start), keys=_keys(records, layout, types, stop - start)
        )

    def _numbers(self, dense: NDArray[Any], first: int) -> NDArray[np.float32]:
        """Dense numbers float32[n, F]: as they are, or ln(x + 1) of integers x."""
        numbers = dense.astype(np.float32)
        if self._types.dense == FLOAT:
            return numbers
        if numbers.size and numbers.min() < 0:
            record, column = np.unravel_index(int(np.argmax(numbers < 0)), numbers.shape)
            raise FormatError(
                f"{self._file.name}: record {first + int(record)}, dense column {int(column)} is "
                f"{int(numbers[record, column])}, expected an integer >= 0 to take ln(x + 1) of"
            )
        numbers += 1.0
        return np.log(numbers, out=numbers)


def _keys(records: Strided, layout: RecordLayout, types: FieldTypes, num_rows: int) -> tuple[Keys, ...]:
    width = sum(types.keys_per_slot)
    matrix = records.matrix(4 * (layout.label_dim + layout.dense_dim), types.keys, width)
    if all(count == 1 for count in types.keys_per_slot):
        keys = np.empty((width, num_rows), dtype=np.int64)
        copy_transposed(matrix, keys)
        if types.adds_offsets and layout.slot_sizes:
            keys += np.array(layout.key_offsets, dtype=np.int64)[:, None]
        return tuple(keys)
    columns: list[Keys] = []
    first = 0
    for count in types.keys_per_slot:
        values = matrix[:, first : first + count].astype(np.int64).reshape(-1)
        columns.append(values if count == 1 else (values, np.arange(num_rows + 1, dtype=np.int64) * count))
        first += count
    return tuple(columns)
