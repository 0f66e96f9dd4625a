# SPDX-License-Identifier: Apache-2.0
"""Files, directories, globs and URLs -> the files to read, in order, and their rows, block by block."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from terarec.closer import Stream
from terarec.errors import ConfigError, FormatError
from terarec.etl.columns import RowFaultError, Rows, without_lowest
from terarec.etl.source.arrow_files import IpcReader, ParquetReader
from terarec.etl.source.blocks import (
    FATAL,
    BadInputLog,
    BadInputReport,
    FormatReader,
    InputFault,
    ParsedPart,
    RawBlock,
    SourceFile,
)
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.source.files import find_files
from terarec.etl.source.hive import with_directories
from terarec.etl.source.json_lines import JsonLinesReader
from terarec.etl.source.tables import TableReader, describe_table
from terarec.formats.frames import Frame, as_table, is_frame
from terarec.io.opening import read_bytes
from terarec.io.remote import is_remote
from terarec.parallel import available_threads, ordered_map
from terarec.spec import SourceSpec, checks
from terarec.spec.checks import quoted
from terarec.spec.codec import parse_json
from terarec.spec.dataset import GENERATED_FILE
from terarec.spec.preparation import BAD_INPUT_POLICIES, BadInputPolicy

SAMPLE_ROWS = 100_000
"""Most rows of unknown logs, or of a preview, that are read."""

_UNREAD_ROWS = {"raise": (), "skip": ("json", "short_line", "long_line"), "missing": ("json",)}
"""Policy -> kinds of faults that leave nothing of a row; under "missing" a short line has its first fields."""
_SURELY_OTHER = 20
"""Rows at the begin of a file that are not all cut off or damaged by chance."""

_READERS = {
    "delimited": DelimitedReader,
    "json_lines": JsonLinesReader,
    "parquet": ParquetReader,
    "arrow": IpcReader,
}


class Source:
    """The rows of files, which may be read several times.

    Args:
        files: Files in the order of their rows.
        spec: Spec of the files.
        reader: Reader of their format.
        policy: Policy for bad input.
        threads: Threads that parse in `blocks`.
        limit: Maximum number of rows, the first ones of all files; None for all.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        spec: SourceSpec,
        reader: FormatReader,
        policy: BadInputPolicy,
        threads: int,
        limit: int | None = None,
    ) -> None:
        self.files = tuple(files)
        self.spec = spec
        self.limit = limit
        self._reader = reader
        self._integers = [column.name for column in spec.columns if column.type == "integer"]
        self._policy = policy
        self._threads = threads
        self._log = BadInputLog()

    @property
    def is_text(self) -> bool:
        """Whether the rows cannot be counted but by reading them."""
        return self._reader.is_text

    def raw_blocks(self, after: RawBlock | None = None) -> Iterator[RawBlock]:
        """Yield all rows in order, or those behind a block that was yielded before; read but not parsed.

        Raises:
            ConfigError: A file lacks a column.
            FormatError: A damaged file, one without rows, or one with columns of other types.
        """
        first_row, begun = 0, 0
        if after is not None:
            first_row, begun = after.first_row + after.num_rows, after.file
        limit = math.inf if self.limit is None else self.limit
        for position, file in enumerate(self.files[begun:], begun):
            if first_row >= limit:
                return
            last = after.part if after is not None and position == begun else None
            for part in self._reader.parts(file, last):
                if first_row + part.num_rows > limit:
                    yield RawBlock(position, first_row, self._reader.head(part, int(limit) - first_row))
                    return
                yield RawBlock(position, first_row, part)
                first_row += part.num_rows
                if first_row >= limit:
                    return

    def read_block(self, raw: RawBlock) -> Rows:
        """Return the rows of `raw` that are kept; any thread may call it.

        Raises:
            FormatError: Bad input, with the policy "raise", or of a kind that no policy passes over: file, line or row,
                column, and what is accepted.
        """
        parsed = self._reader.parse(raw.part, self._policy)
        if parsed.faults and self._policy == "raise":
            raise parsed.faults[0].error()
        if FATAL in parsed.counts:
            raise next(fault for fault in parsed.faults if fault.kind == FATAL).error()
        self._check_format(raw, parsed)
        self._log.add(raw.first_row, parsed.counts, parsed.faults)
        rows = parsed.rows(raw)
        integers = {name: without_lowest(rows.columns[name]) for name in self._integers}
        # Unchanged columns keep what is known of their nulls.
        return rows.with_columns({name: array for name, array in integers.items() if array is not rows.columns[name]})

    def _check_format(self, raw: RawBlock, parsed: ParsedPart) -> None:
        """Raise `FormatError` for a file that begins with many rows of which none has the format."""
        unread = sum(parsed.counts.get(kind, 0) for kind in _UNREAD_ROWS[self._policy])
        # A log of another format is no bad input: left out row by row, it would be lost without an error.
        if raw.part.before <= 1 and unread == raw.num_rows >= _SURELY_OTHER:
            first = parsed.faults[0]
            raise FormatError(
                raw.part.path,
                f"none of its first {unread:,} rows can be read ({first.place} {first.number}: {first.got}, "
                f"expected {first.expected}); expected a file of the source's format: no policy leaves out all of one",
            )

    def invalid_rows(self, raw: RawBlock, rows: NDArray[np.int64], fault: RowFaultError) -> Sequence[InputFault]:
        """Return the first invalid values of rows that `read_block` returned, with their places.

        Args:
            raw: Block.
            rows: Ids, int64[k].
            fault: Invalid value of each.
        """
        first = rows[: len(fault.got)] - raw.first_row
        numbers = self._reader.numbers(raw.part, first)
        faults = [
            InputFault(
                path=raw.part.path,
                place=self._reader.place,
                number=number,
                kind=fault.kind,
                column=fault.column,
                got=got,
                expected=fault.expected,
            )
            for number, got in zip(numbers, fault.got, strict=True)
        ]
        if self._policy == "raise":
            raise faults[0].error() from None
        return faults

    def place_of(self, row: int) -> str:
        """Return the file and the line of a row, by its position among all rows; the files are read up to it."""
        for raw in self.raw_blocks():
            if row < raw.first_row + raw.num_rows:
                (number,) = self._reader.numbers(raw.part, np.array([row - raw.first_row]))
                return f"{raw.part.path}: {self._reader.place} {number}"
        raise IndexError(f"row {row} is behind the last one")

    def log_invalid_rows(self, raw: RawBlock, counts: Mapping[str, int], faults: Sequence[InputFault]) -> None:
        """Count rows of `raw` that were left out because of `faults`, the first ones, as bad input."""
        self._log.add(raw.first_row, counts, faults, is_read=True)

    def blocks(self) -> Stream[Rows]:
        """Yield all rows in order. Each call gives the same blocks, for any number of threads.

        Raises:
            ConfigError, FormatError: As `raw_blocks` and `read_block`.
        """
        return ordered_map(self.read_block, self.raw_blocks(), self._threads, blocks_ahead(self._threads))

    def count_rows(self) -> list[int]:
        """Count the rows of each file, bad ones included; files behind the limit have none."""
        if self.limit is not None:
            return self._limited[0]
        return [self._reader.count_rows(file, self._threads) for file in self.files]

    def fingerprint(self) -> str:
        """Return a text that changes when a file does, or their order."""
        listed = [[file.path, file.bytes, file.version] for file in self.files]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of the files as they are stored; with a limit about that of its rows."""
        return sum(file.bytes for file in self.files) if self.limit is None else self._limited[1]

    @property
    def text_bytes(self) -> int:
        """About the bytes of all values as text."""
        total = sum(map(self._reader.text_bytes, self.files))
        if self.limit is None:
            return total
        return total * self._limited[1] // sum(file.bytes for file in self.files) + 1

    @cached_property
    def _limited(self) -> tuple[list[int], int]:
        """Rows of each file up to the limit, and the bytes that are read for them."""
        # Only reading tells which bytes hold the first rows.
        counts, num_bytes = [0] * len(self.files), 0
        for raw in self.raw_blocks():
            counts[raw.file] += raw.num_rows
            num_bytes += raw.read_bytes
        return counts, min(num_bytes, sum(file.bytes for file in self.files))  # Arrow counts unpacked bytes

    def bad_input_before(self, row: int) -> BadInputReport:
        """Return the bad input in the blocks before the one that begins with `row`."""
        return self._log.report(row)

    @property
    def bad_input(self) -> BadInputReport:
        """The bad input in the rows read so far; rows that are read again count once."""
        return self._log.report()


def blocks_ahead(threads: int) -> int:
    """Return the most blocks under way, so that threads need not wait while the consumer writes a row group.

    Two a thread, and ten: a row group of Criteo takes seven blocks.
    """
    return 2 * threads + 10


Sources: TypeAlias = str | Path | Sequence[str | Path] | Frame
"""Files, directories, patterns or URLs, in order; or a table in memory (`terarec.formats.frames`)."""


def check_sources(sources: Sources) -> Sequence[str | Path] | pa.Table:
    """Return paths as a list, and a table in memory as an Arrow table, which may be read several times."""
    if isinstance(sources, str | Path):
        return [sources]
    if is_frame(sources, "sources"):
        return as_table(sources, "sources")
    if not isinstance(sources, Sequence) or not all(isinstance(source, str | Path) for source in sources):
        got = f"a list of {type(sources[0]).__name__}" if isinstance(sources, list | tuple) else type(sources).__name__
        raise ConfigError(
            "sources", f"got {got}, expected paths, or one table of pandas, Polars or Arrow (`collect` a LazyFrame)"
        )
    return sources


def open_source(
    spec: SourceSpec,
    sources: Sources,
    policy: BadInputPolicy = "raise",
    threads: int | None = None,
    limit: int | None = None,
) -> Source:
    """Return the rows of files, directories, globs and URLs.

    Text files may be compressed, by gzip, bz2, xz, zstd, lz4 or zip; their content says which.

    Args:
        spec: Spec of the files; where it is one of text, files whose names all end in ``.parquet`` are read as Parquet.
        sources: Paths in the order of their rows; a directory means the files in it and below, in the order of
            `name_order`, without those that begin with ``.`` or ``_``. Or a table in memory, which has the columns by
            name, whatever the format.
        policy: Policy for bad input: "raise" ends with it, "skip" leaves its row out, "missing" makes its field
            missing.
        threads: Threads that parse; None takes as many as there are cores. One more reads.
        limit: Maximum number of rows, the first ones of all files; None for all.

    Raises:
        ConfigError: No path, an unknown policy, or a URL of an unknown kind.
        DataNotFoundError: A path or a glob without a file.
        FormatError: An empty file, or a directory without one.
    """
    if policy not in BAD_INPUT_POLICIES:
        raise ConfigError("policy", f"got {policy!r}, expected one of {', '.join(map(repr, BAD_INPUT_POLICIES))}")
    checked = check_sources(sources)
    if isinstance(checked, pa.Table):
        reader = TableReader(spec, checked)
        return Source([describe_table(checked)], spec, reader, policy, threads or available_threads(), limit)
    return open_files(spec, find_files(checked), policy, threads, limit)


def open_files(
    spec: SourceSpec,
    files: Sequence[SourceFile],
    policy: BadInputPolicy = "raise",
    threads: int | None = None,
    limit: int | None = None,
) -> Source:
    """Return the rows of files that were listed before; the other arguments are those of `open_source`."""
    spec = read_as(spec, files)
    reader = with_directories(spec, files, reader_of)
    return Source(files, spec, reader, policy, threads or available_threads(), limit)


def read_as(spec: SourceSpec, files: Sequence[SourceFile]) -> SourceSpec:
    """Return how files are read: Parquet where all of their names say so, also where other logs are lines of text.

    Served records are Parquet whatever the model was trained on.
    """
    is_text = spec.format in ("delimited", "json_lines")
    if not is_text or not all(file.path.endswith(".parquet") for file in files):
        return spec
    return dataclasses.replace(spec, format="parquet", encoding="utf-8")


def reader_of(spec: SourceSpec) -> FormatReader:
    """Return the reader of the format of `spec`."""
    reader: FormatReader = _READERS[spec.format](spec)
    return reader


def read_best_auc(sources: Sequence[str | Path]) -> float | None:
    """Return ``best_auc`` of the `GENERATED_FILE` in the lowest directory of `sources`; None without one or for URLs.

    Raises:
        FormatError: The file is not JSON, or holds no ``best_auc`` from 0 to 1, or null for labels of one class.
    """
    if not sources or any(is_remote(source) for source in sources):
        return None
    path = Path(os.path.commonpath([Path(source).resolve().parent for source in sources])) / GENERATED_FILE
    if not path.is_file():
        return None
    try:
        content = parse_json(read_bytes(path))
    except ValueError as error:
        raise FormatError(path, f"not JSON ({error})") from error
    best_auc = content.get("best_auc") if isinstance(content, dict) else None
    if isinstance(content, dict) and "best_auc" in content and best_auc is None:
        return None
    share = checks.number(0.0, 1.0)
    try:
        return float(share.read(best_auc))
    except (ValueError, OverflowError):
        raise FormatError(f"{path}: $.best_auc", f"got {quoted(best_auc)}, expected {share.accepted}") from None
