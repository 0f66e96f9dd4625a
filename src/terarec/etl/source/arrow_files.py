"""Parquet and Arrow files, row group by row group and batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.columns import Column
from terarec.etl.source.arrow_values import check_type, read_column, value_type
from terarec.etl.source.bad_input import InputFault, Place
from terarec.etl.source.files import SourceFile
from terarec.etl.source.names import check_names
from terarec.etl.source.raw_block import FieldFaults, ParsedPart, RawPart
from terarec.etl.source.settle import report_fault, settle
from terarec.io import locate
from terarec.spec import BadInputPolicy, SourceSpec

_BATCH_ROWS = 1 << 16
"""Most rows of a block of a Parquet file, whose row groups may be as large as the file."""


class _TypedReader:
    """Reads files that tell the types of their columns, which have to be the same in all."""

    is_text = False
    place: Place = "row"

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._names = [column.name for column in spec.columns]
        self._first: tuple[str, dict[str, pa.DataType]] | None = None

    def _check_schema(self, path: str, schema: pa.Schema) -> None:
        check_names(path, self._names, schema.names)
        found = {name: value_type(schema.field(name).type) for name in self._names}
        for column in self._spec.columns:
            check_type(path, column, schema.field(column.name).type)
        if self._first is None:
            self._first = path, found
        first_path, expected = self._first
        for name in self._names:
            if found[name] != expected[name]:
                raise FormatError(
                    f"{path}: column {name!r} is {found[name]}, expected {expected[name]} as in {first_path}"
                )

    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        """The columns of a batch."""
        found: list[FieldFaults] = []
        columns: dict[str, Column] = {
            column.name: read_column(part.content.column(column.name), column, self._spec, found)
            for column in self._spec.columns
        }

        def fault_of(fields: FieldFaults, at: int) -> InputFault:
            number = part.before + int(fields.rows[at]) + 1
            return report_fault(fields, at, path=part.path, number=number, place="row")

        return settle(ParsedPart(columns), found, policy, fault_of)

    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        """The rows of the file that stand at some positions of a part."""
        numbers: list[int] = (positions + part.before + 1).tolist()
        return numbers


class ParquetReader(_TypedReader):
    """Reads Parquet files. ``content`` of a part is a batch.

    Args:
        spec: of the files.
    """

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """The rows of `file`, row group by row group, large ones in pieces."""
        before = 0
        with _opened(file.path) as source, pq.ParquetFile(source) as opened:
            self._check_schema(file.path, opened.schema_arrow)
            total = opened.metadata.num_rows
            for group in range(opened.num_row_groups):
                for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=self._names):
                    share = file.bytes * batch.num_rows // total
                    if after is None or before > after.before:
                        yield RawPart(file.path, before, batch.num_rows, share, batch)
                    before += batch.num_rows
        if not before:
            raise _no_rows(file.path)

    def check_schemas(self, paths: Iterable[str]) -> None:
        """Raise unless all of these files have the columns, in the same types; their rows are not read.

        Raises:
            ConfigError: a file lacks a column.
            FormatError: a damaged file, or a column of another type.
        """
        for path in paths:
            with _opened(path) as source:
                self._check_schema(path, pq.read_schema(source))

    def count_rows(self, file: SourceFile, threads: int = 1) -> int:
        """Rows of `file`."""
        with _opened(file.path) as source:
            return int(pq.read_metadata(source).num_rows)

    def text_bytes(self, file: SourceFile) -> int:
        """About the bytes of the values in `file`."""
        with _opened(file.path) as source:
            metadata = pq.read_metadata(source)
        return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


class IpcReader(_TypedReader):
    """Reads Arrow files, of the random access or the stream format. ``content`` of a part is a batch.

    Args:
        spec: of the files.
    """

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """The batches of `file` that have rows."""
        before = 0
        with _opened(file.path) as source, _batches(source) as (schema, batches):
            self._check_schema(file.path, schema)
            for batch in batches:
                chosen = batch.select(self._names)
                if chosen.num_rows and (after is None or before > after.before):
                    yield RawPart(file.path, before, chosen.num_rows, batch.nbytes, chosen)
                before += chosen.num_rows
        if not before:
            raise _no_rows(file.path)

    def count_rows(self, file: SourceFile, threads: int = 1) -> int:
        """Rows of `file`."""
        return sum(part.num_rows for part in self.parts(file))

    def text_bytes(self, file: SourceFile) -> int:
        """About the bytes of the values in `file`."""
        return file.bytes


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """What PyArrow reads from; a damaged file is a `FormatError`."""
    source = locate(path).open()
    try:
        yield source
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise FormatError(f"{path}: cannot be read ({str(error).splitlines()[0]}), expected a whole file") from error
    finally:
        if not isinstance(source, str):
            source.close()


@contextmanager
def _batches(source: Any) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with pa.OSFile(source) if isinstance(source, str) else pa.PythonFile(source, mode="r") as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        if is_file:
            reader = pa.ipc.open_file(stream)
            yield reader.schema, (reader.get_batch(at) for at in range(reader.num_record_batches))
        else:
            stream_reader = pa.ipc.open_stream(stream)
            yield stream_reader.schema, iter(stream_reader)


def _no_rows(path: str) -> FormatError:
    return FormatError(f"{path}: the file is empty, expected at least one row")
