"""The samples of one split -> HugeCTR's files, with the list, the metadata and the keysets beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from terarec.formats.block import ColumnBlock
from terarec.formats.hugectr.dataset_records import FILE_LIST, has_offsets, is_listed
from terarec.formats.hugectr.file_list import write_file_list
from terarec.formats.hugectr.keyset import write_keyset
from terarec.formats.hugectr.parquet_metadata import METADATA_FILE, write_parquet_metadata
from terarec.formats.hugectr.record_writers import create_writer, final_keys
from terarec.formats.hugectr.seen_keys import SeenKeys
from terarec.formats.split_files import FileWriter, SplitFiles
from terarec.spec import RecordsSpec

KEYSET = "_hugectr.keyset"
"""Of a split; that of one of its parts is ``part-00000.keyset``."""


class SplitRecords:
    """Writes the files of one split.

    Norm and Parquet files are parts of which HugeCTR's training cache can make passes: with keysets, each has a keyset
    and a file list of its own beside it.

    Args:
        directory: where they are made.
        location: where they will lie, which the file lists name.
        records: their kind, layout and names; its `splits` are not looked at.
        sizes: rows of each file, without end; files that need no list take all rows.
        keysets: whether to write keysets.
    """

    def __init__(
        self, directory: Path, location: Path, records: RecordsSpec, sizes: Iterator[int], *, keysets: bool
    ) -> None:
        self._directory = directory
        self._location = location
        self._records = records
        self._seen = SeenKeys(sum(records.layout.slot_sizes)) if keysets else None
        self._files = SplitFiles(self._create, sizes if is_listed(records.kind) else repeat(sys.maxsize))

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return self._files.num_rows

    def write(self, block: ColumnBlock) -> None:
        """Append samples whose keys start at 0 in each column.

        Raises:
            FormatError: lists that the files cannot hold.
            StorageError: the disk is full.
        """
        self._files.write(block)

    def close(self) -> None:
        """Finish the last file, and what belongs to all of them; nothing where there is no sample."""
        self._files.close()
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
        """Give the file up that is not finished."""
        self._files.abort()

    def _create(self, index: int) -> tuple[Path, FileWriter]:
        suffix = {"norm": f"part-{index:05d}.data", "parquet": f"part-{index:05d}.parquet"}
        path = self._directory / suffix.get(self._records.kind, "data.bin")
        return path, _Part(path, self._records, self._seen, self._location)


class _Part:
    """One file, whose keyset is merged into that of the split."""

    def __init__(self, path: Path, records: RecordsSpec, split_keys: SeenKeys | None, location: Path) -> None:
        self._path = path
        self._records = records
        self._location = location
        self._split_keys = split_keys
        self._keys = None if split_keys is None else SeenKeys(sum(records.layout.slot_sizes))
        self._writer = create_writer(path, records)

    def write_block(self, block: ColumnBlock) -> None:
        final = final_keys(block.keys, self._records.layout)
        self._writer.write(block.label, block.dense, final if self._records.kind == "norm" else block.keys)
        if self._keys is not None:
            self._keys.add(final if has_offsets(self._records.kind) else block.keys)

    def close(self) -> None:
        self._writer.close()
        if self._keys is not None and self._split_keys is not None:
            self._split_keys.merge(self._keys)
            if is_listed(self._records.kind):
                write_keyset(self._path.with_suffix(".keyset"), self._keys.sorted(), self._records.layout.key_bytes)
                write_file_list(self._path.with_suffix(".txt"), [self._location / self._path.name])

    def abort(self) -> None:
        self._writer.abort()
