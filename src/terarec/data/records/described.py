"""Opens what a ``records.json`` describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from terarec.data.records.sources import NormSource, ParquetSource, RawAsyncSource, RawSource, RecordSource
from terarec.errors import FormatError
from terarec.formats.block import ColumnBlock, Keys, bags_of, check_keys
from terarec.formats.hugectr import final_keys
from terarec.io import is_remote
from terarec.spec import CategoricalColumn, RecordLayout, RecordsSpec


def open_split(spec: RecordsSpec, split: str, directory: Path) -> RecordSource:
    """The samples of `split`.

    Args:
        spec: the content of a ``records.json``.
        split: for example "train".
        directory: that of the ``records.json``, from which relative paths count.

    Raises:
        ConfigError: no such split.
        DataNotFoundError: a file is missing.
        FormatError: a file does not hold what `spec` promises.
    """
    entry = spec.split(split)
    path = entry.path if is_remote(entry.path) else directory / entry.path
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
    found = sum(source.group_rows)
    if found != entry.rows:
        raise FormatError(f"{path}: holds {found} samples, expected {entry.rows} of split {split!r} (records.json)")
    return source


class ColumnSource:
    """The samples of a split under the names of a data set's columns, with keys as ``spec.keys`` says.

    Args:
        spec: The content of a ``records.json``.
        split: For example "train".
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
        if spec.kind != "norm" and spec.keys != "with_offsets":
            spec = dataclasses.replace(spec, layout=dataclasses.replace(spec.layout, slot_sizes=()))
        self._source = open_split(spec, split, directory)
        self.group_rows = self._source.group_rows
        self.runs = self._source.runs

    def read(self, group: int) -> tuple[ColumnBlock, int]:
        """Read the records of a group, and the number of those left out.

        Raises:
            FormatError: A damaged file, or a key outside its slot.
        """
        block, left_out = self._source.read(group)
        keys = final_keys(block.keys, self.layout, sign=-1) if self._removes_offsets else block.keys
        columns: list[Keys] = []
        for column, column_keys in zip(self._columns, keys, strict=True):
            if self._is_by_column:
                check_keys(column, column_keys, self._where, promise="slot_sizes in records.json")
            columns.append(bags_of(column_keys) if column.hotness > 1 else column_keys)
        return dataclasses.replace(block, keys=tuple(columns)), left_out
