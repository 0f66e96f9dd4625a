# SPDX-License-Identifier: Apache-2.0
"""The rows of tables in a checkpoint: tensor containers of rows, or a row file that shares the segments of a tier."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from terarec.checkpoint.directory import (
    KEYS,
    MEMORY_PIECES,
    STATE_PREFIX,
    TABLE_PIECES,
    USE_PREFIX,
    WEIGHTS,
    FileEntry,
    Manifest,
    RowFileEntry,
    row_file_directory,
)
from terarec.checkpoint.state import as_array, as_tensor
from terarec.closer import stream
from terarec.errors import ConfigError, FormatError
from terarec.formats.container import read_tensors, tensor_shapes, write_tensors
from terarec.io.opening import read_bytes
from terarec.memory.finite_rows import check_finite
from terarec.memory.row_file import MANIFEST_FILE, SEGMENT_SUFFIX, RowFile
from terarec.memory.row_format import DESCRIPTION_FILE, RowFileLayout, RowFormat, read_description
from terarec.spec.checks import is_count
from terarec.storage import RowValues, Store
from terarec.storage.store import KeyedRows, TableRows

SHARD_BYTES = 64 * 2**20
"""Most bytes of rows in one file: the memory that loading needs in addition to the tables."""
_MEMORY_KEY_BYTES = 16  # a key that waits for admission, with its count
_SCANNED_BYTES = 16 * 2**20

Arrays = dict[str, NDArray[Any]]


def write_container(
    checkpoint: Path, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileEntry:
    """Write tensors to a file of a checkpoint, which is flushed as a whole."""
    arrays = {name: as_array(name, tensor) for name, tensor in tensors.items()}
    sha256 = write_tensors(checkpoint / file, arrays, metadata, flushes=False)
    return FileEntry(file=file, bytes=(checkpoint / file).stat().st_size, sha256=sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShare:
    """Place of the rows that one of several writers has among all rows of a table.

    Attributes:
        first_row: Rows of the writers before it.
        num_rows: Rows of all writers.
        first_file: Number of its first file.
    """

    first_row: int
    num_rows: int
    first_file: int


def write_table(
    checkpoint: Path, table: Store, share: TableShare | None = None
) -> tuple[list[FileEntry], RowFileEntry | None]:
    """Write a table in a bounded amount of memory.

    Returns:
        Its files and, if its rows lie in files already, the row file that shares them.
    """
    row_file = _write_row_file(checkpoint, table)
    if row_file is None:
        files = list(_write_pieces(checkpoint, table, share))
    else:
        files = list(_write_keys(checkpoint, table, row_file))
    return [*files, *write_memory(checkpoint, table, 0 if share is None else share.first_file)], row_file


def write_memory(checkpoint: Path, table: Store, first_file: int = 0) -> Iterator[FileEntry]:
    """Write the state of a dynamic table other than rows, to files from number `first_file` on."""
    pieces = () if table.keyed is None else table.keyed.export_memory(SHARD_BYTES // _MEMORY_KEY_BYTES)
    for index, piece in enumerate(pieces, first_file):
        yield write_container(checkpoint, MEMORY_PIECES.name(table.name, index), piece, {"table": table.name})


def keyed_of(table: Store, path: Path) -> KeyedRows:
    """Return the keys of a table for which `path` has some, or raise `FormatError` for a static one."""
    if table.keyed is None:
        raise FormatError(path, f"has keys of table {table.name!r}, which is static, expected its rows alone")
    return table.keyed


def shard_rows(table: TableRows) -> int:
    """Return how many rows of a table a file takes."""
    return max(1, SHARD_BYTES // table.row_bytes)


def _write_pieces(checkpoint: Path, table: Store, share: TableShare | None) -> Iterator[FileEntry]:
    # A writer of its own numbers files from 0; of several, each has a range of numbers.
    share = share or TableShare(first_row=0, num_rows=table.num_changed, first_file=0)
    first, num_rows, seed = share.first_row, share.num_rows, table.initial_seed
    index = share.first_file
    # Not `enumerate`, which keeps a piece while the next one is copied.
    for rows in table.export_changed(shard_rows(table)):
        check_finite(table.name, rows.keys, rows.weights)
        tensors = {WEIGHTS: rows.weights, **prefixed(STATE_PREFIX, rows.state), **prefixed(USE_PREFIX, rows.uses)}
        metadata = {"table": table.name, "rows": str(num_rows)}
        if table.is_dynamic or seed is not None:
            tensors[KEYS] = rows.keys
            metadata["first_row"] = str(first)
            metadata |= {} if seed is None else {"of_rows": str(len(table)), "seed": str(seed)}
        else:
            metadata["first_key"] = str(first)
        yield write_container(checkpoint, TABLE_PIECES.name(table.name, index), tensors, metadata)
        first, index = first + len(rows.keys), index + 1
        del rows, tensors  # before the next piece is copied


def _write_row_file(checkpoint: Path, table: Store) -> RowFileEntry | None:
    name = row_file_directory(table.name)
    if not table.snapshot(checkpoint / name):
        return None
    # After `snapshot`, which sends changed rows of other tiers to the files.
    num_bytes = sum(path.stat().st_size for path in (checkpoint / name).glob(f"*{SEGMENT_SUFFIX}"))
    rows, of_rows = table.num_changed, None if table.is_dynamic else len(table)
    return RowFileEntry(
        table=table.name,
        directory=name,
        bytes=num_bytes,
        rows=rows,
        of_rows=of_rows,
        seed=table.initial_seed,
    )


def _write_keys(checkpoint: Path, table: Store, row_file: RowFileEntry) -> Iterator[FileEntry]:
    """Write the description of a row file and, for a dynamic table, all keys and their uses."""
    for name in (DESCRIPTION_FILE, MANIFEST_FILE):
        # These two alone have a checksum in the manifest: pages of segments have their own, and segments, which are
        # mostly links, would have to be read for it.
        content = read_bytes(checkpoint / row_file.directory / name)
        sha256 = hashlib.sha256(content).hexdigest()
        yield FileEntry(file=f"{row_file.directory}/{name}", bytes=len(content), sha256=sha256)
    if table.keyed is None:
        return
    first, num_rows = 0, len(table)
    for index, (keys, uses) in enumerate(table.keyed.export_keys(SHARD_BYTES // _MEMORY_KEY_BYTES)):
        metadata = {"table": table.name, "rows": str(num_rows), "first_row": str(first)}
        tensors = {KEYS: keys, **prefixed(USE_PREFIX, uses)}
        yield write_container(checkpoint, TABLE_PIECES.name(table.name, index), tensors, metadata)
        first += len(keys)


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under names that begin with `prefix`."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """Size of a table in a checkpoint.

    Attributes:
        num_rows: Rows in the files.
        width: Length D of a vector.
        seed: Seed of the initial weights of all rows that the files leave out; None if they hold all rows.
    """

    num_rows: int
    width: int
    seed: int | None


class TableFiles:
    """The tables of a checkpoint; each file is compared with its checksum when it is read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self._pieces = files_by_table(manifest, TABLE_PIECES.parse)
        self._memories = files_by_table(manifest, MEMORY_PIECES.parse)
        self._row_files = {entry.table: entry for entry in manifest.row_files}
        self._entries = {entry.file: entry for entry in manifest.files}
        # A dynamic table in a row file has both: pieces with its keys, and the rows.
        self.names = list(dict.fromkeys([*self._pieces, *self._row_files]))

    def is_dynamic(self, table: str) -> bool:
        """Return whether a table is dynamic."""
        return table in self._memories

    def names_keys(self, table: str) -> bool:
        """Return whether the rows of a table come with their keys."""
        first = self._pieces.get(table, [])[:1]
        return table in self._row_files or any(KEYS in tensor_shapes(self.path / entry.file)[0] for entry in first)

    def row_file_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return table -> (rows, width, bytes of a row's weights) of the tables in row files."""
        formats = {name: RowFormat.of_columns(self._layout(entry).columns) for name, entry in self._row_files.items()}
        return {
            name: (self._row_files[name].rows, row_format.width, row_format.width * row_format.dtype.itemsize)
            for name, row_format in formats.items()
        }

    def pieces(self, table: str) -> Iterator[Arrays]:
        """Yield the rows of a table: "weights" [n, D], "keys" int64[n] if not all rows in order, state and uses.

        Raises:
            ConfigError: The checkpoint has no such table.
            FormatError: A damaged file.
            StorageError: A damaged row file.
        """
        self._check_name(table)
        if table not in self._row_files:
            yield from (self._read(entry)[0] for entry in self._pieces[table])
            return
        for rows in self._rows_of_file(self._row_files[table]):
            tensors = {KEYS: rows.keys, WEIGHTS: rows.weights, **prefixed(STATE_PREFIX, rows.state)}
            yield {name: as_array(name, tensor) for name, tensor in tensors.items()}

    def shape(self, table: str) -> TableShape:
        """Return the size of a table; of its files only the first header is read.

        Raises:
            ConfigError: The checkpoint has no such table.
            FormatError: A damaged file.
        """
        self._check_name(table)
        entry = self._row_files.get(table)
        if entry is not None:
            width = RowFormat.of_columns(self._layout(entry).columns).width
            return TableShape(num_rows=entry.rows, width=width, seed=entry.seed)
        first = self.path / self._pieces[table][0].file
        shapes, metadata = tensor_shapes(first)
        num_rows, seed = metadata.get("rows", ""), metadata.get("seed", "0")
        if len(shapes.get(WEIGHTS, ())) != 2 or not (is_count(num_rows) and _is_seed(seed)):
            raise FormatError(first, f"got {shapes} and {metadata}, expected rows of a table")
        return TableShape(
            num_rows=int(num_rows), width=shapes[WEIGHTS][1], seed=int(seed) if "seed" in metadata else None
        )

    def rows(self, table: str) -> Iterator[RowValues]:
        """Yield the keys and weights of a table, one piece at a time; errors are those of `pieces`."""
        return vectors_of(self.pieces(table))

    def memories(self, table: str) -> Iterator[Arrays]:
        """Yield the pieces of a dynamic table's memory."""
        return (self._read(entry)[0] for entry in self._memories.get(table, []))

    def num_rows(self, table: str) -> int:
        """Return the rows of a table, those that the files leave out included; of its files only a header is read."""
        shape, entry = self.shape(table), self._row_files.get(table)
        if entry is not None:
            return shape.num_rows if entry.of_rows is None else entry.of_rows
        of_rows = tensor_shapes(self.path / self._pieces[table][0].file)[1].get("of_rows", str(shape.num_rows))
        return int(of_rows) if is_count(of_rows) else -1

    def load(self, table: Store, *, with_state: bool, of_rows: int | None = None) -> None:
        """Overwrite the rows of a table, one piece at a time, but not its memory; see `Checkpoint.load_tables`.

        Args:
            table: The table.
            with_state: Whether to load the row optimizer's state.
            of_rows: Rows that these files say a static table has, the first ones of `table`; None for all of it.
        """
        of_rows = len(table) if of_rows is None else of_rows
        if table.name in self._row_files:
            self._load_row_file(table, self._row_files[table.name], of_rows, with_state=with_state)
        else:
            self._load_pieces(table, self._pieces[table.name], of_rows, with_state=with_state)

    def _load_pieces(self, table: Store, entries: list[FileEntry], of_rows: int, *, with_state: bool) -> None:
        done, num_rows, has_keys, seed = 0, 0, False, ""
        for entry in entries:
            arrays, metadata = self._read(entry)
            tensors = tensors_of(arrays)
            if entry is entries[0]:
                num_rows, has_keys = self._check_kind(table, of_rows, tensors, metadata), KEYS in tensors
                seed = metadata.get("seed", "")
            place = "first_row" if KEYS in tensors else "first_key"
            expected = {"table": table.name, place: str(done), "rows": str(num_rows)}
            if KEYS in tensors and not table.is_dynamic:
                expected |= {"of_rows": str(of_rows), "seed": seed}
            if metadata != expected or WEIGHTS not in tensors or (KEYS in tensors) != has_keys:
                raise FormatError(self.path / entry.file, f"describes itself as {metadata}, expected {expected}")
            rows = rows_of(tensors, done)
            self._check_state(table, set(rows.state), with_state=with_state)
            # After the checks of the first piece: what does not fit leaves the table as it was.
            if entry is entries[0]:
                if table.keyed is not None:
                    table.keyed.clear()
                # The files leave out rows that were never trained: their values follow from the seed.
                elif has_keys:
                    table.restart(int(seed))
            table.import_(rows if with_state else RowValues(keys=rows.keys, weights=rows.weights))
            done += len(rows.keys)
        if done != num_rows:
            raise FormatError(self.path, f"holds {done} of the {num_rows} rows of table {table.name!r}")

    def _load_row_file(self, table: Store, entry: RowFileEntry, of_rows: int, *, with_state: bool) -> None:
        layout = self._layout(entry)
        self._check_dynamic(table, is_dynamic=entry.of_rows is None)
        if not table.is_dynamic and (entry.of_rows != of_rows or entry.seed is None):
            raise ConfigError(self.path, f"table {table.name!r} has {entry.of_rows} rows, expected {of_rows}")
        states = {column.name for column in layout.columns} - {WEIGHTS}
        self._check_state(table, states, with_state=with_state)
        if table.keyed is not None:
            table.keyed.clear()
        if entry.seed is not None:
            table.restart(entry.seed)
        # Keys first: `adopt` reads no rows, so it cannot learn them from the file.
        self._load_keys(table, with_uses=with_state)
        # A row file holds weights and states together, so a tier can take it as its own only with both.
        is_whole = table.is_dynamic or of_rows == len(table)
        if with_state and is_whole and table.adopt(self.path / entry.directory):
            return
        for rows in self._rows_of_file(entry):
            table.import_(rows if with_state else RowValues(keys=rows.keys, weights=rows.weights))

    def _load_keys(self, table: Store, *, with_uses: bool) -> None:
        done = 0
        for entry in self._pieces.get(table.name, []):
            arrays, metadata = self._read(entry)
            tensors = tensors_of(arrays)
            if metadata.get("first_row") != str(done) or KEYS not in tensors:
                raise FormatError(self.path / entry.file, f"describes itself as {metadata}, expected keys from {done}")
            keyed_of(table, self.path).import_keys(tensors[KEYS], _named(USE_PREFIX, tensors) if with_uses else {})
            done += len(tensors[KEYS])

    def _layout(self, entry: RowFileEntry) -> RowFileLayout:
        for name in (DESCRIPTION_FILE, MANIFEST_FILE):
            file = f"{entry.directory}/{name}"
            if file not in self._entries:
                raise FormatError(self.path, f"names no file {file!r}, which a row file has")
            if hashlib.sha256(read_bytes(self.path / file)).hexdigest() != self._entries[file].sha256:
                raise FormatError(self.path / file, "damaged: its SHA-256 is not the one of the checkpoint")
        return read_description(self.path / entry.directory)

    @stream
    def _rows_of_file(self, entry: RowFileEntry) -> Generator[RowValues]:
        layout = self._layout(entry)
        of = RowFormat.of_columns(layout.columns)
        # Without the writer's lock, so that several processes can load the checkpoint.
        store = RowFile.open(self.path / entry.directory, read_only=True)
        try:
            if len(store) != entry.rows:
                raise FormatError(self.path / entry.directory, f"holds {len(store)} rows, expected {entry.rows}")
            for keys, values in store.items(max(1, _SCANNED_BYTES // layout.row_bytes)):
                weights, state = of.unpack(torch.from_numpy(values))
                # Weights and states of a row are interleaved in the file; a table takes each in one piece.
                state = {name: part.contiguous() for name, part in state.items()}
                yield RowValues(keys=torch.from_numpy(keys), weights=weights.contiguous(), state=state)
        finally:
            store.close()

    def _check_name(self, table: str) -> None:
        if table not in self.names:
            raise ConfigError(self.path, f"no table {table!r}, expected one of {', '.join(self.names)}")

    def _check_dynamic(self, table: Store, *, is_dynamic: bool) -> None:
        if is_dynamic != table.is_dynamic:
            kinds = {False: "static", True: "dynamic"}
            got, expected = kinds[is_dynamic], kinds[table.is_dynamic]
            raise ConfigError(self.path, f"table {table.name!r} is {got}, expected a {expected} one")

    def _check_state(self, table: Store, states: set[str], *, with_state: bool) -> None:
        if with_state and states != set(table.state_names):
            raise ConfigError(
                self.path,
                f"table {table.name!r} comes with the optimizer state {sorted(states)}, "
                f"expected {sorted(table.state_names)}",
            )

    def _check_kind(
        self, table: Store, of_rows: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> int:
        """Return how many rows the pieces hold, after the kind of table and, of a static one, its rows are checked."""
        self._check_dynamic(table, is_dynamic=KEYS in tensors and "of_rows" not in metadata)
        num_rows = metadata.get("rows", "")
        size = metadata.get("of_rows", num_rows)
        if not table.is_dynamic and size != str(of_rows):
            raise ConfigError(self.path, f"table {table.name!r} has {size} rows, expected {of_rows}")
        if "of_rows" in metadata and not _is_seed(metadata.get("seed", "")):
            raise FormatError(self.path, f"table {table.name!r}: got seed {metadata.get('seed')!r}, expected a number")
        # -1 differs from all counts, so that the comparison of the metadata fails and names the file.
        return int(num_rows) if is_count(num_rows) else -1

    def _read(self, entry: FileEntry) -> tuple[Arrays, dict[str, str]]:
        return read_tensors(self.path / entry.file, sha256=entry.sha256)


def _is_seed(text: str) -> bool:
    return is_count(text.removeprefix("-"))


def files_by_table(manifest: Manifest, parse: Callable[[str], tuple[str, int] | None]) -> dict[str, list[FileEntry]]:
    """Return a map of each table to those of its files that `parse` accepts, in order."""
    entries: dict[str, list[tuple[int, FileEntry]]] = {}
    for entry in manifest.files:
        parsed = parse(entry.file)
        if parsed is not None:
            entries.setdefault(parsed[0], []).append((parsed[1], entry))
    return {
        name: [entry for _, entry in sorted(pieces, key=lambda piece: piece[0])] for name, pieces in entries.items()
    }


def tensors_of(arrays: Arrays) -> dict[str, Tensor]:
    """Return arrays as tensors that share their memory."""
    return {name: as_tensor(array) for name, array in arrays.items()}


def rows_of(tensors: Mapping[str, Tensor], first_key: int) -> RowValues:
    """Return a piece of a table; one without keys holds those from `first_key` on."""
    weights = tensors[WEIGHTS]
    keys = tensors[KEYS] if KEYS in tensors else torch.arange(first_key, first_key + len(weights))
    return RowValues(keys=keys, weights=weights, state=_named(STATE_PREFIX, tensors), uses=_named(USE_PREFIX, tensors))


def vectors_of(pieces: Iterable[Arrays]) -> Iterator[RowValues]:
    """Yield the keys and weights of the pieces of a table."""
    done = 0
    for piece in pieces:
        rows = rows_of(tensors_of(piece), done)
        done += rows.keys.numel()
        yield RowValues(keys=rows.keys, weights=rows.weights)


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
