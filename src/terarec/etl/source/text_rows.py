"""Counts the rows of text files."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from itertools import repeat

from terarec.etl.source.files import SourceFile
from terarec.etl.source.text import BYTE_ORDER_MARK, ask_ahead, open_text, read_text
from terarec.kernels.cpu.delimited import count_rows
from terarec.kernels.delimited_types import UNQUOTED, Quoting

_PIECE_BYTES = 1 << 19
"""Text read at once, into memory that is used again. A line of Criteo takes one thread 57 ns so, and took 217 in new
memory for each block of 2 MiB, put together of two, most of it page faults (Zen 3)."""

_PART_BYTES = 1 << 24
"""A file is cut for several threads where each has at least so much to count, some milliseconds."""


def count_text_rows(file: SourceFile, threads: int, quoting: Quoting = UNQUOTED) -> int:
    """Records of `file` that are not empty, a header included; `threads` share a plain file on a disk.

    Once a quote turns up that may hide line ends, one thread counts from the file's start.

    Raises:
        FormatError: a damaged file.
    """
    begins = _line_begins(file, min(threads, 1 + file.bytes // _PART_BYTES))
    with ThreadPoolExecutor(len(begins), thread_name_prefix="etl") as pool:
        ends = [*begins[1:], math.inf]
        counts = list(pool.map(_rows_between, repeat(file), begins, ends, repeat(quoting.quote)))
    known = [count for count in counts if count is not None]
    if len(known) == len(counts):
        return sum(known)
    return sum(count_rows(block.text, quoting).rows for block in read_text(file, quoting=quoting))


def _line_begins(file: SourceFile, parts: int) -> list[int]:
    """Where lines begin that cut the file into at most so many parts of about the same size."""
    begins = {0}
    with open_text(file) as (_, stream):
        for part in range(1, parts if isinstance(stream, FileIO) else 1):
            begin = stream.seek(file.bytes * part // parts)
            line_end = stream.read(_PIECE_BYTES).find(b"\n")
            if line_end >= 0:
                begins.add(begin + line_end + 1)
    return sorted(begins)


def _rows_between(file: SourceFile, begin: int, end: float, unquoted: bool) -> int | None:
    """Lines that are not empty from byte `begin` of the text, where one begins, to byte `end`.

    None if the text is to be `unquoted` and has a quote.
    """
    rows = kept = 0
    memory = bytearray(_PIECE_BYTES)
    view = memoryview(memory)
    with open_text(file) as (stored, stream):
        if begin:
            stream.seek(begin)
        position = begin
        while got := stream.readinto(view[kept : int(min(len(memory), kept + end - position))]):
            ask_ahead(stored, len(memory))
            first = len(BYTE_ORDER_MARK) if position == 0 and memory.startswith(BYTE_ORDER_MARK) else 0
            position += got
            if unquoted and memory.find(b'"', kept, kept + got) >= 0:
                return None
            stop = memory.rfind(b"\n", first, kept + got) + 1 or first
            rows += count_rows(view[first:stop]).rows
            kept += got - stop
            memory[:kept] = memory[stop : stop + kept]
            if kept == len(memory):  # a long line: it is enough to know that it holds something
                memory[:1], kept = b".", 1
    return rows + count_rows(view[:kept]).rows
