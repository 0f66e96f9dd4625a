# SPDX-License-Identifier: Apache-2.0
"""Files split into pieces: Spark counts the rows of all files first, then a task reads each piece by the local reader.

A piece is a range of bytes of plain text, some row groups of a Parquet file, or a file that cannot be split: compressed
text and Arrow files. Row ids and line numbers equal those of the local engine for any pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from terarec.etl.source.arrow_files import ParquetReader
from terarec.etl.source.blocks import FormatReader, RawBlock, RawPart, SourceFile
from terarec.etl.source.text import LineCount, check_rows, count_lines, open_text
from terarec.formats.parquet import arrow_errors
from terarec.io.remote import locate
from terarec.kernels.cpu.delimited import Quoting, count_rows
from terarec.spec import SourceSpec

_BATCH_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """Consecutive rows of a file that one task reads.

    Attributes:
        file: Position of the file among the sources.
        begin: Byte of the text, or row group, at which it begins.
        end: Byte or row group behind it; None for a file that is not cut.
        before: Lines of the file before it, or rows in files without lines.
        first_row: Row id of its first row.
        num_rows: Rows, bad ones included.
        names: Fields of the lines of delimited text.
    """

    file: int
    begin: int
    end: int | None
    before: int
    first_row: int
    num_rows: int
    names: tuple[str, ...] = ()


class Range(NamedTuple):
    """Bytes of a text file to count; `end` None for the complete file, which its reader cuts."""

    file: int
    begin: int
    end: int | None


class Cut(NamedTuple):
    """A counted part of a file: bytes of its text, lines and rows in it."""

    begin: int
    end: int | None
    lines: int
    rows: int


class Counted(NamedTuple):
    """Result of counting a range.

    Attributes:
        cuts: Its parts; none where another range of the file holds them.
        names: Fields, of the range at the start of a delimited file.
        is_cut: False where the file must be read from its start, as line ends may lie between quotes.
    """

    cuts: tuple[Cut, ...] = ()
    names: tuple[str, ...] = ()
    is_cut: bool = True


Count = Callable[[Sequence[Range]], Sequence[Counted]]
"""Counts ranges, each in a task of its own."""


def cut_text(files: Sequence[SourceFile], spec: SourceSpec, piece_bytes: int, count: Count) -> list[FilePart]:
    """Return the pieces of text or Arrow files.

    Raises:
        ConfigError: A file lacks a column.
        FormatError: A damaged file, or one without rows.
    """
    # `_text_parts` cuts text that was decoded by bytes of the file, which are the same for UTF-8 alone.
    cuttable = spec.format in ("delimited", "json_lines") and spec.encoding == "utf-8"
    ranges = [
        Range(number, begin, min(begin + piece_bytes, file.bytes) if cuttable else None)
        for number, file in enumerate(files)
        for begin in range(0, file.bytes, piece_bytes if cuttable else file.bytes)
    ]
    counted = list(zip(ranges, count(ranges), strict=True))
    # Only the start of a file tells whether a line end lies between quotes.
    uncut = sorted({span.file for span, result in counted if not result.is_cut})
    if uncut:
        again = [Range(number, 0, None) for number in uncut]
        counted = [item for item in counted if item[0].file not in uncut]
        counted = sorted([*counted, *zip(again, count(again), strict=True)], key=lambda item: item[0][:2])
    pieces: list[FilePart] = []
    row = 0
    for number, results in groupby(counted, key=lambda item: item[0].file):
        results_of_file = [result for _, result in results]
        begun, before = row, 0
        for begin, end, lines, rows in (cut for result in results_of_file for cut in result.cuts):
            names = results_of_file[0].names
            piece = FilePart(
                file=number, begin=begin, end=end, before=before, first_row=row, num_rows=rows, names=names
            )
            pieces.append(piece)
            before, row = before + lines, row + rows
        check_rows(files[number], row - begun)
    return pieces


def count_range(reader: FormatReader, spec: SourceSpec, file: SourceFile, span: Range, piece_bytes: int) -> Counted:
    """Count the lines that begin in a range, or all rows of a file.

    Raises:
        ConfigError: The file lacks a column.
        FormatError: A damaged file.
    """
    if not reader.is_text:
        return Counted((Cut(0, None, 0, reader.count_rows(file, 1)),))
    with open_text(file) as (stored, stream):
        is_plain = stored is stream
        cut = None
        if is_plain and span.end is not None:
            # From the byte before: a line that begins right at the cut belongs to this range, not to the previous one.
            first = _line_end(stream, span.begin - 1) if span.begin else 0
            last = _line_end(stream, span.end - 1) if span.end < file.bytes else file.bytes
            counted = count_lines(file, first, last, spec.quote) if last > first else LineCount(0, 0)
            if counted is None:
                # Some quote may hide line ends: only reading from the start of the file tells which.
                return Counted(is_cut=False)
            cut = Cut(first, max(first, last), *counted)
    # Compressed text cannot be cut: the range that begins it counts all of it.
    if not is_plain and span.begin:
        return Counted()
    names = _names(reader, spec, file) if span.begin == 0 else ()
    if cut is not None:
        has_header = spec.header and span.begin == 0 and cut.rows > 0
        return Counted((cut._replace(rows=cut.rows - has_header),), names)
    cuts, begin, before, rows = [], 0, 0, 0
    for part in reader.parts(file):
        rows += part.num_rows
        if is_plain and spec.encoding == "utf-8" and part.text_end - begin >= piece_bytes:
            lines = part.before + count_rows(_text(part)).lines
            cuts.append(Cut(begin, part.text_end, lines - before, rows))
            begin, before, rows = part.text_end, lines, 0
    if rows or not cuts:
        cuts.append(Cut(begin, file.bytes if cuts else None, 0, rows))
    return Counted(tuple(cuts), names)


def cut_parquet(files: Sequence[SourceFile], reader: ParquetReader, piece_bytes: int) -> list[FilePart]:
    """Return pieces of some row groups each.

    Raises:
        ConfigError: A file lacks a column.
        FormatError: A damaged file, one without rows, or a column of another type.
    """
    # On the driver, since row groups are cut by the footers that it reads anyway.
    reader.check_schemas(file.path for file in files)
    pieces: list[FilePart] = []
    row = 0
    for number, file in enumerate(files):
        with arrow_errors(file.path), locate(file.path).input() as source, pq.ParquetFile(source) as opened:
            groups = [opened.metadata.row_group(group) for group in range(opened.num_row_groups)]
        check_rows(file, sum(group.num_rows for group in groups))
        begin = before = rows = num_bytes = 0
        for end, group in enumerate(groups, 1):
            rows, num_bytes = rows + group.num_rows, num_bytes + group.total_byte_size
            if num_bytes >= piece_bytes or end == len(groups):
                pieces.append(FilePart(file=number, begin=begin, end=end, before=before, first_row=row, num_rows=rows))
                begin, before, row, rows, num_bytes = end, before + rows, row + rows, 0, 0
    return pieces


def read_piece(
    reader: FormatReader, spec: SourceSpec, files: Sequence[SourceFile], piece: FilePart
) -> Iterator[RawBlock]:
    """Yield the blocks of a piece, not parsed."""
    file = files[piece.file]
    if piece.end is None:
        parts = reader.parts(file)
    elif reader.is_text:
        parts = _text_parts(reader, spec, file, piece)
    else:
        parts = _row_groups(spec, file, piece)
    row = piece.first_row
    for part in parts:
        yield RawBlock(piece.file, row, part)
        row += part.num_rows


def _names(reader: FormatReader, spec: SourceSpec, file: SourceFile) -> tuple[str, ...]:
    """Return the fields of the lines of a file; raise where its header does not fit."""
    if spec.format != "delimited":
        return ()
    if not spec.header:
        return tuple(column.name for column in spec.columns)
    first = next(iter(reader.parts(file)))
    names: tuple[str, ...] = first.content[1]
    return names


def _line_end(stream: Any, position: int) -> int:
    """Return the byte behind the first line end at or behind byte `position`."""
    stream.seek(position)
    while chunk := stream.read(1 << 16):
        end: int = chunk.find(b"\n")
        if end >= 0:
            return position + end + 1
        position += len(chunk)
    return position


def _text_parts(reader: FormatReader, spec: SourceSpec, file: SourceFile, piece: FilePart) -> Iterator[RawPart]:
    """Yield the parts of a range of a plain text file."""
    assert piece.end is not None
    is_delimited = spec.format == "delimited"
    before = RawPart(file.path, piece.before, 0, 0, (b"", piece.names) if is_delimited else b"", piece.begin)
    # Behind another part the reader takes the names of the fields from it, and looks for no header.
    for part in reader.parts(file, before if piece.begin else None):
        beyond = part.text_end - piece.end
        if beyond > 0:
            # Blocks are cut by their size, so that the last one may pass the end of the piece.
            text = _text(part)[:-beyond]
            rows = count_rows(text, Quoting(spec.delimiter.encode(), spec.quote, spec.trim)).rows
            content = (text, part.content[1]) if is_delimited else text
            part = dataclasses.replace(part, num_rows=rows, content=content, text_end=piece.end)
        if part.num_rows:
            yield part
        if beyond >= 0:
            return


def _row_groups(spec: SourceSpec, file: SourceFile, piece: FilePart) -> Iterator[RawPart]:
    """Yield the batches of some row groups of a Parquet file."""
    assert piece.end is not None
    before = piece.before
    columns = [column.name for column in spec.columns]
    with arrow_errors(file.path), locate(file.path).input() as source, pq.ParquetFile(source) as opened:
        for group in range(piece.begin, piece.end):
            for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                yield RawPart(file.path, before, batch.num_rows, batch.nbytes, batch)
                before += batch.num_rows


def _text(part: RawPart) -> bytes:
    text: bytes = part.content[0] if isinstance(part.content, tuple) else part.content
    return text
