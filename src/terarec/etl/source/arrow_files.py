# SPDX-License-Identifier: Apache-2.0
"""Parquet and Arrow files, row group by row group and batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import override

from terarec.errors import FormatError, TerarecError
from terarec.etl.cleaning import Cleaning, parse_texts
from terarec.etl.columns import (
    array_of,
    from_arrow,
    lists_of,
    null_mask,
    numbers_of,
    numpy_values,
    without_empty,
)
from terarec.etl.source.blocks import (
    EXPECTED,
    FieldFaults,
    InputFault,
    ParsedPart,
    Place,
    RawPart,
    SourceFile,
    apply_error_policy,
    check_names,
    report_fault,
    without_bad,
)
from terarec.etl.source.text import check_kind
from terarec.etl.times import MOMENTS, accepted_times, arrow_times, beyond_years, has_parts, is_moment, parse_times
from terarec.formats.arrays import is_list, is_number, items_type, plain_array
from terarec.formats.integers import accepted_integers, integers_of_floats
from terarec.io.remote import locate
from terarec.ragged import offsets_of
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.preparation import BadInputPolicy

_EXPECTED = {**EXPECTED, "hex": "up to 8 hexadecimal digits, or an integer from 0 to 4294967295"}


def _fits(column: SourceColumn, file_type: pa.DataType) -> bool:
    """Return whether values of an Arrow type are values of a column."""
    inner, holds_lists = items_type(file_type)
    written = is_string(inner)
    # Numbers and seconds may be texts where a field holds several.
    cut = written and column.separator is not None
    whole = pa.types.is_integer(inner) or pa.types.is_floating(inner) or cut
    accepted = {
        "text": written,
        "integer": whole,
        "number": is_number(inner) or cut,
        "hex32": written or pa.types.is_integer(inner),
        "time": written if column.format is not None else whole,
    }[column.type] or (column.type == "time" and is_moment(inner))
    return accepted and (holds_lists or written if column.separator is not None else not holds_lists)


def _missing_values(array: pa.Array, column: SourceColumn) -> pa.Array | None:
    """Return a plain array of any type as one of the column, if none of its values is there; else None.

    Tables hold a column that is missing in all rows as nulls without a type, as NaN, or in whatever type they infer.
    """
    kinds = {"integer": pa.int64(), "number": pa.float64(), "hex32": pa.int64(), "text": pa.large_string()}
    kind = kinds.get(column.type, pa.int64() if column.format is None else pa.large_string())
    if column.separator is not None and is_list(array.type) and array.null_count < len(array):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        items = array.flatten()
        return lists_of(pa.nulls(len(items), kind), offsets_of(lengths)) if is_all_missing(items) else None
    return pa.nulls(len(array), kind if column.separator is None else pa.list_(kind)) if is_all_missing(array) else None


def is_all_missing(array: pa.Array) -> bool:
    """Return whether all values are null or NaN."""
    array = plain_array(array)
    nulls = pc.is_null(array, nan_is_null=True) if pa.types.is_floating(array.type) else array.is_null()
    return not len(array) or bool(pc.all(nulls).as_py())


def read_table(
    table: pa.Table | pa.RecordBatch, spec: SourceSpec, faults: list[FieldFaults], path: str
) -> tuple[dict[str, pa.Array], dict[str, NDArray[np.int32]]]:
    """Read the columns of a table, and the nanoseconds of times; invalid values are missing and go to `faults`.

    Raises:
        FormatError: A column of another type, in the file at `path`, that has values.
    """
    columns: dict[str, pa.Array] = {}
    nanoseconds: dict[str, NDArray[np.int32]] = {}
    for column in spec.columns:
        array = table.column(column.name)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
        file_type, array = array.type, plain_array(array)
        if not _fits(column, file_type):
            missing = _missing_values(array, column)
            if missing is None:
                lists = "" if column.separator is None else " in lists or separated text"
                problem = f"type is {file_type}, expected {column.type}{lists}"
                raise FormatError(f"{path}, column {column.name!r}", problem)
            array = missing
        columns[column.name] = _read_array(array, column, spec, faults, nanoseconds)
    return columns, nanoseconds


def _read_array(
    array: pa.Array,
    column: SourceColumn,
    spec: SourceSpec,
    faults: list[FieldFaults],
    nanoseconds: dict[str, NDArray[np.int32]],
) -> pa.Array:
    if column.separator is not None and is_string(array.type):
        texts, bad = _unicode(array)
        if bad is not None:
            faults.append(without_bad(texts, column, bad, "utf8", _EXPECTED["utf8"], array)[1])
        array = pc.split_pattern(Cleaning.of_files(spec).texts(texts), column.separator)
    offsets = None
    if is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = offsets_of(lengths)
        array = array.flatten()
    values, kind, bad, parts = _read_values(array, column, spec)
    if has_parts(column):
        nanoseconds[column.name] = np.zeros(len(values), dtype=np.int32) if parts is None else parts
    read = values if offsets is None else lists_of(values, offsets)
    if bad is not None and bad.any():
        expected = _expected(kind, column, array.type)
        read, fields = without_bad(read, column, bad, kind, expected, array)
        faults.append(fields)
    return read


def _expected(kind: str, column: SourceColumn, file_type: pa.DataType) -> str:
    if kind == "time":
        return MOMENTS if is_moment(file_type) else accepted_times(column.format)
    if kind == "integer" and pa.types.is_floating(file_type):
        return accepted_integers(np.dtype(file_type.to_pandas_dtype()))
    return _EXPECTED[kind]


class ReadValues(NamedTuple):
    """Values, the kind of fault that they may have, which do, bool[m], and the nanoseconds of times."""

    values: pa.Array
    kind: str
    bad: NDArray[np.bool_] | None = None
    nanoseconds: NDArray[np.int32] | None = None


def _read_values(array: Any, column: SourceColumn, spec: SourceSpec) -> ReadValues:
    """Read a plain array of no lists."""
    if is_string(array.type):
        texts, bad = _unicode(array)
        read = read_texts(Cleaning.of_files(spec).texts(texts), column)
        return read if bad is None else read._replace(bad=bad if read.bad is None else bad | read.bad)
    if column.type == "number":
        # Integers of more than 53 bits are rounded, as text is.
        numbers = numbers_of(array.cast(pa.float64(), safe=False))
        infinite: NDArray[np.bool_] = np.isinf(numbers)
        return ReadValues(array_of(np.where(infinite, np.nan, numbers)), "infinite", infinite)
    if column.type == "time" and is_moment(array.type):
        # Whole seconds are rounded down, also before 1970.
        times, missing = arrow_times(array), null_mask(array)
        seconds = array_of(times.seconds, times.bad if missing is None else times.bad | missing)
        return ReadValues(seconds, "time", times.bad, times.nanoseconds)
    if pa.types.is_floating(array.type):
        integers = _integers_of_floats(array)
        return _times_of(integers) if column.type == "time" else integers
    kind, bad = "integer_range", None
    if column.type == "hex32" or array.type == pa.uint64():
        last = 2**63 - 1
        if column.type == "hex32":
            kind, last = "hex", 2**32 - 1
        # uint64 is compared as it is, since its upper half is not an int64.
        wide = array if array.type == pa.uint64() else array.cast(pa.int64())
        beyond = pc.or_(pc.less(wide, pa.scalar(0, wide.type)), pc.greater(wide, pa.scalar(last, wide.type)))
        bad = pc.fill_null(beyond, False).to_numpy(zero_copy_only=False)
        array = pc.if_else(beyond, pa.scalar(None, type=wide.type), wide)
    read = ReadValues(from_arrow(array, "hex32" if column.type == "hex32" else "integer"), kind, bad)
    return _times_of(read) if column.type == "time" else read


def _times_of(read: ReadValues) -> ReadValues:
    """Return integers as times, without those that are out of range."""
    seconds, missing = numpy_values(read.values), null_mask(read.values)
    late = beyond_years(seconds)
    if missing is not None:
        late &= ~missing
    if not late.any():
        return read
    values = array_of(seconds, late if missing is None else late | missing)
    return ReadValues(values, "time", late if read.bad is None else late | read.bad)


def _integers_of_floats(array: Any) -> ReadValues:
    """Read integers that a table holds as floats, since some of them are missing."""
    floats = array.to_numpy(zero_copy_only=False)
    integers, bad = integers_of_floats(floats)
    return ReadValues(array_of(integers, bad | np.isnan(floats)), "integer", bad)


def _unicode(array: Any) -> tuple[pa.LargeStringArray, NDArray[np.bool_] | None]:
    """Return texts, null where they are not UTF-8, which a file may hold as text; and which are so, None for none."""
    texts = array.cast(pa.large_string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        contents = texts.cast(pa.large_binary())
        contents.validate(full=True)  # before they are read
        bad = np.array([text is not None and not _is_unicode(text) for text in contents.to_pylist()])
        if not bad.any():
            raise
        return pc.if_else(pa.array(bad), pa.scalar(None, texts.type), texts), bad
    return texts, None


def _is_unicode(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_texts(texts: pa.LargeStringArray, column: SourceColumn) -> ReadValues:
    """Read texts, cleaned, as a column."""
    if column.type == "text":
        return ReadValues(without_empty(texts), "utf8")
    if column.type == "time" and column.format is not None:
        times, missing = parse_times(texts, column.format), null_mask(texts)
        seconds = array_of(times.seconds, times.bad if missing is None else times.bad | missing)
        return ReadValues(seconds, "time", times.bad, times.nanoseconds)
    values, bad = parse_texts(texts, "integer" if column.type == "time" else column.type)
    kinds = {"integer": "integer", "time": "integer", "number": "number", "hex32": "hex"}
    read = ReadValues(values, kinds[column.type], bad)
    return _times_of(read) if column.type == "time" else read


def is_string(file_type: pa.DataType) -> bool:
    """Return whether values are text."""
    return bool(
        pa.types.is_string(file_type) or pa.types.is_large_string(file_type) or pa.types.is_string_view(file_type)
    )


_HEAD_BYTES = 4096
"""Bytes by which a file that Arrow rejects is recognized."""
BATCH_ROWS = 1 << 16
"""Most rows of a block of a Parquet file, whose row groups may be as large as the file."""


def _family(file_type: pa.DataType) -> str:
    """Return the name of the types whose values of one column are read alike."""
    # Tables hold integers as floats where some are missing, and times in the unit that they need.
    families = {"text": is_string, "number": is_number, "time": is_moment}
    return next((name for name, holds in families.items() if holds(file_type)), str(file_type))


class TypedReader:
    """Reads files that hold the types of their columns, which are the same in all."""

    is_text = False
    place: Place = "row"

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._names = [column.name for column in spec.columns]
        self._first: dict[str, tuple[str, pa.DataType]] = {}  # the first file that has values of a column's type

    def _check_schema(self, path: str, schema: pa.Schema) -> None:
        check_names(path, self._names, schema.names)
        file_types = {name: items_type(schema.field(name).type)[0] for name in self._names}
        for column in self._spec.columns:
            name = column.name
            # A column of another type may be missing in all rows, which only its values tell.
            if not _fits(column, schema.field(name).type):
                continue
            first_path, expected = self._first.setdefault(name, (path, file_types[name]))
            if _family(file_types[name]) == _family(expected) or self._is_missing_in(path, name):
                continue
            if not self._is_missing_in(first_path, name):
                raise FormatError(
                    f"{path}, column {name!r}", f"type is {file_types[name]}, expected {expected} as in {first_path}"
                )
            self._first[name] = path, file_types[name]

    def _is_missing_in(self, path: str, name: str) -> bool:
        """Return whether no row of the file has a value of the column."""
        raise NotImplementedError

    def head(self, part: RawPart, rows: int) -> RawPart:
        """Return the first rows of a part."""
        return part.cut(rows, part.content.slice(0, rows))

    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        """Return the columns of a batch."""
        faults: list[FieldFaults] = []
        columns, nanoseconds = read_table(part.content, self._spec, faults, part.path)

        def fault_of(fields: FieldFaults, at: int) -> InputFault:
            number = part.before + int(fields.rows[at]) + 1
            return report_fault(fields, at, path=part.path, number=number, place="row")

        return apply_error_policy(ParsedPart(columns, nanoseconds=nanoseconds), faults, policy, fault_of)

    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        """Return the numbers in the file of rows at some positions of a part."""
        numbers: list[int] = (positions + part.before + 1).tolist()
        return numbers


class ParquetReader(TypedReader):
    """Reads Parquet files. ``content`` of a part is a batch."""

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the rows of `file`, row group by row group, large ones in pieces."""
        before = 0
        with _opened(file.path, "parquet") as source, pq.ParquetFile(source) as opened:
            self._check_schema(file.path, opened.schema_arrow)
            total = opened.metadata.num_rows
            for group in range(opened.num_row_groups):
                for batch in opened.iter_batches(BATCH_ROWS, row_groups=[group], columns=self._names):
                    # Progress is in bytes of the stored file; a batch knows its unpacked ones.
                    share = file.bytes * batch.num_rows // total
                    if after is None or before > after.before:
                        yield RawPart(file.path, before, batch.num_rows, share, batch)
                    before += batch.num_rows
        if not before:
            raise _no_rows(file.path)

    @override
    def _is_missing_in(self, path: str, name: str) -> bool:
        with _opened(path, "parquet") as source, pq.ParquetFile(source) as opened:
            return all(is_all_missing(batch.column(0)) for batch in opened.iter_batches(BATCH_ROWS, columns=[name]))

    def check_schemas(self, paths: Iterable[str]) -> None:
        """Raise unless all of these files have the columns, in the same types; their rows are not read.

        Raises:
            ConfigError: A file lacks a column.
            FormatError: A damaged file, or a column of another type.
        """
        for path in paths:
            with _opened(path, "parquet") as source:
                self._check_schema(path, pq.read_schema(source))

    def count_rows(self, file: SourceFile, threads: int = 1) -> int:
        """Count the rows of `file`."""
        with _opened(file.path, "parquet") as source:
            return int(pq.read_metadata(source).num_rows)

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the values in `file`."""
        with _opened(file.path, "parquet") as source:
            metadata = pq.read_metadata(source)
        return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def _check_places(batch: pa.RecordBatch) -> None:
    """Raise `ArrowInvalid` where a value is at a place outside the memory of its column, as in a damaged file."""
    for array in batch.columns:
        # Values of a fixed width have no places. Arrow would check them, as dates that have a time of day.
        if pa.types.is_primitive(array.type) or pa.types.is_decimal(array.type):
            array.validate()
            continue
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            # Text that is not UTF-8 is one of the faults of values. Its places are checked as those of bytes.
            if "UTF8" not in str(error):
                raise
            if is_string(array.type) and not pa.types.is_dictionary(array.type):
                array.cast(pa.large_binary()).validate(full=True)


class IpcReader(TypedReader):
    """Reads Arrow files, of the random access or the stream format. ``content`` of a part is a batch."""

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the batches of `file` that have rows."""
        before = 0
        with _opened(file.path, "arrow") as source, _batches(source) as (schema, batches):
            self._check_schema(file.path, schema)
            for batch in batches:
                chosen = batch.select(self._names)
                _check_places(chosen)
                if chosen.num_rows and (after is None or before > after.before):
                    yield RawPart(file.path, before, chosen.num_rows, batch.nbytes, chosen)
                before += chosen.num_rows
        if not before:
            raise _no_rows(file.path)

    @override
    def _is_missing_in(self, path: str, name: str) -> bool:
        with _opened(path, "arrow") as source, _batches(source) as (_, batches):
            return all(is_all_missing(batch.column(name)) for batch in batches)

    def count_rows(self, file: SourceFile, threads: int = 1) -> int:
        """Count the rows of `file`."""
        return sum(part.num_rows for part in self.parts(file))

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the values in `file`."""
        return file.bytes


@contextmanager
def _opened(path: str, source_format: Literal["parquet", "arrow"]) -> Iterator[Any]:
    """Open a file for PyArrow; a damaged file, or one of another format, is a `FormatError`."""
    source = locate(path).input()
    try:
        yield source
    except TerarecError:
        raise
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        check_kind(path, _head(path), source_format)
        # Arrow adds its own stack trace in further lines.
        raise FormatError(path, f"cannot be read ({str(error).splitlines()[0]}), expected a whole file") from error
    finally:
        source.close()


def _head(path: str) -> bytes:
    """Return the first bytes of a file; none if it cannot be read."""
    try:
        with locate(path).input() as source:
            return bytes(source.read(_HEAD_BYTES))
    except OSError:
        return b""


def read_schema(path: str, source_format: Literal["parquet", "arrow"]) -> pa.Schema:
    """Return the schema of a Parquet or an Arrow file."""
    with _opened(path, source_format) as source:
        if source_format == "parquet":
            return pq.read_schema(source)
        with _batches(source) as (schema, _):
            return schema


@contextmanager
def _batches(source: Any) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with source if isinstance(source, pa.NativeFile) else pa.PythonFile(source, mode="r") as stream:
        # A stream has no mark of its own: it begins with a length.
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        if is_file:
            reader = pa.ipc.open_file(stream)
            yield reader.schema, (reader.get_batch(at) for at in range(reader.num_record_batches))
        else:
            stream_reader = pa.ipc.open_stream(stream)
            yield stream_reader.schema, iter(stream_reader)


def _no_rows(path: str) -> FormatError:
    return FormatError(path, "the file is empty, expected at least one row")


def parquet_tables(path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of some columns of a Parquet file, some at a time."""
    with _opened(path, "parquet") as source, pq.ParquetFile(source) as opened:
        for batch in opened.iter_batches(BATCH_ROWS, columns=list(columns)):
            yield pa.Table.from_batches([batch])
