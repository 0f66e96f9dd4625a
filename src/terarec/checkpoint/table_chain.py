# SPDX-License-Identifier: Apache-2.0
"""Tables of a checkpoint and of the deltas that follow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.checkpoint.directory import (
    CHANGE_PIECES,
    KEYS,
    STATE_PREFIX,
    USE_PREFIX,
    WEIGHTS,
    FileEntry,
    Manifest,
)
from terarec.checkpoint.state import as_array
from terarec.checkpoint.table_files import (
    Arrays,
    TableFiles,
    TableShape,
    TableShare,
    files_by_table,
    keyed_of,
    prefixed,
    rows_of,
    shard_rows,
    tensors_of,
    vectors_of,
    write_memory,
)
from terarec.errors import ConfigError, FormatError
from terarec.formats.container import tensor_shapes
from terarec.formats.delta import TableChanges, read_changes, write_changes
from terarec.kernels.hash_index import HashIndex, new_hash_index
from terarec.memory.finite_rows import check_finite
from terarec.spec.checks import is_count
from terarec.storage import RowValues, Store

_NO_KEYS = np.empty(0, dtype=np.int64)
# Keys of a piece: 128 MiB.
_REMOVED_AT_ONCE = 1 << 24


def write_table_changes(checkpoint: Path, table: Store, share: TableShare | None = None) -> Iterator[FileEntry]:
    """Write the changes of a table after its ``changes_since``, in a bounded amount of memory."""
    first_file = 0 if share is None else share.first_file
    table_rows = share.num_rows if share is not None and table.is_dynamic else len(table)
    for index, changes in enumerate(_changes(table, table_rows), first_file):
        file = CHANGE_PIECES.name(table.name, index)
        sha256 = write_changes(checkpoint / file, changes)
        yield FileEntry(file=file, bytes=(checkpoint / file).stat().st_size, sha256=sha256)
    yield from write_memory(checkpoint, table, first_file)


def _changes(table: Store, table_rows: int) -> Iterator[TableChanges]:
    """Yield the changes, at least one piece: removed keys come before rows."""
    removed = _NO_KEYS if table.keyed is None else as_array(KEYS, table.keyed.removed_since())
    for begin in range(0, len(removed), _REMOVED_AT_ONCE):
        yield _piece(table, table_rows, removed[begin : begin + _REMOVED_AT_ONCE], None)
    # Each table has a file in each delta, so that a missing one differs from one without changes.
    is_empty = not len(removed)
    for rows in table.export_since(shard_rows(table)):
        is_empty = False
        yield _piece(table, table_rows, _NO_KEYS, rows)
        del rows  # before the next piece is copied
    if is_empty:
        yield _piece(table, table_rows, _NO_KEYS, None)


def _piece(table: Store, table_rows: int, removed: NDArray[np.int64], rows: RowValues | None) -> TableChanges:
    keys, values = _NO_KEYS, {}
    if rows is not None:
        check_finite(table.name, rows.keys, rows.weights)
        tensors = {WEIGHTS: rows.weights, **prefixed(STATE_PREFIX, rows.state), **prefixed(USE_PREFIX, rows.uses)}
        keys = as_array(KEYS, rows.keys)
        values = {name: as_array(name, tensor) for name, tensor in tensors.items()}
    return TableChanges(table=table.name, table_rows=table_rows, removed=removed, keys=keys, rows=values)


class TableChain:
    """The tables of a complete checkpoint with the changes of deltas."""

    def __init__(self, chain: Sequence[tuple[Path, Manifest]]) -> None:
        self._path, manifest = chain[0]
        self._base = TableFiles(self._path, manifest)
        self._newest = TableFiles(*chain[-1])
        self._deltas = [(path, files_by_table(manifest, CHANGE_PIECES.parse)) for path, manifest in chain[1:]]
        self.names = self._base.names
        for path, files in self._deltas:
            if set(files) != set(self.names):
                raise FormatError(path, f"holds changes of the tables {sorted(files)}, expected {sorted(self.names)}")

    def is_dynamic(self, table: str) -> bool:
        """Return whether a table is dynamic."""
        return self._base.is_dynamic(table)

    def is_in_tiers(self, table: str) -> bool:
        """Return whether a static table is stored with only its trained rows."""
        return not self.is_dynamic(table) and self._base.names_keys(table)

    def pieces(self, table: str) -> Iterator[Arrays]:
        """Yield the rows of a table; see `TableFiles.pieces`. After a delta all pieces have "keys".

        Raises:
            ConfigError: There is no such table.
            FormatError: A damaged file.
            StorageError: A damaged row file.
        """
        if table not in self.names:
            raise ConfigError(self._path, f"no table {table!r}, expected one of {', '.join(self.names)}")
        if not self._deltas:
            yield from self._base.pieces(table)
            return
        known = new_hash_index()  # keys whose newest row, or removal, came already
        # Newest first: the first row seen of a key is the one that counts, so each is read once and none is kept.
        for path, files in reversed(self._deltas):
            pieces = (_read(path, entry, table) for entry in files[table])
            removed = []
            for piece in pieces:
                removed.append(piece.removed)
                if len(piece.keys):
                    yield _take_unknown(known, {KEYS: piece.keys, **piece.rows})
            # Rows before removals, since a key that was removed and came again in the same delta has a row.
            for keys in removed:
                _take_unknown(known, {KEYS: keys})
        first = 0
        for arrays in self._base.pieces(table):
            count = len(arrays[WEIGHTS])
            # A static table in memory is saved without keys, which are the numbers of its rows.
            keys = arrays[KEYS] if KEYS in arrays else np.arange(first, first + count)
            yield _take_unknown(known, {**arrays, KEYS: keys})
            first += count

    def rows_after_delta(self) -> dict[str, int]:
        """Return the rows of each table after the newest delta; nothing without deltas."""
        return {name: self.num_rows(name) for name in self.names} if self._deltas else {}

    def num_rows(self, table: str) -> int:
        """Return the rows of a table, those that the files leave out included; of its files only a header is read."""
        if not self._deltas:
            return self._base.num_rows(table)
        path, files = self._deltas[-1]
        # Without its checksum: the reader of the rows compares it.
        num_rows = tensor_shapes(path / files[table][-1].file)[1].get("table_rows", "")
        if not is_count(num_rows):
            raise FormatError(path / files[table][-1].file, f"has the table_rows {num_rows!r}, expected a number")
        return int(num_rows)

    def shape(self, table: str) -> TableShape:
        """Return the size of a table; see `TableFiles.shape`. Deltas give a static one in tiers at most these rows."""
        shape = self._base.shape(table)
        if self._deltas and shape.seed is None:
            return replace(shape, num_rows=self.num_rows(table))
        if self._deltas and shape.seed is not None:
            shapes = [tensor_shapes(path / e.file)[0][KEYS] for path, files in self._deltas for e in files[table]]
            return replace(shape, num_rows=shape.num_rows + sum(count for count, *_ in shapes))
        return shape

    def rows(self, table: str) -> Iterator[RowValues]:
        """Yield the keys and weights of a table, one piece at a time; errors are those of `pieces`."""
        return vectors_of(self.pieces(table))

    def changes(self, table: str, num_deltas: int) -> Iterator[tuple[Tensor, RowValues | None]]:
        """Yield the changes of a table by the last `num_deltas` deltas, in their order.

        Yields:
            Keys int64[m] that lose their rows; then keys and weights of rows that are set, None for none.
        """
        for path, files in self._deltas[len(self._deltas) - num_deltas :]:
            for entry in files[table]:
                part = _read(path, entry, table)
                rows = None
                if len(part.keys):
                    [rows] = vectors_of([{KEYS: part.keys, **part.rows}])
                yield torch.from_numpy(part.removed), rows

    def memories(self, table: str) -> Iterator[Arrays]:
        """Yield the pieces of a dynamic table's memory."""
        return self._newest.memories(table)

    def load(self, table: Store, *, with_state: bool) -> None:
        """Overwrite the rows of a table, which may have further ones; see `Checkpoint.load_tables`."""
        of_rows = None if self.is_dynamic(table.name) else min(self._base.num_rows(table.name), len(table))
        self._base.load(table, with_state=with_state, of_rows=of_rows)
        for path, files in self._deltas:
            table_rows = len(table)
            for entry in files[table.name]:
                changes = _read(path, entry, table.name)
                table_rows = changes.table_rows
                if len(changes.removed):
                    # Before the rows: a key that was removed and came again in this delta has one.
                    keyed_of(table, path).remove(torch.from_numpy(changes.removed))
                if len(changes.keys):
                    rows = rows_of(tensors_of({KEYS: changes.keys, **changes.rows}), 0)
                    table.import_(rows if with_state else RowValues(keys=rows.keys, weights=rows.weights))
            # A part holds the rows of this process alone; the delta counts those of all. A static table may grow later.
            if table.is_dynamic and len(table) != table_rows and not table.is_part:
                raise FormatError(path, f"leads to {len(table)} rows of table {table.name!r}, expected {table_rows}")
        for piece in self.memories(table.name) if with_state else ():
            keyed_of(table, self._newest.path).import_memory(tensors_of(piece))


def _read(path: Path, entry: FileEntry, table: str) -> TableChanges:
    changes = read_changes(path / entry.file, sha256=entry.sha256)
    if changes.table != table:
        raise FormatError(path / entry.file, f"holds changes of table {changes.table!r}, expected {table!r}")
    return changes


def _take_unknown(known: HashIndex, arrays: Arrays) -> Arrays:
    """Return the rows of `arrays` whose keys are not known, and make them known."""
    keys = torch.from_numpy(arrays[KEYS])
    is_new = known.find(keys) < 0
    # The index serves as a set, so that its rows do not matter.
    known.assign(keys[is_new], torch.zeros(int(is_new.sum()), dtype=torch.int64))
    return {name: array[is_new.numpy()] for name, array in arrays.items()}
