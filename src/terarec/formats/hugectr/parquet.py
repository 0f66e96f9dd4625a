# SPDX-License-Identifier: Apache-2.0
"""Columns of HugeCTR's Parquet files. See docs/hugectr-formats.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.arrays import is_list
from terarec.formats.block import ColumnBlock, Keys, empty_from_pool
from terarec.formats.dataset import ParquetMetadata, base_name
from terarec.formats.hugectr.fields import check_bag_lengths
from terarec.formats.parquet import arrow_errors, check_row_count, column_array, lists_of_array
from terarec.io.remote import locate
from terarec.kernels.cpu.encoding import stack_columns
from terarec.ragged import Ragged
from terarec.spec import RecordLayout

PIECE_ROWS = 131_072
"""Rows that are decoded at once: 42 MB of Criteo's as 8-byte keys. Row groups of no more are decoded in one piece."""


class RowGroupPieces:
    """Pieces of one row group, for any thread and in any order.

    Parquet cannot begin inside a row group, so one reader decodes all pieces one after the other. A request for a
    piece decodes those before it, which wait for their own requests: in order, as many as there are threads.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Any]],
        group: int,
        columns: Sequence[str],
        *,
        piece_rows: int = PIECE_ROWS,
    ) -> None:
        self._opened, self._group = opened, group
        self._columns, self._piece_rows = list(columns), piece_rows
        self._lock = Lock()
        self._waiting: dict[int, pa.Table] = {}
        self._decoded = 0
        self._stream: Iterator[pa.RecordBatch] = iter(())

    def take(self, piece: int) -> pa.Table:
        """Return the rows of a piece; a second request decodes the row group again from its start."""
        # One stream for all threads: the first one decodes for the others.
        with self._lock:
            if piece not in self._waiting:
                self._decode_to(piece)
            return self._waiting.pop(piece)

    def _decode_to(self, piece: int) -> None:
        # A piece that was taken is gone, and a stream of Parquet cannot go back.
        if piece < self._decoded or not self._decoded:
            self._waiting, self._decoded, self._stream = {}, 0, self._batches()
        try:
            while self._decoded <= piece:
                batch = next(self._stream, None)
                if batch is None:
                    # As Arrow reports other damage, so that `arrow_errors` names file and row group.
                    raise pa.ArrowInvalid(f"row group {self._group} ends before its piece {piece}")
                self._waiting[self._decoded] = pa.Table.from_batches([batch])
                self._decoded += 1
        except (pa.ArrowException, OSError):
            self._decoded = 0  # another request starts over
            raise

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with ExitStack() as stack:
            file = stack.enter_context(self._opened())
            yield from file.iter_batches(
                self._piece_rows, row_groups=[self._group], columns=self._columns, use_threads=False
            )


_BUFFER_BYTES = 1 << 20
_STACKED = tuple(map(np.dtype, (np.float32, np.float64, np.int32, np.int64)))
_KEY_TYPES = {4: (pa.int32(), pa.uint32()), 8: (pa.int64(), pa.uint64())}


class ParquetRecordFile:
    """Parquet file, read from any thread by groups of rows: its row groups, or pieces of large ones.

    Args:
        path: A path or URL.
        layout: Layout of the rows.
        metadata: Roles of the columns.
        piece_rows: Maximum number of rows of a group.

    Raises:
        DataNotFoundError: No such file.
        FormatError: No Parquet file, another number of rows than the metadata promises, columns that are not there or
            of a wrong type.
    """

    def __init__(
        self, path: str, layout: RecordLayout, metadata: ParquetMetadata, *, piece_rows: int = PIECE_ROWS
    ) -> None:
        self._file = locate(path)
        self._layout = layout
        self._footer: Any = None
        with arrow_errors(path), self._opened() as file:
            self._footer = file.metadata
            schema = file.schema_arrow
        self.num_records: int = self._footer.num_rows
        # By base name: lists and metadata may have been moved together with the files.
        promised = metadata.num_rows.get(base_name(path))
        if promised is None:
            raise FormatError(metadata.path, f"names no file {base_name(path)!r}, expected its number of rows")
        if self.num_records != promised:
            raise FormatError(path, f"holds {self.num_records} rows, expected {promised} ({metadata.path})")
        sizes = [self._footer.row_group(group).num_rows for group in range(self._footer.num_row_groups)]
        starts = [(group, start) for group, rows in enumerate(sizes) for start in range(0, rows, piece_rows)]
        self._groups = [(group, start // piece_rows) for group, start in starts]
        self.group_rows = tuple(min(piece_rows, sizes[group] - start) for group, start in starts)
        self.runs = tuple(len(range(0, rows, piece_rows)) for rows in sizes)
        self._labels = _fields(schema, metadata.labels, path)
        self._dense = _fields(schema, metadata.dense, path)
        self._keys = _fields(schema, metadata.keys, path)
        _check_counts(metadata, layout, path)
        for fields, is_good, expected in (
            (self._labels, _is_number, "a number"),
            (self._dense, _is_number_or_list, "a number or a list of floats"),
        ):
            for field in fields:
                if not is_good(field.type):
                    raise FormatError(f"{path}, column {field.name!r}", f"type is {field.type}, expected {expected}")
        for field in self._keys:
            _check_key_type(field, layout.key_bytes, path)
        self._names = [field.name for field in (*self._labels, *self._dense, *self._keys)]
        self._verified: set[int] = set()  # row groups whose pages had the right checksums
        self._pieces = {
            group: RowGroupPieces(self._opened_buffered, group, self._names, piece_rows=piece_rows)
            for group, rows in enumerate(sizes)
            # Smaller row groups are read whole, by any number of threads at once.
            if rows > piece_rows
        }

    def read(self, group: int) -> ColumnBlock:
        """Return the rows of group `group`, keys as the file holds them.

        Checksums of pages, where the file has some, are verified when a row group is read for the first time; those of
        row groups that are decoded in pieces every time.

        Raises:
            FormatError: A damaged page, a null, more keys in a list than the layout says, or lists of floats of
                different lengths.
        """
        row_group, piece = self._groups[group]
        where = f"{self._file.name}: row group {row_group}"
        with arrow_errors(where):
            table = self._table(row_group, piece)
        num_rows = self.group_rows[group]
        check_row_count(table, num_rows, where)
        dense = _floats(table, self._dense, num_rows, where)
        # Only the data tells how long lists of floats are.
        if dense.shape[1] != self._layout.dense_dim:
            raise FormatError(where, f"holds {dense.shape[1]} dense numbers, expected {self._layout.dense_dim}")
        return ColumnBlock(
            label=_floats(table, self._labels, num_rows, where),
            dense=dense,
            keys=self._key_columns(table, where),
        )

    def _table(self, row_group: int, piece: int) -> pa.Table:
        if row_group in self._pieces:
            return self._pieces[row_group].take(piece)
        # Verifying takes PyArrow longer than decoding: 8 of 14 ms for 65,536 Criteo samples (Zen 3, PyArrow 26).
        with self._opened(verifies=row_group not in self._verified) as file:
            table = file.read_row_group(row_group, columns=self._names, use_threads=False)
        # Two threads may each verify a row group once, which does no harm.
        self._verified.add(row_group)
        return table

    def _key_columns(self, table: pa.Table, where: str) -> tuple[Keys, ...]:
        columns: list[Keys] = []
        for field, most in zip(self._keys, self._layout.most_keys, strict=True):
            array = column_array(table, field.name, where)
            if is_list(field.type):
                values, offsets = lists_of_array(array)
                check_bag_lengths(np.diff(offsets), most, f"{where}, column {field.name!r}")
                columns.append(Ragged(_signed(values), offsets))
            else:
                columns.append(_signed(array.to_numpy()))
        return tuple(columns)

    def _opened_buffered(self) -> AbstractContextManager[Any]:
        """Open as `_opened` does, but without reading a complete column of a row group before its first rows."""
        return self._opened(buffer_bytes=_BUFFER_BYTES)

    @contextmanager
    def _opened(self, buffer_bytes: int = 0, *, verifies: bool = True) -> Iterator[Any]:
        """Open the file for each call: PyArrow's reader is not meant for several threads at once."""
        with (
            self._file.input() as source,  # a remote file is an object that holds a connection
            pq.ParquetFile(
                source, metadata=self._footer, buffer_size=buffer_bytes, page_checksum_verification=verifies
            ) as file,
        ):
            yield file


def _fields(schema: pa.Schema, positions: Sequence[int], path: str) -> list[pa.Field]:
    """Select the columns at `positions`."""
    fields = []
    for position in positions:
        if position >= len(schema):
            raise FormatError(path, f"holds {len(schema)} columns, expected one at index {position}")
        field = schema.field(position)
        if len(schema.get_all_field_indices(field.name)) > 1:
            raise FormatError(f"{path}, column {field.name!r}", "occurs twice, expected distinct names")
        fields.append(field)
    return fields


def _check_counts(metadata: ParquetMetadata, layout: RecordLayout, path: str) -> None:
    for what, positions, expected in (
        ("labels", metadata.labels, layout.label_dim),
        ("key columns (cats)", metadata.keys, layout.num_slots),
    ):
        if len(positions) != expected:
            raise FormatError(path, f"{metadata.path} names {len(positions)} {what}, expected {expected}")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _is_number_or_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind.value_type)) if is_list(kind) else _is_number(kind)


def _check_key_type(field: pa.Field, key_bytes: int, path: str) -> None:
    kind = field.type.value_type if is_list(field.type) else field.type
    if kind not in _KEY_TYPES[key_bytes]:
        expected = " or ".join(str(accepted) for accepted in _KEY_TYPES[key_bytes])
        raise FormatError(
            f"{path}, column {field.name!r}",
            f"type is {field.type}, expected {expected} ({key_bytes}-byte keys), or lists of it",
        )


def _signed(keys: NDArray[Any]) -> NDArray[Any]:
    """Return keys as int32 or int64; uint64 from 2^63 on becomes negative."""
    # 8-byte keys keep their bits, which are HugeCTR's keys; those of 4 bytes from 2^31 on need the wider type.
    return keys.astype(np.int64) if keys.dtype == np.uint32 else keys.view(np.int64) if keys.itemsize == 8 else keys


def _floats(table: pa.Table, fields: Sequence[pa.Field], num_rows: int, where: str) -> NDArray[np.float32]:
    """Return ``float32[num_rows, sum of widths]`` from number columns and lists of one length."""
    columns: list[NDArray[Any]] = []
    for field in fields:
        array = column_array(table, field.name, where)
        if is_list(field.type):
            columns += list(_matrix(array, num_rows, f"{where}, column {field.name!r}").T)
        else:
            columns.append(array.to_numpy(zero_copy_only=False))
    result = empty_from_pool((num_rows, len(columns)), np.float32)
    # Compiled: NumPy would write one column after the other, each number in another cache line.
    stack_columns([column if column.dtype in _STACKED else column.astype(np.float32) for column in columns], result)
    return result


def _matrix(array: pa.Array, num_rows: int, where: str) -> NDArray[Any]:
    """Return ``[num_rows, width]`` from lists of one length."""
    values, offsets = lists_of_array(array)
    lengths = np.diff(offsets)
    if (lengths != lengths[0]).any():
        row = int(np.argmax(lengths != lengths[0]))
        raise FormatError(where, f"row {row} holds {lengths[row]} numbers, expected {lengths[0]} as in row 0")
    matrix: NDArray[Any] = values.reshape(num_rows, int(lengths[0]))
    return matrix
