# SPDX-License-Identifier: Apache-2.0
"""Parquet shards. The format is described in docs/formats.md."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import FormatError, StorageError, TerarecError
from terarec.formats.arrays import is_list, is_number, plain_column, value_type
from terarec.formats.block import (
    METADATA_TYPES,
    ColumnBlock,
    Keys,
    check_keys,
    check_weights,
    default_group_rows,
    key_dtype,
    metadata_array,
)
from terarec.formats.integers import accepted_integers, integers_of_floats
from terarec.formats.shard import SHARD_FORMATS, ShardFormat, ShardWriter
from terarec.io.opening import arrow_file
from terarec.ragged import ArrayLists, Ragged
from terarec.spec import CategoricalColumn, DatasetSpec
from terarec.spec.checks import did_you_mean


def check_row_count(table: pa.Table, expected: int, where: str) -> None:
    """Check the number of rows against the file's footer, which has no checksum.

    Raises:
        FormatError: They are more or fewer; the message starts with `where`.
    """
    if table.num_rows != expected:
        raise FormatError(where, f"holds {table.num_rows} rows, expected {expected} as the file's footer says")


def column_array(table: pa.Table, name: str, where: str) -> pa.Array:
    """Return the column `name` in one piece.

    Raises:
        FormatError: It holds nulls; the message starts with `where`.
    """
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies even one chunk
    # A list of nulls is not null itself: its values are counted apart.
    nulls = array.null_count or (array.flatten().null_count if is_list(array.type) else 0)
    if nulls:
        raise FormatError(f"{where}, column {name!r}", f"{nulls} {'null' if nulls == 1 else 'nulls'}, expected none")
    return array


def lists_of_array(array: pa.Array) -> ArrayLists:
    """Return the lists of an array of any of Arrow's list types."""
    if pa.types.is_fixed_size_list(array.type):
        offsets = array.type.list_size * np.arange(len(array) + 1, dtype=np.int64)
        return Ragged(array.flatten().to_numpy(), offsets)
    # A slice of an Arrow array keeps all values, so that its first offset need not be 0.
    offsets = array.offsets.to_numpy().astype(np.int64)
    return Ragged(array.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])


@contextmanager
def arrow_errors(where: str, kind: str = "Parquet") -> Iterator[None]:
    """Convert PyArrow's errors about a damaged file of a kind to `FormatError`, whose message starts with `where`.

    Raises:
        FormatError: A damaged file.
        StorageError: The process, or the system, has too many open files.
    """
    try:
        yield
    except TerarecError:  # of a missing file, which is an OSError as well
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last from names of columns
        reason = str(error).splitlines()[0]
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):  # it says nothing about the file
            raise StorageError(where, reason) from error
        raise FormatError(where, f"cannot be read as {kind} ({reason}), expected a complete {kind} file") from error


class GroupBuffer:
    """Column-major buffer of one row group; filling it copies, so callers may reuse their arrays."""

    def __init__(self, spec: DatasetSpec, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self._label = np.empty((len(spec.labels), capacity), dtype=np.float32)
        self._dense = np.empty((len(spec.dense), capacity), dtype=np.float32)
        dtype = key_dtype(spec)
        # Room for the most keys that the rows may have, so that filling never allocates.
        self._values = [np.empty(capacity * column.hotness, dtype=dtype) for column in spec.categorical]
        self._offsets = [
            np.zeros(capacity + 1, dtype=np.int32) if column.hotness > 1 else None for column in spec.categorical
        ]
        self._weight = None if spec.weight is None else np.empty(capacity, dtype=np.float32)
        self._metadata: list[list[pa.Array]] = [[] for _ in spec.metadata]

    @property
    def full(self) -> bool:
        """True if no further row fits."""
        return self.num_rows == self.capacity

    def fill(self, rows: ColumnBlock, start: int) -> int:
        """Copy rows from row `start` on, as many as fit, and return their number."""
        count = min(self.capacity - self.num_rows, rows.num_rows - start)
        here = slice(self.num_rows, self.num_rows + count)
        there = slice(start, start + count)
        self._label[:, here] = rows.label[there].T
        self._dense[:, here] = rows.dense[there].T
        for values, offsets, column in zip(self._values, self._offsets, rows.keys, strict=True):
            if isinstance(column, Ragged):
                assert offsets is not None
                new_values, new_offsets = column
                first, last = int(new_offsets[start]), int(new_offsets[start + count])
                base = int(offsets[self.num_rows])
                values[base : base + last - first] = new_values[first:last]
                # Offsets count from the start of the buffer, those of the rows from the start of their block.
                offsets[here.start + 1 : here.stop + 1] = new_offsets[start + 1 : start + count + 1] - (first - base)
            else:
                values[here] = column[there]
        if self._weight is not None:
            self._weight[here] = rows.weight[there]  # type: ignore[index]
        for pieces, array in zip(self._metadata, rows.metadata, strict=True):
            pieces.append(array[there])
        self.num_rows += count
        return count

    def float_columns(self) -> list[NDArray[np.float32]]:
        """Return label and dense columns, float32[n] each, as views that the next `fill` overwrites."""
        return [column[: self.num_rows] for block in (self._label, self._dense) for column in block]

    def key_columns(self) -> list[NDArray[Any] | Ragged[NDArray[Any], NDArray[np.int32]]]:
        """Return key columns: keys[n], or lists with offsets int32; views that the next `fill` overwrites."""
        columns: list[NDArray[Any] | Ragged[NDArray[Any], NDArray[np.int32]]] = []
        for values, offsets in zip(self._values, self._offsets, strict=True):
            if offsets is None:
                columns.append(values[: self.num_rows])
            else:
                columns.append(Ragged(values[: offsets[self.num_rows]], offsets[: self.num_rows + 1]))
        return columns

    def sample_columns(self) -> list[pa.Array]:
        """Return metadata columns and the weight column, if any, as a view that the next `fill` overwrites."""
        weight = [] if self._weight is None else [pa.array(self._weight[: self.num_rows])]
        return weight + [pa.concat_arrays(pieces) for pieces in self._metadata]

    def take(self, schema: pa.Schema) -> pa.Table:
        """Remove all rows and return them as a table of `schema`, whose memory the next `fill` overwrites."""
        arrays = [pa.array(column) for column in self.float_columns()]
        arrays += [_to_arrow(keys) for keys in self.key_columns()]
        arrays = [array.cast(field.type) for array, field in zip(arrays, schema, strict=False)]
        arrays += self.sample_columns()
        self.clear()
        return pa.Table.from_arrays(arrays, schema=schema)

    def clear(self) -> None:
        """Remove all rows."""
        self.num_rows = 0
        for pieces in self._metadata:
            pieces.clear()


_KEY_TYPES = (pa.int32(), pa.int64())


def arrow_schema(spec: DatasetSpec) -> pa.Schema:
    """Return the schema of a Parquet shard.

    Labels, dense columns and the weight are float32, keys int32 or int64 (lists of them where hotness > 1), metadata
    int64, double or text; metadata alone may be null.
    """
    key_type = pa.from_numpy_dtype(key_dtype(spec))
    floats = spec.column_names[: len(spec.labels) + len(spec.dense)]
    fields = [pa.field(name, pa.float32(), nullable=False) for name in floats]
    for column in spec.categorical:
        listed = pa.list_(pa.field("element", key_type, nullable=False))
        fields.append(pa.field(column.name, listed if column.hotness > 1 else key_type, nullable=False))
    if spec.weight is not None:
        fields.append(pa.field(spec.weight, pa.float32(), nullable=False))
    metadata = zip(spec.metadata_file_columns, spec.metadata, strict=True)
    fields += [pa.field(name, METADATA_TYPES[column.type]) for name, column in metadata]
    return pa.schema(fields)


def _writer_options(spec: DatasetSpec) -> dict[str, Any]:
    """Return the encoding of the columns: see "Measured" in docs/formats.md.

    Ids in the order of their frequency are small numbers, which deltas pack as well as dictionaries do, and faster;
    dictionaries suit the few values of logarithms of counts, and keys that are any 64-bit number. Statistics of 40
    narrow columns would never be read: a shard is scanned, not searched.
    """
    paths = {column: column.name + ".list.element" * (column.hotness > 1) for column in spec.categorical}
    packed = [path for column, path in paths.items() if column.rows is not None]
    floats = spec.column_names[: len(spec.labels) + len(spec.dense)]
    any_keys = (path for column, path in paths.items() if column.rows is None)
    in_dictionaries = [*floats, *any_keys, *spec.file_columns[len(spec.column_names) :]]
    return {
        "compression": dict.fromkeys(in_dictionaries, "snappy"),
        "use_dictionary": in_dictionaries,
        "column_encoding": dict.fromkeys(packed, "DELTA_BINARY_PACKED"),
        "write_statistics": False,
        # Of each page, which is what a reader decodes: nothing else in a Parquet file shows a flipped bit.
        "write_page_checksum": True,
        # Arrow's own description of the schema says nothing that the types of these columns do not.
        "store_schema": False,
    }


class ParquetShardWriter(ShardWriter):
    """Writer of a Parquet shard; see `ShardWriter`.

    Args:
        path: ``<data set>/<split>/<file>.parquet``.
        spec: Columns of the data set.
        rows_per_group: Rows of a row group; None takes `default_group_rows`.
    """

    def __init__(self, path: Path, spec: DatasetSpec, *, rows_per_group: int | None = None) -> None:
        super().__init__(path, spec)
        self._schema = arrow_schema(spec)
        self._buffer = GroupBuffer(spec, rows_per_group or default_group_rows(spec))
        with self._file.guard():
            self._writer = pq.ParquetWriter(self._file.partial, self._schema, **_writer_options(spec))

    @override
    def _append(self, rows: ColumnBlock) -> None:
        done = 0
        while done < rows.num_rows:
            done += self._buffer.fill(rows, done)
            if self._buffer.full:
                self._write_group()

    @override
    def _finish(self) -> None:
        if self._buffer.num_rows:
            self._write_group()
        with self._file.guard():
            self._writer.close()

    @override
    def _discard(self) -> None:
        with suppress(OSError):  # closing writes the footer, which fails on a full disk
            self._writer.close()

    def _write_group(self) -> None:
        table = self._buffer.take(self._schema)
        with self._file.guard():
            self._writer.write_table(table, row_group_size=table.num_rows)


class ParquetShard:
    """Parquet shard, read row group by row group from any thread.

    Args:
        path: Path of the file.
        spec: Columns of the data set.
        num_rows: Rows that ``dataset.json`` promises; None for the file's own number.

    Raises:
        DataNotFoundError: There is no such file.
        FormatError: Not a Parquet file, cut short, a column missing or of another type, another number of rows.
    """

    def __init__(self, path: Path, spec: DatasetSpec, num_rows: int | None = None) -> None:
        self.path = path
        self._spec = spec
        with arrow_errors(str(path)), arrow_file(path) as file:
            self._metadata = pq.read_metadata(file)
            schema = self._metadata.schema.to_arrow_schema()
        check_schema(schema, spec, str(path))
        if num_rows is not None and self._metadata.num_rows != num_rows:
            raise FormatError(path, f"holds {self._metadata.num_rows} rows, expected {num_rows} (dataset.json)")
        self.num_rows: int = self._metadata.num_rows
        self.group_rows: tuple[int, ...] = tuple(
            self._metadata.row_group(index).num_rows for index in range(self._metadata.num_row_groups)
        )

    def read_group(self, index: int) -> ColumnBlock:
        """Return the checked rows of row group `index`.

        Raises:
            FormatError: A damaged page, a null, a key outside its column's rows, too many keys, or a weight that is
                negative or not finite.
        """
        where = f"{self.path}: row group {index}"
        spec = self._spec
        # A file handle of its own for every call: PyArrow's reader is not meant for several threads at once.
        with (
            arrow_errors(where),
            # The footer was read once; that of a file with many columns and groups takes long to parse.
            arrow_file(self.path) as source,
            pq.ParquetFile(source, metadata=self._metadata, page_checksum_verification=True) as file,
        ):
            # Without threads of Arrow: the threads of a reader decode several groups at a time already.
            table = file.read_row_group(index, columns=list(spec.file_columns), use_threads=False)
        check_row_count(table, self.group_rows[index], where)
        return decode_table(table, spec, where)


def cast_table(table: pa.Table, spec: DatasetSpec, where: str) -> pa.Table:
    """Return the file columns of a data set from a table of any writer, in the types of its shards.

    Raises:
        FormatError: A column that is missing, or does not cast without loss; NaN, or a number beyond float32.
    """
    arrays = []
    schema = arrow_schema(spec)
    for field in schema:
        if field.name not in table.column_names:
            hint = did_you_mean(field.name, table.column_names)
            raise FormatError(f"{where}, column {field.name!r}", f"missing{hint}, expected the columns of the data set")
        column = plain_column(table.column(field.name))
        # Arrow's cast reads texts as numbers, which no file's are, and times as those of their unit.
        if not _may_be_cast(value_type(column.type), value_type(field.type)):
            raise FormatError(f"{where}, column {field.name!r}", f"type is {column.type}, expected {field.type}")
        try:
            if pa.types.is_integer(value_type(field.type)):
                _check_integers(column)
            # Numbers are rounded to float32, as preparation rounds them, which reads integers as float64.
            if field.type == pa.float32() and not pa.types.is_floating(column.type):
                column = column.cast(pa.float64(), safe=False)
            array = column.cast(field.type, safe=field.type != pa.float32())
        except pa.ArrowException as error:
            reason = " ".join(str(error).split())
            raise FormatError(
                f"{where}, column {field.name!r}", f"type is {column.type} ({reason}), expected {field.type}"
            ) from None
        row = pc.index(pc.is_finite(array), False).as_py() if field.type == pa.float32() else -1
        if row >= 0:
            problem = f"got {column[row]}, expected a number that float32 holds"
            raise FormatError(f"{where}, row {row}, column {field.name!r}", problem)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


def _may_be_cast(kind: pa.DataType, to: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    if pa.types.is_large_string(to):
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
    return is_number(kind) or bool(pa.types.is_boolean(kind))


def _check_integers(column: pa.ChunkedArray) -> None:
    """Raise `ArrowInvalid` if floats are no integers that their type tells from the next, which Arrow's cast takes."""
    for chunk in column.chunks if pa.types.is_floating(value_type(column.type)) else ():
        while is_list(chunk.type):
            chunk = chunk.flatten()
        floats = chunk.to_numpy(zero_copy_only=False)
        bad = integers_of_floats(floats)[1]
        if bad.any():
            raise pa.ArrowInvalid(f"{floats[bad][0]} is not {accepted_integers(floats.dtype)}")


def decode_table(table: pa.Table, spec: DatasetSpec, where: str) -> ColumnBlock:
    """Return the checked rows of a table of the file columns of a data set.

    Args:
        table: Columns of `DatasetSpec.file_columns`, in any order.
        spec: Columns of the data set.
        where: Beginning of errors.

    Raises:
        FormatError: A null, a key outside its column's rows, too many keys, or a weight that is negative or not finite.
    """
    num_rows = table.num_rows
    label = np.empty((num_rows, len(spec.labels)), dtype=np.float32)
    # Samples are rows in memory, since a batch is a slice of them; the file has columns.
    dense = np.empty((num_rows, len(spec.dense)), dtype=np.float32)
    floats = (*label.T, *dense.T)  # writable views of the matrices' columns
    for name, target in zip(spec.column_names, floats, strict=False):
        target[:] = column_array(table, name, where).to_numpy()
    keys = tuple(_keys(column_array(table, column.name, where), column, where) for column in spec.categorical)
    weight = None
    if spec.weight is not None:
        weight = column_array(table, spec.weight, where).to_numpy()
        check_weights(spec.weight, weight, where)
    metadata = tuple(
        metadata_array(table.column(name), column, where)
        for name, column in zip(spec.metadata_file_columns, spec.metadata, strict=True)
    )
    return ColumnBlock(label=label, dense=dense, keys=keys, weight=weight, metadata=metadata)


def _to_arrow(keys: NDArray[Any] | Ragged[NDArray[Any], NDArray[np.int32]]) -> pa.Array:
    if isinstance(keys, Ragged):
        return pa.ListArray.from_arrays(pa.array(keys.offsets), pa.array(keys.values))
    return pa.array(keys)


def _keys(array: pa.Array, column: CategoricalColumn, where: str) -> Keys:
    keys: Keys = lists_of_array(array) if column.hotness > 1 else array.to_numpy()
    check_keys(column, keys, where)
    return keys


def check_schema(schema: pa.Schema, spec: DatasetSpec, where: str) -> None:
    """Raise `FormatError` unless a file has the columns of a data set, each once and of its type."""
    hotness = {column.name: column.hotness for column in spec.categorical}
    metadata = {name: column.type for name, column in zip(spec.metadata_file_columns, spec.metadata, strict=True)}
    for name in spec.file_columns:
        # Parquet allows one name several times, of which `field` would return any.
        count = len(schema.get_all_field_indices(name))
        if count != 1:
            fault = "missing" if count == 0 else f"there {count} times"
            raise FormatError(f"{where}, column {name!r}", f"{fault}, expected the columns of dataset.json")
        found_type = schema.field(name).type
        if name in metadata:
            # Other writers have `string`, with 32-bit offsets; `metadata_array` widens it.
            accepted = {METADATA_TYPES[metadata[name]]} | ({pa.string()} if metadata[name] == "string" else set())
            good, expected = found_type in accepted, str(metadata[name])
        elif name not in hotness:
            good, expected = found_type == pa.float32(), "float"
        elif hotness[name] == 1:
            good, expected = found_type in _KEY_TYPES, "int32 or int64"
        else:
            good = pa.types.is_list(found_type) and found_type.value_type in _KEY_TYPES
            expected = "list of int32 or int64"
        if not good:
            raise FormatError(f"{where}, column {name!r}", f"type is {found_type}, expected {expected}")


SHARD_FORMATS.add("parquet", ShardFormat(suffix=".parquet", open=ParquetShard, create=ParquetShardWriter))
