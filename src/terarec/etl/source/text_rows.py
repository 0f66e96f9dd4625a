"""Counts the rows of text files."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from itertools import repeat

from terarec.etl.source.files import SourceFile
from terarec.etl.source.text import BYTE_ORDER_MARK, ask_ahead, open_text
from terarec.kernels.cpu.delimited import count_rows

_PIECE_BYTES = 1 << 19
"""Text read at once, into memory that is used again. A line of Criteo takes one thread 57 ns so, and took 217 in new
memory for each block of 2 MiB, put together of two, most of it page faults (Zen 3)."""

_PART_BYTES = 1 << 24
"""A file is cut for several threads where each has at least so much to count, some milliseconds."""


def count_text_rows(file: SourceFile, threads: int) -> int:
    """Lines of `file` that are not empty, a header included; `threads` share a plain file on a disk.

    Raises:
        FormatError: a damaged file.
    """
    begins = _line_begins(file, min(threads, 1 + file.bytes // _PART_BYTES))
    with ThreadPoolExecutor(len(begins), thread_name_prefix="etl") as pool:
        return sum(pool.map(_rows_between, repeat(file), begins, [*begins[1:], math.inf]))


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


def _rows_between(file: SourceFile, begin: int, end: float) -> int:
    """Lines that are not empty from byte `begin` of the text, where one begins, to byte `end`."""
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
            stop = memory.rfind(b"\n", first, kept + got) + 1 or first
            rows += count_rows(view[first:stop])[1]
            kept += got - stop
            memory[:kept] = memory[stop : stop + kept]
            if kept == len(memory):  # a long line: it is enough to know that it holds something
                memory[:1], kept = b".", 1
    return rows + count_rows(view[:kept])[1]
