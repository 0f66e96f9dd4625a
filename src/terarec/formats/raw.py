# SPDX-License-Identifier: Apache-2.0
"""Raw shards: fixed-width records, HugeCTR's Raw format. Described in docs/formats.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.block import (
    INT32_ROWS,
    ColumnBlock,
    Keys,
    check_keys,
    check_weights,
    default_group_rows,
    record_words,
)
from terarec.formats.shard import SHARD_FORMATS, ShardFormat, ShardWriter
from terarec.io.opening import open_file
from terarec.ragged import Ragged
from terarec.spec import CategoricalColumn, DatasetSpec

_FLOAT = np.dtype("<f4")
_KEY = np.dtype("<i4")


class RawShardWriter(ShardWriter):
    """Writer of a raw shard; see `ShardWriter`. A multi-hot column must hold exactly ``hotness`` keys a row.

    Args:
        path: ``<data set>/<split>/<file>.bin``.
        spec: Columns of the data set.
    """

    def __init__(self, path: Path, spec: DatasetSpec) -> None:
        _check_representable(spec, str(path))
        super().__init__(path, spec)
        self._words = record_words(spec)
        with self._file.guard():
            # Records are written by whole blocks, which a buffer would copy once more.
            self._stream = self._file.partial.open("wb", buffering=0)

    @override
    def _append(self, rows: ColumnBlock) -> None:
        # One matrix of 4-byte words, seen as integers and as floats: all fields of a record have one size.
        records = np.empty((rows.num_rows, self._words), dtype=_KEY)
        floats = records.view(_FLOAT)
        num_labels = rows.label.shape[1]
        first_key = num_labels + rows.dense.shape[1]
        floats[:, :num_labels] = rows.label
        floats[:, num_labels:first_key] = rows.dense
        if rows.weight is not None:
            floats[:, -1] = rows.weight
        for column, column_keys in zip(self._spec.categorical, rows.keys, strict=True):
            stop = first_key + column.hotness
            records[:, first_key:stop] = _fixed_width(column, column_keys, str(self._file.path))
            first_key = stop
        with self._file.guard():
            _write_all(self._stream, records.reshape(-1).view(np.uint8).data)

    @override
    def _finish(self) -> None:
        with self._file.guard():
            self._stream.close()

    @override
    def _discard(self) -> None:
        self._stream.close()


class RawShard:
    """Raw shard, read from any thread in groups of `default_group_rows` records.

    Args:
        path: Path of the file.
        spec: Columns of the data set.
        num_rows: Rows that ``dataset.json`` promises; None for the file's own number.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: The size is not an integer number of records, or of another number of them.
    """

    def __init__(self, path: Path, spec: DatasetSpec, num_rows: int | None = None) -> None:
        self.path = path
        self._spec = spec
        self._words = record_words(spec)
        _check_representable(spec, str(path))
        if not path.is_file():
            raise DataNotFoundError(path, "no such shard")
        size, record = path.stat().st_size, self._words * 4
        # The size is all that tells a file that was cut short: there is no header.
        if size % record or (num_rows is not None and size != num_rows * record):
            promised = "a multiple" if num_rows is None else f"{num_rows} rows (dataset.json)"
            raise FormatError(path, f"holds {size} bytes, expected {promised} of {record} bytes each")
        self.num_rows = size // record
        step = default_group_rows(spec)
        self.group_rows = tuple(min(step, self.num_rows - start) for start in range(0, self.num_rows, step))
        self._step = step

    def read_group(self, index: int) -> ColumnBlock:
        """Return the checked rows of group `index`.

        Raises:
            FormatError: The file was truncated since it was opened, a key is outside its column's rows, or a weight is
                negative or not finite.
        """
        where = f"{self.path}: row group {index}"
        records = np.empty((self.group_rows[index], self._words), dtype=_KEY)
        # A handle for every call, so that threads do not share a position.
        with open_file(self.path, is_buffered=False) as stream:
            stream.seek(index * self._step * self._words * 4)
            count = _read_all(stream, records.reshape(-1).view(np.uint8).data)
        if count != records.nbytes:
            raise FormatError(where, f"holds {count} bytes, expected {records.nbytes}")
        floats = records.view(_FLOAT)
        num_labels = len(self._spec.labels)
        first_key = num_labels + len(self._spec.dense)
        # Copies of all columns, so that the records themselves are freed.
        label = np.ascontiguousarray(floats[:, :num_labels])
        dense = np.ascontiguousarray(floats[:, num_labels:first_key])
        keys: list[Keys] = []
        for column in self._spec.categorical:
            values = np.ascontiguousarray(records[:, first_key : first_key + column.hotness]).reshape(-1)
            first_key += column.hotness
            offsets = np.arange(len(records) + 1, dtype=np.int64) * column.hotness
            keys.append(Ragged(values, offsets) if column.hotness > 1 else values)
            check_keys(column, keys[-1], where)
        weight = None
        if self._spec.weight is not None:
            weight = np.ascontiguousarray(floats[:, -1])
            check_weights(self._spec.weight, weight, where)
        return ColumnBlock(label=label, dense=dense, keys=tuple(keys), weight=weight)


def _check_representable(spec: DatasetSpec, where: str) -> None:
    for column in spec.categorical:
        if column.rows is None or column.rows > INT32_ROWS:
            keys = "any int64 keys" if column.rows is None else f"{column.rows} rows"
            raise FormatError(f"{where}, column {column.name!r}", f"{keys}, raw int32 keys reach {INT32_ROWS}")


def _fixed_width(column: CategoricalColumn, keys: Keys, where: str) -> NDArray[Any]:
    if not isinstance(keys, Ragged):
        return keys[:, None]
    values, offsets = keys
    lengths = np.diff(offsets)
    if (lengths != column.hotness).any():
        row = int(np.argmax(lengths != column.hotness))
        raise FormatError(
            f"{where}, column {column.name!r}",
            f"row {row} holds {int(lengths[row])} keys, raw shards hold exactly {column.hotness}",
        )
    return values.reshape(-1, column.hotness)


def _write_all(stream: Any, view: memoryview) -> None:
    while view:
        view = view[stream.write(view) :]


def _read_all(stream: Any, view: memoryview) -> int:
    """Fill `view` and return the bytes read, fewer at the end of the file. One read call stops at 2 GiB."""
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            break
        done += count
    return done


SHARD_FORMATS.add("raw", ShardFormat(suffix=".bin", open=RawShard, create=RawShardWriter))
