# SPDX-License-Identifier: Apache-2.0
"""Delimited text: the layout of each file by its header, its blocks, and their faults."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import array_of, flat, list_offsets, lists_of, null_mask, numpy_values
from terarec.etl.source.blocks import (
    EXPECTED,
    FATAL,
    MAX_LINE_BYTES,
    FieldFaults,
    InputFault,
    ParsedPart,
    Place,
    RawPart,
    SourceFile,
    apply_error_policy,
    check_names,
    report_fault,
    show,
    without_bad,
)
from terarec.etl.source.text import (
    BLOCK_BYTES,
    check_delimited,
    check_rows,
    check_text,
    count_text_rows,
    first_rows,
    read_text,
    text_bytes,
)
from terarec.etl.times import accepted_times, beyond_years, has_parts, parse_times
from terarec.kernels.cpu.delimited import (
    DelimitedField,
    DelimitedLayout,
    FieldFault,
    FieldType,
    Quoting,
    count_rows,
    first_record_bytes,
    lines_of_rows,
    parse_delimited,
)
from terarec.spec import SourceColumn, SourceSpec
from terarec.spec.preparation import BadInputPolicy


def delimited_field(column: SourceColumn | None) -> DelimitedField:
    """Return the parser's description of a column; None is a field that no column reads."""
    if column is None:
        return DelimitedField("skip")
    separator = (column.separator or "").encode()
    if column.type == "time":
        return DelimitedField("integer" if column.format is None else "text", separator)
    field_type: FieldType = column.type
    return DelimitedField(field_type, separator)


def _times(
    source: SourceColumn, array: pa.Array, field_faults: list[FieldFaults]
) -> tuple[pa.Array, NDArray[np.int32]]:
    """Return a column of times as seconds, and their nanoseconds; bad ones are added to `field_faults`."""
    written, offsets = flat(array), list_offsets(array)
    missing = null_mask(written)
    if source.format is None:
        seconds, nanoseconds = numpy_values(written), np.zeros(len(written), dtype=np.int32)
        bad = beyond_years(seconds)
        bad = bad if missing is None else bad & ~missing
    else:
        seconds, nanoseconds, bad = parse_times(written, source.format)
    times = array_of(seconds, bad if missing is None else bad | missing)
    times = times if offsets is None else lists_of(times, offsets)
    if bad.any():
        times, faults = without_bad(times, source, bad, "time", accepted_times(source.format), written)
        field_faults.append(faults)
    return times, nanoseconds


_FIRST_BYTES = 1 << 16
"""Bytes of a file that are read for its first line, and more where it is longer."""
_MARK = "\x1f"
"""Occurs in no name of a column."""


class DelimitedReader:
    """Reads lines of delimited fields."""

    def __init__(self, spec: SourceSpec, block_bytes: int = BLOCK_BYTES) -> None:
        self._spec = spec
        self._block_bytes = block_bytes
        self._columns = {column.name: column for column in spec.columns}
        self._zero_nulls = frozenset(
            column.name for column in spec.columns if column.type == "integer" and column.separator is None
        )
        self._quoting = Quoting(spec.delimiter.encode(), spec.quote, spec.trim)
        self._layouts: dict[Any, DelimitedLayout] = {}  # made once for each header, not for each block

    is_text = True
    place: Place = "line"

    def parts(self, file: SourceFile, after: RawPart | None = None) -> Iterator[RawPart]:
        """Yield the lines of `file` in blocks; ``content`` is the text and the names of the fields."""
        names: tuple[str, ...] | None = None
        if not self._spec.header:
            names = tuple(column.name for column in self._spec.columns)
        lines = rows = begin = 0
        if after is not None:
            text, names = after.content
            lines, begin = after.before + count_rows(text, self._quoting).lines, after.text_end
        for stored, read_bytes, end in read_text(file, self._block_bytes, begin, self._quoting):
            text = _in_utf8(stored, self._spec)
            if not begin and not lines and len(self._spec.columns) > 1:
                check_delimited(file.path, text[: text.find(b"\n") + 1 or len(text)])
            if names is None:
                first = first_record_bytes(text, self._quoting)
                header, text = text[:first], text[first:]
                names = self.fields(file.path, header.rstrip(b"\r\n"))
                lines = count_rows(header).lines
            # Here and not by the threads that parse: the next block needs the row id and the line that it begins with.
            num_lines, num_rows, _ = count_rows(text, self._quoting)
            yield RawPart(file.path, lines, num_rows, read_bytes, (text, names), end)
            lines += num_lines
            rows += num_rows
        if after is None:
            check_rows(file, rows)

    def head(self, part: RawPart, rows: int) -> RawPart:
        """Return the first rows of a part."""
        text, names = part.content
        return part.cut(rows, (first_rows(text, rows, self._quoting), names))

    def parse(self, part: RawPart, policy: BadInputPolicy) -> ParsedPart:
        """Return the columns of a block."""
        text, names = part.content
        parsed = parse_delimited(text, self._layout(names, policy))
        # Columns are not needed: no policy accepts this fault.
        if FATAL in parsed.fault_counts:
            return ParsedPart({}, None, {FATAL: 1}, [_report(part, names, parsed.faults[-1])])
        columns: dict[str, pa.Array] = {}
        nanoseconds: dict[str, NDArray[np.int32]] = {}
        field_faults: list[FieldFaults] = []
        for name, array in zip(names, parsed.columns, strict=True):
            if array is not None:
                source = self._columns[name]
                columns[name] = array
                if source.type == "time":
                    columns[name], parts = _times(source, array, field_faults)
                    if has_parts(source):
                        nanoseconds[name] = parts
        faults = [_report(part, names, fault) for fault in parsed.faults]
        ordered = {name: columns[name] for name in self._columns}
        counts = {str(kind): count for kind, count in parsed.fault_counts.items()}
        read = ParsedPart(ordered, parsed.kept, counts, faults, self._zero_nulls, nanoseconds)

        def fault_of(fields: FieldFaults, at: int) -> InputFault:
            row = int(fields.rows[at])
            line = int(lines_of_rows(text, self._quoting)[row if parsed.kept is None else parsed.kept[row]])
            return report_fault(fields, at, path=part.path, number=part.before + line + 1)

        return apply_error_policy(read, field_faults, policy, fault_of)

    def numbers(self, part: RawPart, positions: NDArray[np.int64]) -> list[int]:
        """Return the line numbers in the file of rows at some positions of a part."""
        # Found again for the few rows with faults: a line number for every row would cost each block.
        numbers: list[int] = (lines_of_rows(part.content[0], self._quoting)[positions] + part.before + 1).tolist()
        return numbers

    def count_rows(self, file: SourceFile, threads: int) -> int:
        """Count the rows of `file`, bad ones included."""
        rows = count_text_rows(file, threads, self._quoting)
        if self._spec.header and rows:
            next(self.parts(file))  # rejects a header that does not fit
            rows -= 1
        check_rows(file, rows)
        return rows

    def text_bytes(self, file: SourceFile) -> int:
        """Return about the bytes of the text in `file`."""
        return text_bytes(file)

    def fields(self, path: str, header: bytes) -> tuple[str, ...]:
        """Return the names of the fields by the header of the file at `path`.

        Raises:
            ConfigError: It lacks a column.
            FormatError: Not UTF-8, or a column twice.
        """
        names = split_header(path, header, self._spec)
        if len(names) == 1 < len(self._columns):
            raise ConfigError(
                path,
                f"its header is the single column {names[0]!r}, expected the names of columns separated by the "
                f"delimiter {self._spec.delimiter!r}",
            )
        check_names(path, tuple(self._columns), names)
        return tuple(names)

    def _layout(self, names: tuple[str, ...], policy: BadInputPolicy) -> DelimitedLayout:
        if (names, policy) not in self._layouts:
            self._layouts[names, policy] = DelimitedLayout(
                fields=tuple(delimited_field(self._columns.get(name)) for name in names),
                delimiter=self._spec.delimiter.encode(),
                quote=self._spec.quote,
                trim=self._spec.trim,
                trim_quoted=self._spec.trim and self._spec.cleaning == "values",
                missing=tuple(word.encode() for word in self._spec.missing if word),
                policy=policy,
                max_line_bytes=MAX_LINE_BYTES,
            )
        return self._layouts[names, policy]


def first_record(file: SourceFile, spec: SourceSpec) -> bytes:
    """Return the first line of a file in UTF-8, without its end: the header, or without one the first row."""
    quoting = Quoting(spec.delimiter.encode(), spec.quote, spec.trim)
    text = next((block.text for block in read_text(file, _FIRST_BYTES, quoting=quoting)), b"")
    check_rows(file, len(text))
    text = _in_utf8(text, spec) if spec.header else _in_utf8(text, spec).lstrip(b"\r\n")
    return text[: first_record_bytes(text, quoting)].rstrip(b"\r\n")


def _in_utf8(text: bytes, spec: SourceSpec) -> bytes:
    return text if spec.encoding == "utf-8" else text.decode(spec.encoding).encode()


def split_header(path: str, header: bytes, spec: SourceSpec) -> list[str]:
    """Return the names in a header line, without white space around them."""
    check_text(path, header)
    check_delimited(path, header)
    if not header.strip():
        raise FormatError(f"{path}: line 1", "empty, expected the names of columns")
    if len(header) > MAX_LINE_BYTES:
        raise FormatError(f"{path}: line 1", f"{show(header)}, expected a line of at most {MAX_LINE_BYTES} bytes")
    try:
        line = header.decode()
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: line 1", f"byte {error.start} is not UTF-8, expected the names of columns"
        ) from None
    if not spec.quote or b'"' not in header:
        return [field.strip() for field in line.split(spec.delimiter)]
    quotes = DelimitedLayout((DelimitedField("skip"),), spec.delimiter.encode(), quote=True, trim=spec.trim)
    if "quote" in parse_delimited(header, quotes).fault_counts:
        raise FormatError(f"{path}: line 1", f"{show(header)}, expected {EXPECTED['quote']}")
    # The csv module takes one character.
    mark = spec.delimiter if len(spec.delimiter) == 1 else _MARK
    text = line.replace(spec.delimiter, mark)
    try:
        fields = next(csv.reader([text], delimiter=mark, skipinitialspace=spec.trim))
    except csv.Error as error:
        raise FormatError(f"{path}: line 1", f"{show(header)}, expected the names of columns ({error})") from None
    return [field.replace(mark, spec.delimiter).strip() for field in fields]


def _report(part: RawPart, names: tuple[str, ...], fault: FieldFault) -> InputFault:
    """Return a fault in a line, or in one of its fields."""
    column = None
    got, expected = show(fault.text), EXPECTED[fault.kind]
    if fault.kind in ("short_line", "long_line"):
        got = f"found {fault.field} field{'s' if fault.field != 1 else ''}"
        expected = f"{len(names)} separated by the delimiter"
    elif fault.kind != "oversized_line":
        column = names[fault.field] if fault.field < len(names) else None
    number = part.before + fault.line + 1
    return InputFault(path=part.path, number=number, kind=fault.kind, column=column, got=got, expected=expected)
