# SPDX-License-Identifier: Apache-2.0
"""The tables of an embedding collection as a folder, from release 4.2 on. See docs/hugectr-formats.md."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from terarec.errors import DataNotFoundError, FormatError
from terarec.formats.hugectr.fields import PlainFile, as_bytes, check_key_range, open_plain, spans
from terarec.formats.hugectr.weights import CHUNK_ROWS, SparseRows
from terarec.io.directories import atomic_dir
from terarec.io.exchange import end_replacement
from terarec.io.opening import open_file, read_bytes

META = "meta_data"
COLLECTION_FILES = rf"{META}|(key|weight)\d+"
"""Pattern of the names in a dump."""
HEADER_BYTES = 128
_KEY_FILE, _WEIGHT_FILE = 1, 2  # first number of a header
# Number of tables, type of keys, type of vectors, 0, largest width.
_HEAD = struct.Struct("<5i")
_KEY_TYPES = (np.dtype("<u4"), np.dtype("<i8"))
_VALUE_TYPES = (np.dtype("<f4"), np.dtype("<f2"))
_WIDEST = 2**29 - 1  # of whose floats NumPy makes a type


@dataclass(frozen=True, slots=True)
class DumpedTable:
    """Table of a dump: its number in the collection, keys, and width of its vectors."""

    table_id: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class CollectionDump:
    """Dump of which only the metadata was read.

    Attributes:
        path: Path of the folder ``embedding_collection_<number>``.
        key_type: uint32 or int64.
        value_type: float32 or float16.
        tables: Tables, ascending in `table_id`.
    """

    path: Path
    key_type: np.dtype[Any]
    value_type: np.dtype[Any]
    tables: tuple[DumpedTable, ...]

    def chunks(self, table: DumpedTable, chunk_rows: int = CHUNK_ROWS) -> Iterator[SparseRows]:
        """Yield the rows of a table in file order, at most `chunk_rows` at a time.

        Raises:
            DataNotFoundError: A file is missing.
            FormatError: A header of another file, or more or fewer rows than ``meta_data`` says.
        """
        record = np.dtype((self.value_type, table.width))
        keys = _open(self.path, f"key{table.table_id}", self.key_type, _KEY_FILE, table)
        vectors = _open(self.path, f"weight{table.table_id}", record, _WEIGHT_FILE, table)
        for start, stop in spans(table.count, chunk_rows):
            # Two files side by side: row i of one belongs to row i of the other.
            yield SparseRows(keys.read(start, stop).astype(np.int64), vectors.read(start, stop).astype(np.float32))


def write_collection(
    path: Path, tables: Sequence[DumpedTable], chunks: Callable[[DumpedTable], Iterator[SparseRows]], *, key_bytes: int
) -> None:
    """Write a dump, replacing an existing one.

    Args:
        path: Path of the folder ``embedding_collection_<number>``.
        tables: Tables, ascending in `table_id`.
        chunks: Table -> its rows, ``table.count`` in all.
        key_bytes: Bytes of a key: 4 for uint32, 8 for int64.

    Raises:
        ConfigError: `path` is a file, or a folder with other files in it.
        FormatError: A key that 4 bytes do not hold; nothing is left behind.
        StorageError: The disk is full; nothing is left behind.
    """
    key_type = _KEY_TYPES[key_bytes == 8]
    with atomic_dir(path, replaceable=COLLECTION_FILES) as partial:
        for table in tables:
            with ExitStack() as stack:
                keys = stack.enter_context((partial / f"key{table.table_id}").open("wb"))
                vectors = stack.enter_context((partial / f"weight{table.table_id}").open("wb"))
                keys.write(_header(_KEY_FILE, table))
                vectors.write(_header(_WEIGHT_FILE, table))
                for chunk in chunks(table):
                    check_key_range(chunk.keys, key_bytes, f"{path}, table {table.table_id}")
                    keys.write(as_bytes(chunk.keys, key_type))
                    vectors.write(as_bytes(chunk.vectors, _VALUE_TYPES[0]))
        (partial / META).write_bytes(_meta(tables, key_bytes))


def open_collection(path: Path) -> CollectionDump:
    """Read ``meta_data``.

    Raises:
        DataNotFoundError: No such folder, or none of this format.
        FormatError: A size or a number that does not fit the others.
    """
    end_replacement(path)
    meta = path / META
    try:
        content = read_bytes(meta)
    except DataNotFoundError:
        raise DataNotFoundError(meta, "no such file, expected a dump of an embedding collection") from None
    count = _HEAD.unpack_from(content)[0] if len(content) >= _HEAD.size else 0
    # The size follows from the number of tables: nothing else shows a file that was cut short.
    if count < 1 or len(content) != _HEAD.size + 16 * count:
        raise FormatError(meta, f"holds {len(content)} bytes and {count} tables, expected {_HEAD.size} + 16 a table")
    _, key, value, _, _ = _HEAD.unpack_from(content)
    if key not in (0, 1) or value not in (0, 1):
        raise FormatError(meta, f"got key type {key} at byte 4 and value type {value} at byte 8, expected 0 or 1")
    # Three arrays one after the other, not records: ids, then numbers of keys, then widths.
    rest = content[_HEAD.size :]
    ids, counts = np.frombuffer(rest, "<i4", count), np.frombuffer(rest, "<u8", count, 4 * count)
    widths = np.frombuffer(rest, "<i4", count, 12 * count)
    widths_fit = (widths >= 1).all() and (widths <= _WIDEST).all()
    if not widths_fit or (ids < 0).any() or max(Counter(ids.tolist()).values()) > 1:
        raise FormatError(
            meta,
            f"got tables {ids.tolist()} of widths {widths.tolist()}, expected distinct ids >= 0 and "
            f"widths from 1 to {_WIDEST}",
        )
    tables = sorted(map(DumpedTable, ids.tolist(), counts.tolist(), widths.tolist()), key=lambda table: table.table_id)
    return CollectionDump(path, _KEY_TYPES[key], _VALUE_TYPES[value], tuple(tables))


def _meta(tables: Sequence[DumpedTable], key_bytes: int) -> bytes:
    widest = max(table.width for table in tables)
    # The fourth word is always 0; readers ignore the last one, the largest width.
    head = _HEAD.pack(len(tables), int(key_bytes == 8), 0, 0, widest)
    columns = (
        np.array([table.table_id for table in tables], "<i4"),
        np.array([table.count for table in tables], "<u8"),
        np.array([table.width for table in tables], "<i4"),
    )
    return head + b"".join(column.tobytes() for column in columns)


def _header(kind: int, table: DumpedTable) -> bytes:
    return struct.pack("<2i", kind, table.table_id).ljust(HEADER_BYTES, b"\0")


def _open(folder: Path, name: str, dtype: np.dtype[Any], kind: int, table: DumpedTable) -> PlainFile:
    path = folder / name
    file = open_plain(path, dtype, header_bytes=HEADER_BYTES)
    # The header names kind and table, so that a file under another one's name is found.
    with open_file(path) as stream:
        numbers = struct.unpack("<2i", stream.read(8))
    if numbers != (kind, table.table_id):
        raise FormatError(path, f"starts with {list(numbers)}, expected {[kind, table.table_id]}: kind and table")
    if file.count != table.count:
        raise FormatError(path, f"holds {file.count} rows, expected {table.count} by {META}")
    return file
