# SPDX-License-Identifier: Apache-2.0
"""Writers of a split as HugeCTR's files, with the list, the metadata and the keysets next to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys
from terarec.formats.dataset import FILE_LIST, METADATA_FILE, write_file_list, write_parquet_metadata
from terarec.formats.hugectr.fields import check_key_range, key_dtype
from terarec.formats.hugectr.norm import NormWriter
from terarec.formats.hugectr.raw import FixedRecordWriter, raw_async_types, raw_types
from terarec.formats.hugectr.records import has_offsets, is_listed
from terarec.formats.parquet import ParquetShardWriter
from terarec.formats.shard import FileWriter, SplitFiles
from terarec.io.files import write_bytes
from terarec.io.remote import locate
from terarec.ragged import flat_values, like_values
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, RecordsSpec
from terarec.spec.dataset import RecordKind


def read_keyset(path: str | Path, key_bytes: int) -> NDArray[np.int64]:
    """Read the keys int64[n] of a keyset, in the order of the file.

    Raises:
        DataNotFoundError: No such file.
        FormatError: The size is not a multiple of `key_bytes`.
    """
    file = locate(path)
    if file.size % key_bytes:
        raise FormatError(path, f"holds {file.size} bytes, expected a multiple of {key_bytes} bytes a key")
    return file.read(0, file.size).view(key_dtype(key_bytes)).astype(np.int64)


def write_keyset(path: Path, keys: NDArray[Any], key_bytes: int) -> None:
    """Write ``keys[n]``, atomically.

    Raises:
        FormatError: A key that `key_bytes` bytes cannot hold.
        StorageError: The disk is full.
    """
    check_key_range(keys, key_bytes, str(path))
    write_bytes(path, keys.astype(key_dtype(key_bytes)).tobytes())


class SeenKeys:
    """Set of keys ``0 <= key < rows``; one byte for each of them, however many samples there are."""

    def __init__(self, rows: int) -> None:
        self._seen = np.zeros(rows, dtype=np.bool_)

    def add(self, columns: Sequence[Keys]) -> None:
        """Mark the keys of some slots."""
        for column in columns:
            self._seen[flat_values(column)] = True

    def load(self, path: Path, key_bytes: int) -> None:
        """Mark the keys of a keyset.

        Raises:
            DataNotFoundError: No such file.
            FormatError: The file is damaged.
        """
        keys = read_keyset(path, key_bytes)
        if keys.size and not 0 <= keys.min() <= keys.max() < len(self._seen):
            raise FormatError(path, f"holds keys {keys.min()} to {keys.max()}, expected 0 to {len(self._seen) - 1}")
        self._seen[keys] = True

    def merge(self, other: SeenKeys) -> None:
        """Mark the keys that `other` has marked."""
        self._seen |= other._seen

    def sorted(self) -> NDArray[np.int64]:
        """Return the marked keys, ascending."""
        return np.flatnonzero(self._seen)


class RecordWriter(Protocol):
    """Writer of one file of samples, which appears when it is closed."""

    def write(self, label: NDArray[Any], dense: NDArray[Any], keys: Sequence[Keys]) -> None:
        """Append samples: ``label[n, L]``, ``dense[n, F]``, and the keys of each slot."""
        ...

    def close(self) -> object:
        """Finish the file."""
        ...

    def abort(self) -> None:
        """Remove the unfinished file."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def create_writer(path: Path, spec: RecordsSpec) -> RecordWriter:
    """Create a writer of one file of `spec`'s type, layout and names. Keys are written without changes."""
    layout, is_float = spec.layout, spec.float_label_dense
    if spec.kind == "norm":
        return NormWriter(path, layout, checksum=spec.checksum)
    if spec.kind == "parquet":
        return ParquetShardWriter(path, _columns(spec))
    if spec.kind == "raw":
        return FixedRecordWriter(path, layout, raw_types(layout, float_label_dense=is_float))
    # Multi-hot holds one key a slot as well, and it is the default of releases from 23.04 on.
    types = raw_async_types(layout, is_dense_float=is_float, multi_hot=True)
    return FixedRecordWriter(path, layout, types)


def add_key_offsets(keys: Sequence[Keys], offsets: Sequence[int]) -> tuple[Keys, ...]:
    """Return the keys of each slot plus its offset, as int64."""
    return tuple(
        like_values(column, flat_values(column).astype(np.int64) + offset)
        for column, offset in zip(keys, offsets, strict=True)
    )


def _columns(spec: RecordsSpec) -> DatasetSpec:
    """Describe the columns of a Parquet file; any int64 keys for 8-byte keys, which makes them int64 in the file."""
    layout = spec.layout
    sizes = layout.slot_sizes[: layout.num_slots] if layout.key_bytes == 4 else (None,) * layout.num_slots
    return DatasetSpec(
        name="records",
        storage="parquet",
        labels=tuple(LabelColumn(name=name) for name in spec.label_names),
        dense=tuple(DenseColumn(name=name) for name in spec.dense_names),
        categorical=tuple(
            CategoricalColumn(name=name, rows=size, hotness=most)
            for name, size, most in zip(spec.key_names, sizes, layout.most_keys, strict=True)
        ),
    )


KEYSET = "_hugectr.keyset"
"""Of a split; that of one of its parts is ``part-00000.keyset``."""


def record_files(directory: Path, kind: RecordKind, index: int) -> tuple[Path, ...]:
    """Return the data file `index` of a split, its keyset, and the file list of a part.

    Norm and Parquet files are parts with keysets of their own. Another file holds the whole split, as its keyset does.
    """
    if not is_listed(kind):
        return directory / "data.bin", directory / KEYSET
    path = directory / f"part-{index:05d}{'.data' if kind == 'norm' else '.parquet'}"
    return path, path.with_suffix(".keyset"), path.with_suffix(".txt")


class SplitRecords:
    """Writer of the files of one split.

    Norm and Parquet files are parts of which HugeCTR's training cache can make passes: with keysets, each has a keyset
    and a file list of its own next to it.

    Args:
        directory: Directory of the files.
        location: Final directory, which the file lists name.
        records: Type, layout and names of the files; its `splits` are ignored.
        sizes: Rows of each file, without end; files that need no list take all rows.
        keysets: Whether to write keysets.
        closed: Rows of the data files that an interrupted run closed.
    """

    def __init__(
        self,
        directory: Path,
        location: Path,
        records: RecordsSpec,
        sizes: Iterator[int],
        *,
        keysets: bool,
        closed: Sequence[int] = (),
    ) -> None:
        self._directory = directory
        self._location = location
        self._records = records
        self._seen = SeenKeys(sum(records.layout.slot_sizes)) if keysets else None
        self._is_closed = False
        files = [record_files(directory, records.kind, index) for index in range(len(closed))]
        if self._seen is not None:
            # A resumed run has not seen the rows of closed files; their keysets hold the keys.
            for _, keyset, *_ in files:
                self._seen.load(keyset, records.layout.key_bytes)
        self._files = SplitFiles(
            self._create,
            # Raw and RawAsync have no list: HugeCTR takes one file of a split.
            sizes if is_listed(records.kind) else repeat(sys.maxsize),
            [(data, rows) for (data, *_), rows in zip(files, closed, strict=True)],
        )

    @property
    def num_rows(self) -> int:
        """Number of rows so far."""
        return self._files.num_rows

    @property
    def closed_rows(self) -> list[int]:
        """Rows of the data files that are on the disk with their keysets, so that they survive a kill."""
        return self._files.closed_rows

    def write(self, block: ColumnBlock) -> None:
        """Append samples whose keys start at 0 in each column.

        Raises:
            FormatError: Lists that the files cannot hold.
            StorageError: The disk is full.
        """
        self._files.write(block)

    def close(self) -> None:
        """Finish the last file and the files common to all, once; write none if there is no sample."""
        if self._is_closed:
            return
        self._files.close()
        self._is_closed = True
        if not self._files.files:
            return
        records, files = self._records, self._files.files
        if records.kind == "parquet":
            names = records.label_names, records.dense_names, records.key_names
            write_parquet_metadata(self._directory / METADATA_FILE, [(path.name, rows) for path, rows in files], *names)
        if is_listed(records.kind):
            write_file_list(self._directory / FILE_LIST, [self._location / path.name for path, _ in files])
        if self._seen is not None:
            write_keyset(self._directory / KEYSET, self._seen.sorted(), records.layout.key_bytes)

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._files.abort()

    def _create(self, index: int) -> tuple[Path, FileWriter]:
        path, *_ = record_files(self._directory, self._records.kind, index)
        return path, _Part(path, self._records, self._seen, self._location)


class _Part:
    """File whose keyset is merged into that of the split."""

    def __init__(self, path: Path, records: RecordsSpec, split_keys: SeenKeys | None, location: Path) -> None:
        self._path = path
        self._records = records
        self._location = location
        self._split_keys = split_keys
        self._keys = None if split_keys is None else SeenKeys(sum(records.layout.slot_sizes))
        self._writer = create_writer(path, records)

    def write_block(self, block: ColumnBlock) -> None:
        final = add_key_offsets(block.keys, self._records.layout.key_offsets)
        # Norm files hold the keys of HugeCTR's tables; readers of Raw and Parquet files add the offsets themselves.
        self._writer.write(block.label, block.dense, final if self._records.kind == "norm" else block.keys)
        if self._keys is not None:
            # The cache looks keys up as a batch has them: with offsets, except for RawAsync, whose reader adds none.
            self._keys.add(final if has_offsets(self._records.kind) else block.keys)

    def close(self) -> None:
        self._writer.close()
        if self._keys is not None and self._split_keys is not None:
            # After the data file: it counts as closed, for a resumed run, when its keyset is there, too.
            self._split_keys.merge(self._keys)
            if is_listed(self._records.kind):
                write_keyset(self._path.with_suffix(".keyset"), self._keys.sorted(), self._records.layout.key_bytes)
                write_file_list(self._path.with_suffix(".txt"), [self._location / self._path.name])

    def abort(self) -> None:
        self._writer.abort()
