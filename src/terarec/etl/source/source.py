"""Files, directories, globs and URLs -> the files to read, in order, and their rows, block by block."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.etl.columns import RowFaultError, Rows
from terarec.etl.source.arrow_files import IpcReader, ParquetReader
from terarec.etl.source.blocks import FATAL, BadInputLog, BadInputReport, FormatReader, InputFault, RawBlock, SourceFile
from terarec.etl.source.delimited import DelimitedReader
from terarec.etl.source.json_lines import JsonLinesReader
from terarec.io import file_system, is_remote
from terarec.parallel import available_threads, ordered_map
from terarec.spec import BAD_INPUT_POLICIES, BadInputPolicy, SourceSpec, checks
from terarec.spec.checks import quoted
from terarec.spec.codec import parse_json
from terarec.spec.dataset import GENERATED_FILE

SAMPLE_ROWS = 100_000
"""Most rows of unknown logs, or of a preview, that are read."""
_READ_SEVERAL_TIMES = "the sources are read several times, which a pipe does not allow (save its rows to a file first)"

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
        reader: Reader of their format.
        policy: Policy for bad input.
        threads: Threads that parse in `blocks`.
        limit: Maximum number of rows, the first ones of all files; None for all.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        reader: FormatReader,
        policy: BadInputPolicy,
        threads: int,
        limit: int | None = None,
    ) -> None:
        self.files = tuple(files)
        self.limit = limit
        self._reader = reader
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
        self._log.add(raw.first_row, parsed.counts, parsed.faults)
        return parsed.rows(raw)

    def invalid_rows(self, raw: RawBlock, rows: NDArray[np.int64], fault: RowFaultError) -> Sequence[InputFault]:
        """Return the first invalid values of rows that `read_block` returned, with their places.

        Args:
            raw: Block.
            rows: Ids, int64[k].
            fault: Invalid value of each.

        Raises:
            FormatError: The policy is "raise".
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

    def log_invalid_rows(self, raw: RawBlock, counts: Mapping[str, int], faults: Sequence[InputFault]) -> None:
        """Count rows of `raw` that were left out because of `faults`, the first ones, as bad input."""
        self._log.add(raw.first_row, counts, faults, is_read=True)

    def blocks(self) -> Generator[Rows]:
        """Yield all rows in order. Each call gives the same blocks, for any number of threads.

        Raises:
            ConfigError, FormatError: As `raw_blocks` and `read_block`.
        """
        with closing(
            ordered_map(self.read_block, self.raw_blocks(), self._threads, blocks_ahead(self._threads))
        ) as blocks:
            yield from blocks

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


def open_source(
    spec: SourceSpec,
    paths: Sequence[str | Path],
    policy: BadInputPolicy = "raise",
    threads: int | None = None,
    limit: int | None = None,
) -> Source:
    """Return the rows of files, directories, globs and URLs.

    Text files may be compressed, by gzip, bz2, xz, zstd, lz4 or zip; their content says which.

    Args:
        spec: Spec of the files.
        paths: Paths in the order of their rows; a directory means the files in it and below, in the order of their
            names, without those that begin with ``.`` or ``_``.
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
    return Source(find_files(paths), reader_of(spec), policy, threads or available_threads(), limit)


def reader_of(spec: SourceSpec) -> FormatReader:
    """Return the reader of the format of `spec`."""
    reader: FormatReader = _READERS[spec.format](spec)
    return reader


def find_files(paths: Sequence[str | Path]) -> tuple[SourceFile, ...]:
    """Return the files that `paths` name, in the order of `paths`.

    A directory means the files in it and below, a pattern for the files that it matches, both in the order of
    their names; names that begin with ``.`` or ``_`` in a directory are left out. The side file that a generator writes
    next to logs is never one of them, since a shell that expands ``raw/*`` names it, too.

    Raises:
        ConfigError: No path, a pipe or device, or a URL of a kind that fsspec does not know.
        DataNotFoundError: A path or a glob without a file.
        FormatError: A directory without a file, or an empty file.
        MissingDependencyError: A URL without fsspec, or without the library that it needs for this kind of URL.
    """
    if not paths:
        raise ConfigError("sources", "got none, expected at least one file")
    files = [file for path in paths for file in (_remote(str(path)) if is_remote(path) else _local(Path(path)))]
    if not files:
        raise DataNotFoundError(paths[0], "a generator's description of its logs, expected a file of rows")
    for file in files:
        if file.bytes == 0:
            raise FormatError(file.path, "the file is empty, expected at least one row")
    return tuple(files)


def _local(path: Path) -> Iterator[SourceFile]:
    found = [path]
    if str(path) == "-":
        raise ConfigError("sources", f"got '-' for standard input, expected a file: {_READ_SEVERAL_TIMES}")
    if not path.exists():
        # Only where no such file exists is the name a pattern: names may hold brackets.
        if not glob.has_magic(str(path)):
            raise DataNotFoundError(path, "no such file")
        found = sorted(map(Path, glob.glob(str(path))))
        if not found:
            raise DataNotFoundError(path, "matches no file")
    for entry in found:
        if not entry.is_dir():
            if not _is_sidecar(entry):
                yield _local_file(entry)
            continue
        # Path.rglob would pass over a directory that it may not read.
        below = [Path(folder, name) for folder, _, names in os.walk(entry, onerror=_unreadable) for name in names]
        # By name, and not as the disk lists them, so that row ids are the same on every machine.
        inside = sorted(file for file in below if file.is_file() and _is_data(file.relative_to(entry).parts))
        if not inside:
            raise FormatError(entry, "the directory has no data file, expected at least one")
        yield from map(_local_file, inside)


def _unreadable(error: OSError) -> NoReturn:
    raise FormatError(error.filename, f"cannot be read ({error.strerror}), expected a readable directory") from error


def _local_file(path: Path) -> SourceFile:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(path, f"is not a regular file, expected one: {_READ_SEVERAL_TIMES}")
    return SourceFile(str(path), status.st_size, str(status.st_mtime_ns))


def _remote(url: str) -> Iterator[SourceFile]:
    files, path = file_system(url)
    if not files.exists(path):
        if not glob.has_magic(path):
            raise DataNotFoundError(url, "no such file")
        found = sorted(entry for entry in files.glob(path) if PurePosixPath(entry).name != GENERATED_FILE)
        if not found:
            raise DataNotFoundError(url, "matches no file")
    else:
        found = [path]
    for entry in found:
        inside = [entry]
        if files.isdir(entry):
            below = sorted(files.find(entry))
            inside = [file for file in below if _is_data(PurePosixPath(file).relative_to(entry).parts)]
            if not inside:
                raise FormatError(url, "the directory has no data file, expected at least one")
        for file in inside:
            yield SourceFile(files.unstrip_protocol(file), int(files.size(file)), str(files.ukey(file)))


def _is_data(parts: Sequence[str]) -> bool:
    return parts[-1] != GENERATED_FILE and not any(part.startswith((".", "_")) for part in parts)


def _is_sidecar(path: Path) -> bool:
    """Return whether a file is the `GENERATED_FILE` of a generator, and not a log of that name."""
    if path.name != GENERATED_FILE or not path.is_file():
        return False
    try:
        content = parse_json(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and {"best_auc", "files", "seed"} <= content.keys()


def read_best_auc(sources: Sequence[str | Path]) -> float | None:
    """Return ``best_auc`` of the `GENERATED_FILE` in the lowest directory of `sources`; None without one or for URLs.

    Raises:
        FormatError: The file is not JSON, or holds no ``best_auc`` from 0 to 1.
    """
    if not sources or any(is_remote(source) for source in sources):
        return None
    path = Path(os.path.commonpath([Path(source).resolve().parent for source in sources])) / GENERATED_FILE
    if not path.is_file():
        return None
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(path, f"not JSON ({error})") from error
    best_auc = content.get("best_auc") if isinstance(content, dict) else None
    share = checks.number(0.0, 1.0)
    try:
        return float(share.read(best_auc))
    except (ValueError, OverflowError):
        raise FormatError(f"{path}: $.best_auc", f"got {quoted(best_auc)}, expected {share.accepted}") from None
