"""Parquet and Arrow files, row group by row group and batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.etl.cleaning import Cleaning, beyond_years, parse_texts, parse_times
from terarec.etl.columns import array_of, from_arrow, lists_of, null_mask, numbers_of, numpy_values, without_empty
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
from terarec.formats.parquet import is_list
from terarec.io import locate
from terarec.ragged import offsets_of
from terarec.spec import BadInputPolicy, SourceColumn, SourceSpec

_EXPECTED = {**EXPECTED, "hex": "up to 8 hexadecimal digits, or an integer from 0 to 4294967295"}


def check_type(path: str, column: SourceColumn, found: pa.DataType) -> None:
    """Check that an Arrow type fits the spec of a column.

    Raises:
        FormatError: Another type.
    """
    inner = value_type(found)
    holds_lists = is_list(found)
    written = is_string(inner)
    accepted = {
        "text": written,
        "integer": pa.types.is_integer(inner)
        or pa.types.is_floating(inner)
        or (written and column.separator is not None),
        "number": _is_number(inner) or (written and column.separator is not None),
        "hex32": written or pa.types.is_integer(inner),
        "time": written if column.format is not None else pa.types.is_integer(inner),
    }[column.type] or (column.type == "time" and _is_moment(inner))
    fits = holds_lists or written if column.separator is not None else not holds_lists
    if not (accepted and fits):
        lists = "" if column.separator is None else " in lists or separated text"
        raise FormatError(f"{path}, column {column.name!r}", f"type is {found}, expected {column.type}{lists}")


def value_type(found: pa.DataType) -> pa.DataType:
    """Return the type of the values of dictionaries and of lists."""
    while pa.types.is_dictionary(found) or is_list(found):
        found = found.value_type
    return found


def read_array(
    array: pa.Array | pa.ChunkedArray, column: SourceColumn, spec: SourceSpec, faults: list[FieldFaults]
) -> pa.Array:
    """Read an Arrow array, chunked or not, as a column; invalid values are missing and go to `faults`."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if column.separator is not None and is_string(array.type):
        texts = array.cast(pa.large_string())
        array = pc.split_pattern(Cleaning.of_files(spec).texts(texts), column.separator)
    offsets = None
    if is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = offsets_of(lengths)
        array = array.flatten()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
    values, kind, bad = _read_values(array, column, spec)
    read = values if offsets is None else lists_of(values, offsets)
    if bad is not None and bad.any():
        expected = _EXPECTED[kind] if column.format is None or kind != "time" else f"a time like {column.format!r}"
        read, fields = without_bad(read, column, bad, kind, expected, array)
        faults.append(fields)
    return read


_Read: TypeAlias = tuple[pa.Array, str, NDArray[np.bool_] | None]
"""Values, the kind of fault that they may have, and which do, bool[m]."""


def _read_values(array: Any, column: SourceColumn, spec: SourceSpec) -> _Read:
    """Read a plain array."""
    if is_string(array.type):
        return _read_texts(Cleaning.of_files(spec).texts(array.cast(pa.large_string())), column)
    if column.type == "number":
        # Integers of more than 53 bits are rounded, as text is.
        numbers = numbers_of(array.cast(pa.float64(), safe=False))
        infinite: NDArray[np.bool_] = np.isinf(numbers)
        return array_of(np.where(infinite, np.nan, numbers)), "infinite", infinite
    if column.type == "time" and _is_moment(array.type):
        # Dates cast to microseconds, too. Whole seconds are rounded down, also before 1970.
        micros = array.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        return array_of(numpy_values(micros) // 1_000_000, null_mask(micros)), "time", None
    if pa.types.is_floating(array.type):
        return _integers_of_floats(array)
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
    values = from_arrow(array, "hex32" if column.type == "hex32" else "integer")
    if column.type == "time":
        found = _times_of(values)
        if found is not None:
            return found
    return values, kind, bad


def _times_of(seconds: pa.Array) -> _Read | None:
    """Return seconds without those that are out of range; None if there are none."""
    late = beyond_years(numpy_values(seconds))
    missing = null_mask(seconds)
    if missing is not None:
        late &= ~missing
    if not late.any():
        return None
    return array_of(numpy_values(seconds), late if missing is None else late | missing), "time", late


def _integers_of_floats(array: Any) -> _Read:
    """Read integers that a table holds as floats, since some of them are missing."""
    numbers = numbers_of(array.cast(pa.float64()))
    # From 2**53 on a float64 may be one of several integers: its id would be that of another value.
    good = (np.abs(numbers) < 2**53) & (np.floor(numbers) == numbers)
    bad: NDArray[np.bool_] = ~good & ~np.isnan(numbers)
    return array_of(np.where(good, numbers, 0).astype(np.int64), ~good), "integer", bad


def _read_texts(texts: pa.LargeStringArray, column: SourceColumn) -> _Read:
    if column.type == "text":
        return without_empty(texts), "utf8", None
    if column.type == "time" and column.format is not None:
        seconds, unreadable = parse_times(texts, column.format)
        missing = null_mask(texts)
        return array_of(seconds, unreadable if missing is None else unreadable | missing), "time", unreadable
    values, bad = parse_texts(texts, "integer" if column.type == "time" else column.type)
    late = _times_of(values) if column.type == "time" and bad is None else None
    if late is not None:
        return late
    return values, {"integer": "integer", "time": "integer", "number": "number", "hex32": "hex"}[column.type], bad


def is_string(found: pa.DataType) -> bool:
    """Return whether values are text."""
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found))


def _is_number(found: pa.DataType) -> bool:
    return bool(pa.types.is_floating(found) or pa.types.is_integer(found) or pa.types.is_decimal(found))


def _is_moment(found: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(found) or pa.types.is_date(found))


_BATCH_ROWS = 1 << 16
"""Most rows of a block of a Parquet file, whose row groups may be as large as the file."""


class _TypedReader:
    """Reads files that hold the types of their columns, which are the same in all."""

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
                    f"{path}, column {name!r}", f"type is {found[name]}, expected {expected[name]} as in {first_path}"
                )

    def head(self, part: RawPart, rows: int) -> RawPart:
        """Return the first rows of a part."""
        return part.cut(rows, part.content.slice(0, rows))

    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        """Return the columns of a batch."""
        found: list[FieldFaults] = []
        columns = {
            column.name: read_array(part.content.column(column.name), column, self._spec, found)
            for column in self._spec.columns
        }

        def fault_of(fields: FieldFaults, at: int) -> InputFault:
            number = part.before + int(fields.rows[at]) + 1
            return report_fault(fields, at, path=part.path, number=number, place="row")

        return apply_error_policy(ParsedPart(columns), found, policy, fault_of)

    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        """Return the numbers in the file of rows at some positions of a part."""
        numbers: list[int] = (positions + part.before + 1).tolist()
        return numbers


class ParquetReader(_TypedReader):
    """Reads Parquet files. ``content`` of a part is a batch.

    Args:
        spec: Spec of the files.
    """

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the rows of `file`, row group by row group, large ones in pieces."""
        before = 0
        with _opened(file.path) as source, pq.ParquetFile(source) as opened:
            self._check_schema(file.path, opened.schema_arrow)
            total = opened.metadata.num_rows
            for group in range(opened.num_row_groups):
                for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=self._names):
                    # Progress is in bytes of the stored file; a batch knows its unpacked ones.
                    share = file.bytes * batch.num_rows // total
                    if after is None or before > after.before:
                        yield RawPart(file.path, before, batch.num_rows, share, batch)
                    before += batch.num_rows
        if not before:
            raise _no_rows(file.path)

    def check_schemas(self, paths: Iterable[str]) -> None:
        """Raise unless all of these files have the columns, in the same types; their rows are not read.

        Raises:
            ConfigError: A file lacks a column.
            FormatError: A damaged file, or a column of another type.
        """
        for path in paths:
            with _opened(path) as source:
                self._check_schema(path, pq.read_schema(source))

    def count_rows(self, file: SourceFile, threads: int = 1) -> int:
        """Count the rows of `file`."""
        with _opened(file.path) as source:
            return int(pq.read_metadata(source).num_rows)

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the values in `file`."""
        with _opened(file.path) as source:
            metadata = pq.read_metadata(source)
        return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


class IpcReader(_TypedReader):
    """Reads Arrow files, of the random access or the stream format. ``content`` of a part is a batch.

    Args:
        spec: Spec of the files.
    """

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the batches of `file` that have rows."""
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
        """Count the rows of `file`."""
        return sum(part.num_rows for part in self.parts(file))

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the values in `file`."""
        return file.bytes


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a file for PyArrow; a damaged file is a `FormatError`."""
    source = locate(path).open()
    try:
        yield source
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        # Arrow adds its own stack trace in further lines.
        raise FormatError(path, f"cannot be read ({str(error).splitlines()[0]}), expected a whole file") from error
    finally:
        if not isinstance(source, str):
            source.close()


def read_schema(path: str, source_format: Literal["parquet", "arrow"]) -> pa.Schema:
    """Return the schema of a Parquet or an Arrow file.

    Raises:
        FormatError: A damaged file.
    """
    with _opened(path) as source:
        if source_format == "parquet":
            return pq.read_schema(source)
        with _batches(source) as (schema, _):
            return schema


@contextmanager
def _batches(source: Any) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with pa.OSFile(source) if isinstance(source, str) else pa.PythonFile(source, mode="r") as stream:
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
