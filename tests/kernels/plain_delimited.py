# SPDX-License-Identifier: Apache-2.0
"""The parser of delimited text in plain Python, which the compiled one equals value for value."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from terarec.kernels.cpu.delimited import (
    ARROW_TYPES,
    UNQUOTED,
    DelimitedField,
    DelimitedLayout,
    FaultKind,
    FieldFault,
    ParsedLines,
    Quoting,
)

_INTEGER = re.compile(rb"(-?[0-9]+)(?:\.0+)?")
_NUMBER = re.compile(rb"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
_SPACE = b" \t\n\v\f\r"
_FAULTS_KEPT, _FAULT_BYTES_KEPT = 10, 80


class _FaultError(Exception):
    """A field or a line is wrong."""

    def __init__(self, kind: FaultKind, text: bytes) -> None:
        super().__init__(kind)
        self.kind = kind
        self.text = text


def count_rows(text: bytes, quoting: Quoting = UNQUOTED) -> tuple[int, int, int]:
    """Return the numbers of lines, of records that are not empty, and of the bytes of records with a line end."""
    records = _records(text, quoting)
    complete = sum(len(record.whole) for record in records if record.is_complete)
    return sum(record.lines for record in records), sum(bool(record.content) for record in records), complete


def first_record_bytes(text: bytes, quoting: Quoting) -> int:
    """Return the length of the first record of `text` with its line end."""
    return len(_records(text, quoting)[0].whole) if text else 0


def lines_of_rows(text: bytes, quoting: Quoting = UNQUOTED) -> list[int]:
    """Return the positions, from 0, of the lines in which rows begin."""
    records = _records(text, quoting)
    before = [0, *accumulate(record.lines for record in records)]
    return [line for line, record in zip(before, records, strict=False) if record.content]


def parse_delimited(text: bytes, layout: DelimitedLayout) -> ParsedLines:
    """Parse whole lines; see `terarec.kernels.cpu.delimited.parse_delimited`."""
    parse = _Parse(layout)
    num_rows = num_lines = 0
    for record in _records(text, layout.quoting):
        # Ends parsing under every policy: behind a wrong quote it is unknown where the next row begins.
        if record.bad_quotes is not None:
            parse.report("quote", num_lines, *record.bad_quotes)
            break
        if record.content:
            parse.take(num_lines, num_rows, record.content)
            if parse.faults and layout.policy == "raise":
                break
            num_rows += 1
        num_lines += record.lines
    return ParsedLines(
        columns=tuple(_column(spec, [row[at] for row in parse.rows]) for at, spec in enumerate(layout.fields)),
        num_lines=num_lines,
        num_rows=num_rows,
        kept=None if len(parse.kept) == num_rows else np.array(parse.kept, dtype=np.int64),
        fault_counts=dict(parse.counts),
        faults=tuple(parse.faults),
    )


class _Record(NamedTuple):
    """Some lines: with their ends, and without the last one's."""

    whole: bytes
    content: bytes
    is_complete: bool
    lines: int
    bad_quotes: tuple[int, bytes] | None


def _records(text: bytes, quoting: Quoting) -> list[_Record]:
    records = []
    while text:
        stop, bad = _record_end(text, quoting)
        whole = text[: stop + 1]
        content = text[:stop].removesuffix(b"\r")
        records.append(_Record(whole, content, stop < len(text), 1 + text[:stop].count(b"\n"), bad))
        text = text[stop + 1 :]
    return records


def _record_end(text: bytes, quoting: Quoting) -> tuple[int, tuple[int, bytes] | None]:
    """Return the position of the line end of the first record, and the first field whose quotes are wrong."""
    if not quoting.quote:
        return len(text.partition(b"\n")[0]), None
    delimiter, bad, at, field = re.escape(quoting.delimiter), None, 0, 0
    # A tab may be delimiter and white space; as a delimiter it must not be trimmed away.
    space = rb"(?:(?!%b)[ \t\v\f\r])*" % delimiter if quoting.trim else b""
    rest = rb"(?:(?!%b|\r?(?:\n|\Z)).)*" % delimiter
    opening = re.compile(space + rb'"')
    closing = re.compile(rb'(?:[^"]|"")*"(?!")')
    end = re.compile(rb"%b(?:%b|(?=\r?(?:\n|\Z)))" % (space, delimiter), re.DOTALL)
    unquoted = re.compile(rb"(%b)(?:(%b)|\r?(?:\n|\Z))" % (rest, delimiter), re.DOTALL)
    while True:
        quote = opening.match(text, at)
        if quote:
            closed = closing.match(text, quote.end())
            # The quote is never closed, so the record runs to the end of the text.
            if closed is None:
                return len(text), bad or (field, text[quote.end() - 1 :])
            at = closed.end()
            match = end.match(text, at)
            if match is None:
                behind = unquoted.match(text, at)
                assert behind is not None
                bad = bad or (field, text[quote.end() - 1 : behind.end(1)])
        tail = unquoted.match(text, at)
        assert tail is not None
        if tail[2] is None:
            stop = text.find(b"\n", tail.end(1))
            return (stop if stop >= 0 else len(text)), bad
        at, field = tail.end(), field + 1


@dataclass
class _Parse:
    """Rows and faults so far; a value is None where missing, a list where its field is one."""

    layout: DelimitedLayout
    rows: list[list[Any]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    counts: Counter[FaultKind] = field(default_factory=Counter)
    faults: list[FieldFault] = field(default_factory=list)

    def report(self, kind: FaultKind, line_number: int, position: int, text: bytes) -> None:
        self.counts[kind] += 1
        if len(self.faults) < _FAULTS_KEPT or kind == "quote":
            self.faults.append(FieldFault(line_number, kind, position, text[:_FAULT_BYTES_KEPT]))

    def take(self, line_number: int, row: int, line: bytes) -> None:
        result = _faults_and_values(line, self.layout)
        faults, values = result
        # The compiled parser drops the line at its first fault and does not see the others.
        if faults and self.layout.policy != "missing":
            faults = faults[:1]
        for kind, position, text in faults:
            self.report(kind, line_number, position, text)
        if not faults or self.layout.policy == "missing":
            self.rows.append(values)
            self.kept.append(row)


def _faults_and_values(line: bytes, layout: DelimitedLayout) -> tuple[list[tuple[FaultKind, int, bytes]], list[Any]]:
    """Return the faults of a line, the one that drops it first, and its values with a missing one for each fault."""
    expected = len(layout.fields)
    # A missing list is empty, as in the data sets; null is for single values.
    missing: list[Any] = [[] if spec.separator else None for spec in layout.fields]
    if len(line) > layout.max_line_bytes:
        return [("oversized_line", 0, line)], missing
    fields = _split(line, layout)
    faults: list[tuple[FaultKind, int, bytes]] = []
    values = missing
    for at, (spec, content) in enumerate(zip(layout.fields, fields, strict=False)):
        try:
            values[at] = _read_field(content, spec, layout)
        except _FaultError as fault:
            faults.append((fault.kind, at, fault.text))
    if len(fields) == expected:
        return faults, values
    width: tuple[FaultKind, int, bytes] = ("short_line" if len(fields) < expected else "long_line", len(fields), line)
    # A line that is dropped reports its width, which says more than the content of one field.
    return [width, *faults] if layout.policy != "missing" else [*faults, width], values


def _split(line: bytes, layout: DelimitedLayout) -> list[bytes]:
    fields: list[bytes] = []
    rest: bytes | None = line
    while rest is not None:
        content, rest = _next_field(rest, layout)
        fields.append(content)
    return fields


def _next_field(rest: bytes, layout: DelimitedLayout) -> tuple[bytes, bytes | None]:
    """Return the first field of `rest`, and the text after its delimiter, None if it has no delimiter."""
    start = _past_space(rest, layout) if layout.quote else rest
    if layout.quote and start.startswith(b'"'):
        whole = re.match(rb'"((?:[^"]|"")*)"(?!")', start)
        assert whole is not None
        content, behind = whole[1].replace(b'""', b'"'), _past_space(start[whole.end() :], layout)
        return content.strip(_SPACE) if layout.trim_quoted else content, behind[
            len(layout.delimiter) :
        ] if behind else None
    content, separator, behind = rest.partition(layout.delimiter)
    return content.strip(_SPACE) if layout.trim else content, behind if separator else None


def _past_space(text: bytes, layout: DelimitedLayout) -> bytes:
    while layout.trim and text and text[:1] in _SPACE and not text.startswith(layout.delimiter):
        text = text[1:]
    return text


def _read_field(content: bytes, spec: DelimitedField, layout: DelimitedLayout) -> Any:
    missing = not content or content in layout.missing
    if spec.type == "skip" or missing:
        return [] if spec.separator else None
    if not spec.separator:
        return _read_value(content, spec.type, content)
    items = content.split(spec.separator)
    if layout.trim:
        items = [item.strip(_SPACE) for item in items]
    return [None if not item or item in layout.missing else _read_value(item, spec.type, content) for item in items]


def _read_value(content: bytes, value_type: str, shown: bytes) -> Any:
    if value_type == "integer":
        match = _INTEGER.fullmatch(content)
        if not match:
            raise _FaultError("integer", shown)
        if not -(2**63) <= int(match[1]) < 2**63:
            raise _FaultError("integer_range", shown)
        return int(match[1])
    if value_type == "number":
        return _read_number(content, shown)
    if value_type == "hex32":
        if not _HEX.fullmatch(content):
            raise _FaultError("hex", shown)
        return int(content, 16)
    try:
        content.decode()
    except UnicodeDecodeError:
        raise _FaultError("utf8", shown) from None
    return content


def _read_number(content: bytes, shown: bytes) -> float | None:
    word = content.removeprefix(b"-").lower()
    if word == b"nan":
        return None
    if word in (b"inf", b"infinity"):
        raise _FaultError("infinite", shown)
    if not _NUMBER.fullmatch(content):
        raise _FaultError("number", shown)
    # A number beyond float64, such as 1e999, which Python reads as infinity.
    if math.isinf(float(content)):
        raise _FaultError("infinite", shown)
    return float(content)


def _column(spec: DelimitedField, rows: list[Any]) -> pa.Array | None:
    if spec.type == "skip":
        return None
    arrow_type = ARROW_TYPES[spec.type]
    return pa.array(rows, pa.large_list(arrow_type) if spec.separator else arrow_type)
