# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's data files as groups of samples, one source for each format."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys, bags_of, check_keys, merge
from terarec.formats.dataset import METADATA_FILE, base_name, read_parquet_metadata
from terarec.formats.hugectr import read_file_list
from terarec.formats.hugectr.norm import NormFile
from terarec.formats.hugectr.parquet import ParquetRecordFile
from terarec.formats.hugectr.raw import FieldTypes, FixedRecordFile, raw_async_types, raw_types
from terarec.formats.hugectr.records import RECORDS_FILE
from terarec.formats.hugectr.split_writer import add_key_offsets
from terarec.formats.urls import check_url
from terarec.io.remote import is_remote
from terarec.spec import CategoricalColumn, RecordLayout, RecordsSpec, checks

_GROUP_ROWS = 16_384
"""Records of a fixed-width file that are read at once: 2.6 MB of Criteo's."""


ReadPart = Callable[[int, Sequence[slice]], ColumnBlock]


class RecordSource(Protocol):
    """Samples in groups.

    Attributes:
        layout: Layout of a sample.
        names: Names of the slots as features; those of the layout, unless the source has others.
        key_offsets: Integer for each slot that a batch adds to its keys. Adding it to a complete group would take
            another pass over memory.
        group_rows: Records in each group, in input order, before any are left out.
        runs: Lengths of the runs of groups that can only be read one after the other, so that shuffling keeps their
            order; None if each group can be read by itself.
        leaves_out: Whether records may fail a checksum.
        ends_batches: Whether the end of the records ends a batch also where they repeat, as HugeCTR cuts its files of
            fixed records.
    """

    layout: RecordLayout
    names: tuple[str, ...]
    key_offsets: Sequence[int]
    group_rows: Sequence[int]
    runs: Sequence[int] | None
    leaves_out: bool
    ends_batches: bool

    def read(self, group: int) -> tuple[ColumnBlock, int]:
        """Return the records of a group and how many failed their checksum; safe from any thread.

        Labels and dense numbers are in new memory, which batches share. Keys are without `key_offsets`.
        """
        ...

    def kept(self, group: int) -> int:
        """Return how many records of a group do not fail their checksum, without decoding any."""
        ...

    @property
    def read_part(self) -> ReadPart | None:
        """Function that reads spans of the records of a group that are not left out; None if it would decode all."""
        ...


class NormSource(RecordSource):
    """Norm files, in groups of at most 16,384 records.

    Args:
        file_list: Path or URL of the file list.
        layout: Layout of a sample; keys are read as they are.
        checksum: Whether records have a checksum; one that fails leaves its record out.

    Raises:
        DataNotFoundError: No such list or file.
        FormatError: The list or the header of a file is invalid.
    """

    ends_batches = False

    def __init__(self, file_list: str | Path, layout: RecordLayout, *, checksum: bool) -> None:
        self.layout, self.names = layout, layout.slot_names
        self.key_offsets: Sequence[int] = (0,) * layout.num_slots
        self.runs: Sequence[int] | None = None
        self.leaves_out = checksum
        self._files = [NormFile(path, layout, checksum=checksum) for path in read_file_list(file_list)]
        self._first_group = list(accumulate((len(file.group_rows) for file in self._files), initial=0))
        self.group_rows: Sequence[int] = [rows for file in self._files for rows in file.group_rows]

    @override
    def read(self, group: int) -> tuple[ColumnBlock, int]:
        file = bisect_right(self._first_group, group) - 1
        return self._files[file].read(group - self._first_group[file])

    @override
    def kept(self, group: int) -> int:
        file = bisect_right(self._first_group, group) - 1
        return self._files[file].kept(group - self._first_group[file])

    @override
    def read_part(self, group: int, spans: Sequence[slice]) -> ColumnBlock:
        file = bisect_right(self._first_group, group) - 1
        return self._files[file].read_part(group - self._first_group[file], spans)


class _FixedSource:
    leaves_out = False
    ends_batches = True

    def __init__(self, path: str | Path, layout: RecordLayout, types: FieldTypes, num_samples: int) -> None:
        checks.argument("num_samples", num_samples, checks.integer())
        self.layout, self.names = layout, layout.slot_names
        self.key_offsets: Sequence[int] = (0,) * layout.num_slots
        self.runs: Sequence[int] | None = None
        self._file = FixedRecordFile(path, layout, types, num_samples)
        self.group_rows: Sequence[int] = [
            min(_GROUP_ROWS, num_samples - start) for start in range(0, num_samples, _GROUP_ROWS)
        ]

    def read(self, group: int) -> tuple[ColumnBlock, int]:
        """Return the records of group `group`; none are ever left out."""
        start = group * _GROUP_ROWS
        return self._file.read(start, start + self.group_rows[group]), 0

    def kept(self, group: int) -> int:
        """Return the number of records of group `group`."""
        return self.group_rows[group]

    def read_part(self, group: int, spans: Sequence[slice]) -> ColumnBlock:
        """Return spans of the records of group `group`."""
        first = group * _GROUP_ROWS
        return merge([self._file.read(first + span.start, first + span.stop) for span in spans], None)


class RawSource(_FixedSource):
    """Raw file.

    Args:
        path: Path or URL of the file.
        layout: Layout of a sample; whatever its `nnz_per_slot`, one key a slot. Keys get the slots' offsets.
        num_samples: Records to read; the file may hold more.
        float_label_dense: Whether labels and dense numbers are float32; otherwise they are int32, and a dense
            number becomes ln(x + 1).

    Raises:
        ConfigError: A layout that Raw files cannot have, or `num_samples` below 1.
        DataNotFoundError: No such file.
        FormatError: The file's size does not fit.
    """

    def __init__(self, path: str | Path, layout: RecordLayout, *, num_samples: int, float_label_dense: bool) -> None:
        super().__init__(path, layout, raw_types(layout, float_label_dense=float_label_dense), num_samples)


class RawAsyncSource(_FixedSource):
    """RawAsync file. No offsets are added to its keys.

    Args:
        path: Path or URL of the file.
        layout: Layout of a sample: exactly `nnz_per_slot` keys a slot.
        num_samples: Records to read; the file may hold more.
        is_dense_float: Whether dense numbers are float32; otherwise they are integers x and become ln(x + 1).
        multi_hot: Whether records have int32 labels and uint32 or int64 keys; otherwise records are as in Raw files,
            and `is_dense_float` is the type of labels, too.

    Raises:
        ConfigError: A layout that such files cannot have, or `num_samples` below 1.
        DataNotFoundError: No such file.
        FormatError: The file's size does not fit.
    """

    def __init__(
        self,
        path: str | Path,
        layout: RecordLayout,
        *,
        num_samples: int,
        is_dense_float: bool = True,
        multi_hot: bool = True,
    ) -> None:
        types = raw_async_types(layout, is_dense_float=is_dense_float, multi_hot=multi_hot)
        super().__init__(path, layout, types, num_samples)


class ParquetSource:
    """Parquet files with a ``_metadata.json`` next to the first. A group is a row group, or part of one.

    Args:
        file_list: Path or URL of the file list.
        layout: Layout of a row. Batches add the sizes of the slots before to keys.

    Attributes:
        left_out: Files of the list that the metadata lacks; they are skipped, as HugeCTR does.

    Raises:
        DataNotFoundError: No such list or file, or no metadata.
        FormatError: The list, the metadata or a file is invalid, or no file is left.
    """

    leaves_out = ends_batches = False
    # Parquet files are decoded by row groups, never from the middle of one.
    read_part: ReadPart | None = None

    def __init__(self, file_list: str | Path, layout: RecordLayout) -> None:
        self.layout, self.names = layout, layout.slot_names
        self.key_offsets: Sequence[int] = layout.key_offsets
        paths = read_file_list(file_list)
        if not paths:
            raise FormatError(file_list, "names no files, expected Parquet files")
        first = paths[0]
        # HugeCTR looks for it next to the first file, wherever the others are.
        metadata = read_parquet_metadata(first.removesuffix(base_name(first)) + METADATA_FILE)
        self.left_out = tuple(path for path in paths if base_name(path) not in metadata.num_rows)
        if len(self.left_out) == len(paths):
            raise FormatError(metadata.path, f"$.file_stats names none of the {len(paths)} files of {file_list}")
        kept = [path for path in paths if path not in self.left_out]
        self._files = [ParquetRecordFile(path, layout, metadata) for path in kept]
        self._first_group = list(accumulate((len(file.group_rows) for file in self._files), initial=0))
        self.group_rows: Sequence[int] = [rows for file in self._files for rows in file.group_rows]
        self.runs: Sequence[int] | None = [length for file in self._files for length in file.runs]

    def read(self, group: int) -> tuple[ColumnBlock, int]:
        """Return the rows of group `group`, counted over all files; none are ever left out."""
        file = bisect_right(self._first_group, group) - 1
        return self._files[file].read(group - self._first_group[file]), 0

    def kept(self, group: int) -> int:
        """Return the number of rows of group `group`."""
        return self.group_rows[group]


def open_split(spec: RecordsSpec, split: str, directory: Path) -> RecordSource:
    """Open the samples of `split`.

    Args:
        spec: Content of a ``records.json``.
        split: Name of the split, for example "train".
        directory: Directory of the ``records.json``, from which relative paths count.

    Raises:
        ConfigError: No such split, or a URL that the caller does not allow.
        DataNotFoundError: A file is missing.
        FormatError: A file does not hold what `spec` promises.
    """
    entry = spec.split(split)
    path = check_url(entry.path, directory / RECORDS_FILE) if is_remote(entry.path) else directory / entry.path
    source: RecordSource
    if spec.kind == "norm":
        source = NormSource(path, spec.layout, checksum=spec.checksum)
    elif spec.kind == "parquet":
        source = ParquetSource(path, spec.layout)
    elif spec.kind == "raw":
        source = RawSource(path, spec.layout, num_samples=entry.rows, float_label_dense=spec.float_label_dense)
    else:
        source = RawAsyncSource(
            path,
            spec.layout,
            num_samples=entry.rows,
            is_dense_float=spec.float_label_dense,
            multi_hot=spec.multi_hot,
        )
    # A list that was edited since would give other samples than records.json describes.
    num_records = sum(source.group_rows)
    if num_records != entry.rows:
        raise FormatError(path, f"holds {num_records} samples, expected {entry.rows} of split {split!r} (records.json)")
    return source


class ColumnSource(RecordSource):
    """Samples of a split under the names of a data set's columns, with keys as ``spec.keys`` says.

    Args:
        spec: Content of a ``records.json``.
        split: Name of the split, for example "train".
        directory: Directory of the ``records.json``, from which relative paths count.
        columns: The columns of the slots; keys that start at 0 in each are checked against their rows.

    Raises:
        ConfigError: No such split.
        DataNotFoundError: A file is missing.
        FormatError: A file does not hold what `spec` promises.
    """

    def __init__(self, spec: RecordsSpec, split: str, directory: Path, columns: Sequence[CategoricalColumn]) -> None:
        self.layout: RecordLayout = spec.layout
        self.names = spec.key_names
        self._where = str(directory / spec.split(split).path)
        self._columns = tuple(columns)
        # Norm files alone hold keys with offsets. For the other kinds, none are added in the first place.
        self._is_by_column = spec.keys == "columns"
        self._removes_offsets = self._is_by_column and spec.kind == "norm" and bool(spec.layout.slot_sizes)
        # Without sizes a source has no offsets to add.
        if spec.kind != "norm" and spec.keys != "with_offsets":
            spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, slot_sizes=()))
        self._source = open_split(spec, split, directory)
        self.key_offsets = self._source.key_offsets
        self.group_rows = self._source.group_rows
        self.runs = self._source.runs
        self.leaves_out = self._source.leaves_out
        self.ends_batches = self._source.ends_batches

    @property
    @override
    def read_part(self) -> ReadPart | None:
        read = self._source.read_part
        return None if read is None else lambda group, spans: self._by_column(read(group, spans))

    @override
    def kept(self, group: int) -> int:
        return self._source.kept(group)

    @override
    def read(self, group: int) -> tuple[ColumnBlock, int]:
        """Read the records of a group, and the number of those left out."""
        block, left_out = self._source.read(group)
        return self._by_column(block), left_out

    def _by_column(self, block: ColumnBlock) -> ColumnBlock:
        keys = block.keys
        if self._removes_offsets:
            keys = add_key_offsets(keys, [-offset for offset in self.layout.key_offsets])
        columns: list[Keys] = []
        for column, column_keys in zip(self._columns, keys, strict=True):
            if self._is_by_column:
                # Here and not at the lookup, where the error could not name the file.
                check_keys(column, column_keys, self._where, promise="slot_sizes in records.json")
            columns.append(bags_of(column_keys) if column.hotness > 1 else column_keys)
        return dataclasses.replace(block, keys=tuple(columns))
