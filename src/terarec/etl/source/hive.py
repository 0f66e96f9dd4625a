# SPDX-License-Identifier: Apache-2.0
"""Columns in the names of directories, as Hive writes them: ``country=DE/day=2024-01-01/part.parquet``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import dataset
from typing_extensions import override

from terarec.errors import ConfigError, FormatError
from terarec.etl.cleaning import Cleaning
from terarec.etl.columns import array_of
from terarec.etl.source.arrow_files import read_schema, read_texts
from terarec.etl.source.blocks import FormatReader, ParsedPart, Place, RawPart, SourceFile, show
from terarec.etl.source.delimited import first_record, split_header
from terarec.etl.times import has_parts
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.preparation import BadInputPolicy


def directory_values(path: str, names: Collection[str]) -> Mapping[str, str | None]:
    """Return the columns among `names` in the names of the directories of a file, decoded; None is a missing value."""
    # The last directory of a name counts. Others may have any name: one of no column is no error.
    parts = (part for part in PurePosixPath(path).parent.parts if "=" in part)
    segments = {name: part for part in parts if (name := part.partition("=")[0]) in names}
    if not segments:
        return {}
    schema = pa.schema([(name, pa.string()) for name in segments])
    try:
        expression = dataset.partitioning(schema, flavor="hive").parse("/".join((*segments.values(), "")))
    except pa.ArrowInvalid as error:
        raise FormatError(path, f"the names of its directories cannot be read ({error}), expected UTF-8") from None
    values: dict[str, str | None] = dict.fromkeys(segments)
    values.update(dataset.get_partition_keys(expression))
    return values


def with_directories(
    spec: SourceSpec, files: Sequence[SourceFile], reader_of: Callable[[SourceSpec], FormatReader]
) -> FormatReader:
    """Return the reader of files, some of whose columns may be in the names of their directories.

    A column that the files have is read from them. Lines of JSON may lack a field: the directory has its value then.

    Raises:
        ConfigError: A file is in no directory of a column that others have so.
        FormatError: A file is damaged or has a column that the first one has in its directory, or a directory has
            another value than its column.
    """
    columns = _directory_columns(spec, files)
    reader = reader_of(files_spec(spec, files))
    if not columns:
        return reader
    values = {file.path: directory_values(file.path, [column.name for column in columns]) for file in files}
    for file in files:
        for column in columns:
            if column.name not in values[file.path] and spec.format != "json_lines":
                expected = f"a directory {column.name}=VALUE, as {files[0].path} has"
                raise ConfigError(file.path, f"has no column {column.name!r}, expected it, or {expected}")
    if spec.format != "json_lines":
        _check_alike(files, columns, spec)
    return DirectoryReader(spec, columns, values, reader)


def _check_alike(files: Sequence[SourceFile], columns: Sequence[SourceColumn], spec: SourceSpec) -> None:
    """Raise `FormatError` where a later file has a column itself, whose values would be left out."""
    for file in files[1:]:
        there = _names_in(file, spec)
        for column in columns:
            if column.name in there:
                problem = f"has a column {column.name!r}, which {files[0].path} has in the name of its directory alone"
                raise FormatError(file.path, f"{problem}, expected one place in all files")


def files_spec(spec: SourceSpec, files: Sequence[SourceFile]) -> SourceSpec:
    """Return the spec of the columns that the files themselves have."""
    columns = _directory_columns(spec, files)
    if not columns or spec.format == "json_lines":
        return spec
    return replace(spec, columns=tuple(column for column in spec.columns if column not in columns))


def _directory_columns(spec: SourceSpec, files: Sequence[SourceFile]) -> Sequence[SourceColumn]:
    """Return the columns that are in the names of directories."""
    names = {column.name for column in spec.columns if column.separator is None}
    named = {name for file in files for name in directory_values(file.path, names)}
    columns = [column for column in spec.columns if column.name in named]
    if not columns or spec.format == "json_lines":
        return columns
    there = _names_in(files[0], spec)
    return [column for column in columns if column.name not in there]


def _names_in(file: SourceFile, spec: SourceSpec) -> Sequence[str]:
    """Return the columns that a file names."""
    if spec.format in ("parquet", "arrow"):
        names: list[str] = read_schema(file.path, "parquet" if spec.format == "parquet" else "arrow").names
        return names
    if not spec.header:
        return ()
    return split_header(file.path, first_record(file, spec), spec)


class DirectoryReader(FormatReader):
    """Adds columns in the names of directories to what another reader reads.

    Args:
        spec: Spec of all columns.
        columns: Columns in the names of directories.
        values: Path of a file -> values of columns in its directories.
        reader: Reader of the other columns; of lines of JSON, of all.
    """

    def __init__(
        self,
        spec: SourceSpec,
        columns: Sequence[SourceColumn],
        values: Mapping[str, Mapping[str, str | None]],
        reader: FormatReader,
    ) -> None:
        self.is_text: bool = reader.is_text
        self.place: Place = reader.place
        self._spec = spec
        self._reader = reader
        self._columns = columns
        self._values = {
            (path, column.name): _read(path, column, value.get(column.name), spec)
            for path, value in values.items()
            for column in columns
        }

    @override
    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        return self._reader.parts(file, after)

    @override
    def head(self, part: RawPart, rows: int) -> RawPart:
        return self._reader.head(part, rows)

    @override
    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        parsed = self._reader.parse(part, policy)
        if not parsed.columns:  # a fault that ends the reading
            return parsed
        columns, nanoseconds = dict(parsed.columns), dict(parsed.nanoseconds)
        num_rows = len(next(iter(columns.values())))
        for column in self._columns:
            value, parts = self._values[part.path, column.name]
            array = columns.get(column.name)
            # Row i of [value] or of (rows of the file, value).
            places = np.zeros(num_rows, dtype=np.int64)
            if array is not None:
                absent = array.is_null().to_numpy(zero_copy_only=False)
                absent[parsed.bad_fields.get(column.name, [])] = False
                places = np.where(absent, num_rows, np.arange(num_rows))
                value = pa.concat_arrays([array, value])
                parts = np.concatenate([nanoseconds.get(column.name, np.zeros(num_rows, np.int32)), parts])
            columns[column.name] = value.take(array_of(places))
            if has_parts(column):
                nanoseconds[column.name] = parts[places]
        ordered = {column.name: columns[column.name] for column in self._spec.columns}
        zero_nulls = parsed.zero_nulls.difference(column.name for column in self._columns)
        return replace(parsed, columns=ordered, nanoseconds=nanoseconds, zero_nulls=zero_nulls)

    @override
    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        return self._reader.numbers(part, positions)

    @override
    def count_rows(self, file: SourceFile, threads: int) -> int:
        return self._reader.count_rows(file, threads)

    @override
    def text_bytes(self, file: SourceFile) -> int:
        return self._reader.text_bytes(file)


def _read(path: str, column: SourceColumn, text: str | None, spec: SourceSpec) -> tuple[pa.Array, NDArray[np.int32]]:
    """Return the value of a directory as an array of one row, and its nanoseconds."""
    read = read_texts(Cleaning.of_files(spec).texts(pa.array([text], pa.large_string())), column)
    if read.bad is not None and read.bad.any():
        raise FormatError(path, f"directory {column.name}: {show(str(text))}, expected {column.type}")
    return read.values, np.zeros(1, dtype=np.int32) if read.nanoseconds is None else read.nanoseconds
