# SPDX-License-Identifier: Apache-2.0
"""Text files as blocks of complete lines; compression is detected by the content."""

from __future__ import annotations

import gzip
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import FileIO
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from terarec.errors import FormatError, TerarecError
from terarec.etl.source.blocks import MAX_LINE_BYTES, SourceFile
from terarec.io.opening import open_file
from terarec.io.remote import is_remote, locate
from terarec.kernels.cpu.delimited import UNQUOTED, Quoting, count_rows, lines_of_rows
from terarec.spec.codec import parse_json

BLOCK_BYTES = 1 << 22
"""Text read at once, 17,600 lines of Criteo. Time a row to prepare 1.5 M rows, the same with a fitted workflow, and
most memory (two Zen 3 cores, medians of three turns): 1.88 us, 1.44 us and 369 MiB at 2 MiB; 1.62, 1.28, 427 at
4 MiB; 1.61, 1.19, 510 at 8 MiB. Python's 2 ms a block are what larger ones save."""

_LONGEST_RECORD = 1 << 24
"""Longest line of quoted text, all of which is kept: one of its quotes may hide line ends."""

_AHEAD_BYTES = 1 << 25
"""Bytes ahead of the position that the disk is to fetch. Medians of four turns of 60 MiB out of no cache of this
machine, whose virtual disk others used, too: 430 MB/s so (advised of 64 MiB), 350 with the system advised of sequential
reading, 290 without; single turns overlap."""

_LOOK_AHEAD_BYTES = 1 << 12
"""Bytes behind a block that are searched for the end of its last line, so that the block is read whole."""

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    **{b"BZh%d1AY&SY" % level: "bz2" for level in range(1, 10)},
}
"""First bytes of compressed files."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_MAGIC = max(map(len, _MAGIC))
_UNPACKED = 4
"""Bytes of text in a byte of a compressed log, about."""


CARRIAGE_RETURNS = (
    r"its lines end in carriage returns alone, as on an old Mac, expected line ends \n or \r\n "
    r"(tr '\r' '\n' < FILE > NEW)"
)
"""Problem of a file that has no other line ends."""


class TextBlock(NamedTuple):
    """Whole records, the further bytes of the stored file that were read, and where in its text they end."""

    text: bytes
    read_bytes: int
    end: int


def read_text(
    file: SourceFile, block_bytes: int = BLOCK_BYTES, begin: int = 0, quoting: Quoting = UNQUOTED
) -> Iterator[TextBlock]:
    """Yield the records of `file`, from byte `begin` of its text on, where a record must begin.

    Raises:
        FormatError: A damaged file, one whose lines end in CR alone, or a quote that does not close for very long.
    """
    with open_text(file) as (stored, stream):
        _pass_over(stored, stream, begin)
        position = stored.tell()
        for text, end in _cut(file.path, stream, block_bytes, begin, quoting):
            if end == len(text) and b"\n" not in text and b"\r" in text[:-1]:
                raise FormatError(file.path, CARRIAGE_RETURNS)
            advise_ahead(stored, block_bytes)
            before, position = position, stored.tell()
            yield TextBlock(text, position - before, end)


_KINDS = {
    b"PAR1": ("a Parquet file", "parquet"),
    b"ARROW1": ("an Arrow file", "arrow"),
    b"\xff\xff\xff\xff": ("an Arrow file", "arrow"),  # a stream
}
"""First bytes of files that are no text -> what they are, and the format of their source."""
_NO_TEXT = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\x1b")
"""Bytes that no text has in an encoding of single bytes or in UTF-8."""


def check_text(path: str, head: bytes) -> None:
    """Raise `FormatError` if a file that begins with `head` is no text."""
    kind = _kind(head)
    if kind is not None:
        raise _other_kind(path, *kind, "text")


def check_kind(path: str, head: bytes, source_format: str) -> None:
    """Raise `FormatError` if a file that begins with `head` is of a known kind that is not `source_format`."""
    kind = _kind(head)
    if kind is None and head and not _NO_TEXT.intersection(head):
        kind = ("JSON lines", "json_lines") if head.lstrip()[:1] == b"{" else ("text", "delimited")
    if kind is not None and kind[1] != source_format:
        raise _other_kind(path, *kind, next(name for name, form in _KINDS.values() if form == source_format))


def check_delimited(path: str, line: bytes) -> None:
    """Raise `FormatError` if the first line of delimited text of several columns is an object of JSON."""
    if line.lstrip()[:1] != b"{":
        return
    try:
        is_object = isinstance(parse_json(line.decode()), dict)
    except ValueError:
        return
    if is_object:
        raise _other_kind(path, "JSON lines", "json_lines", "delimited text")


def _kind(head: bytes) -> tuple[str, str] | None:
    return next((kind for first, kind in _KINDS.items() if head.startswith(first)), None)


def _other_kind(path: str, kind: str, source_format: str, expected: str) -> FormatError:
    problem = f"is {kind}, expected {expected}; the format {source_format!r} of a workflow's source reads it"
    # Sources of text read Parquet as well, with the types of their columns.
    keeping = f"write the rows as {expected}"
    if expected in ("text", "delimited text"):
        keeping = "name it *.parquet" if source_format == "parquet" else "write the rows as Parquet, to *.parquet"
    return FormatError(
        path,
        f"{problem} (terarec workflow draft writes such a workflow, which has ids of its own: to keep the ids of a "
        f"fitted one, {keeping})",
    )


def check_rows(file: SourceFile, rows: int) -> None:
    """Raise `FormatError` for a file without rows."""
    if not rows:
        raise FormatError(file.path, "the file is empty, expected at least one row")


def text_bytes(file: SourceFile) -> int:
    """Return about the bytes of the text in `file`."""
    with open_text(file) as (stored, stream):
        return file.bytes if stored is stream else _UNPACKED * file.bytes


def first_rows(text: bytes, rows: int, quoting: Quoting = UNQUOTED) -> bytes:
    """Return the lines of the first `rows` rows of `text`, which holds more: at least 1."""
    line = int(lines_of_rows(text, quoting)[rows])
    ends = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n"))
    return text[: int(ends[line - 1]) + 1]


@contextmanager
def open_text(file: SourceFile) -> Iterator[tuple[Any, Any]]:
    """Yield the stored file, and its text; both are the same stream unless the file is compressed."""
    compression: str | None = None
    try:
        with ExitStack() as opened:
            stored = opened.enter_context(_stored(file.path))
            compression = _compression(stored)
            stream = stored
            if compression == "gzip":
                stream = opened.enter_context(gzip.GzipFile(fileobj=stored))
            elif compression == "xz":
                stream = opened.enter_context(lzma.LZMAFile(stored))
            elif compression == "zip":
                archive = opened.enter_context(zipfile.ZipFile(stored))
                stream = opened.enter_context(archive.open(_only_member(file.path, archive)))
            # Arrow reads zstd and lz4, which the library of Python 3.11 lacks, and bz2.
            elif compression is not None:
                stream = opened.enter_context(pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), compression))
            yield stored, stream
    except TerarecError:  # of a missing file, which is an OSError as well
        raise
    # A zip file of a method that Python lacks raises NotImplementedError.
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, OSError) as error:
        if compression is None:
            raise FormatError(file.path, f"cannot be read ({error})") from error
        raise FormatError(file.path, f"not a whole {compression} file ({error})") from error


def _only_member(path: str, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the file in a zip archive."""
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise FormatError(path, f"the zip archive holds {len(members)} files, expected one")
    if members[0].flag_bits & 1:
        raise FormatError(path, "the zip archive is encrypted, expected one without a password")
    return members[0]


def _compression(stored: Any) -> str | None:
    first = stored.read(_LONGEST_MAGIC)
    stored.seek(0)
    return next((name for magic, name in _MAGIC.items() if first.startswith(magic)), None)


def _stored(path: str) -> Any:
    # Unbuffered: a block is larger than any buffer, and reading ahead needs the file itself.
    return locate(path).input() if is_remote(path) else open_file(path, is_buffered=False)


def advise_ahead(stored: Any, num_bytes: int) -> None:
    """Have the disk fetch `num_bytes` some way ahead of where `stored` is read."""
    if isinstance(stored, FileIO) and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(stored.fileno(), stored.tell() + _AHEAD_BYTES, num_bytes, os.POSIX_FADV_WILLNEED)


def _bytes_to_line_end(stream: Any, num_bytes: int) -> int:
    """Return the bytes from the next `num_bytes` to the end of their last line; 0 where none is near."""
    if not (isinstance(stream, FileIO) and hasattr(os, "pread")):
        return 0
    seen = os.pread(stream.fileno(), _LOOK_AHEAD_BYTES, stream.tell() + num_bytes - 1)
    return max(seen.find(b"\n"), 0)


def _pass_over(stored: Any, stream: Any, num_bytes: int) -> None:
    if stored is stream:
        stream.seek(num_bytes)
        return
    # Compressed text has no seek that does not unpack all before it.
    while num_bytes and (chunk := stream.read(min(num_bytes, BLOCK_BYTES))):
        num_bytes -= len(chunk)


def _cut(path: str, stream: Any, block_bytes: int, begin: int, quoting: Quoting) -> Iterator[tuple[bytes, int]]:
    """Yield complete records, and where they end; `stream` is at byte `begin`."""
    rest = b""
    position = begin
    while chunk := stream.read(block_bytes + _bytes_to_line_end(stream, block_bytes)):
        position += len(chunk)
        if position == len(chunk):
            check_text(path, chunk)
            chunk = chunk.removeprefix(BYTE_ORDER_MARK)
        # Text without a quote is cut at its last line end, and no quotes are followed.
        if quoting.quote and (b'"' in chunk or b'"' in rest):
            text = rest + chunk
            end = count_rows(text, quoting).complete_bytes
            if end:
                yield text[:end], position - (len(text) - end)
            rest = text[end:]
            _check_length(path, rest, position)
            continue
        end = chunk.rfind(b"\n") + 1
        if end == len(chunk) and not rest:
            yield chunk, position
        elif end:
            begun, rest = rest, chunk[end:]
            yield b"".join((begun, memoryview(chunk)[:end])), position - len(rest)  # one copy, not two
        # Of a line that is too long so much is kept that the parser sees it.
        elif quoting.quote or len(rest) <= MAX_LINE_BYTES:
            rest += chunk
            if quoting.quote:
                _check_length(path, rest, position)
    if rest:
        yield rest, position


def _check_length(path: str, rest: bytes, position: int) -> None:
    """Raise if a record that has no end yet is too long to go on."""
    if len(rest) > _LONGEST_RECORD:
        raise FormatError(
            f"{path}: byte {position - len(rest)}",
            f"got a line of more than {_LONGEST_RECORD} bytes, expected a line end, or a quote that closes",
        )


_PIECE_BYTES = 1 << 19
"""Text read at once, into memory that is used again. A line of Criteo takes one thread 57 ns so, and took 217 in new
memory for each block of 2 MiB, put together of two, most of it page faults (Zen 3)."""

_PART_BYTES = 1 << 24
"""A file is cut for several threads where each has at least so much to count, some milliseconds."""


def count_text_rows(file: SourceFile, threads: int, quoting: Quoting = UNQUOTED) -> int:
    """Count the records of `file` that are not empty, a header included; `threads` share a plain file on a disk.

    Once a quote turns up that may hide line ends, one thread counts from the file's start.
    """
    begins = _line_begins(file, min(threads, 1 + file.bytes // _PART_BYTES))
    with ThreadPoolExecutor(len(begins), thread_name_prefix="etl") as pool:
        ends = [*begins[1:], math.inf]
        # Threads gain, since counting releases the GIL.
        counts = list(pool.map(count_lines, repeat(file), begins, ends, repeat(quoting.quote)))
    known = [count.rows for count in counts if count is not None]
    if len(known) == len(counts):
        return sum(known)
    return sum(count_rows(block.text, quoting).rows for block in read_text(file, quoting=quoting))


def _line_begins(file: SourceFile, parts: int) -> list[int]:
    """Return the beginnings of lines at which the file is cut into a number of parts of similar size."""
    begins = {0}
    with open_text(file) as (_, stream):
        for part in range(1, parts if isinstance(stream, FileIO) else 1):
            begin = stream.seek(file.bytes * part // parts)
            line_end = stream.read(_PIECE_BYTES).find(b"\n")
            if line_end >= 0:
                begins.add(begin + line_end + 1)
    return sorted(begins)


class LineCount(NamedTuple):
    """Lines of a text, a last one without its end included, and those of them that are not empty."""

    lines: int
    rows: int


def count_lines(file: SourceFile, begin: int, end: float, is_quoted: bool) -> LineCount | None:
    """Count the lines from byte `begin` of the text, where one begins, to byte `end`.

    Return None where quotes may hide line ends, which only `is_quoted` text has.
    """
    lines = rows = kept = 0
    memory = bytearray(_PIECE_BYTES)
    view = memoryview(memory)
    with open_text(file) as (stored, stream):
        if begin:
            stream.seek(begin)
        position = begin
        while got := stream.readinto(view[kept : int(min(len(memory), kept + end - position))]):
            advise_ahead(stored, len(memory))
            first = len(BYTE_ORDER_MARK) if position == 0 and memory.startswith(BYTE_ORDER_MARK) else 0
            position += got
            if is_quoted and memory.find(b'"', kept, kept + got) >= 0:
                return None
            stop = memory.rfind(b"\n", first, kept + got) + 1 or first
            count = count_rows(view[first:stop])
            lines, rows = lines + count.lines, rows + count.rows
            kept += got - stop
            memory[:kept] = memory[stop : stop + kept]
            if kept == len(memory):  # a long line: it is enough to know that it holds something
                memory[:1], kept = b".", 1
    count = count_rows(view[:kept])
    return LineCount(lines + count.lines, rows + count.rows)
