"""Text files, plain or gzip, as a stream of blocks cut at line ends."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from terarec.errors import ConfigError, DataNotFoundError, FormatError
from terarec.kernels.cpu.encoding import count_lines

BLOCK_BYTES = 1 << 20
"""Bytes read at once, 4,300 lines of Criteo. CPU time a row was the least from 1 to 4 MiB (Zen 3: 2.8 us, against
3.8 us at 256 KiB); the smallest of these keeps a block's text and columns in the second-level cache, and memory low."""

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Whole lines of one file.

    Attributes:
        source: position of the file among the sources.
        path: the file.
        first_line: position of the first line in the file, from 0.
        first_row: position of the first line among those of all sources, from 0.
        num_rows: lines.
        text: the lines, with their line ends.
        read_bytes: bytes of the file, compressed or not, that this block took.
    """

    source: int
    path: Path
    first_line: int
    first_row: int
    num_rows: int
    text: bytes
    read_bytes: int


def check_sources(sources: Sequence[Path]) -> int:
    """Bytes of all `sources` together.

    Raises:
        ConfigError: no source.
        DataNotFoundError: a source does not exist.
        FormatError: a source is a directory, or empty.
    """
    if not sources:
        raise ConfigError("sources: got none, expected at least one file")
    for path in sources:
        if not path.exists():
            raise DataNotFoundError(f"{path}: no such file")
        if not path.is_file():
            raise FormatError(f"{path}: not a file, expected a text file, plain or .gz")
        if path.stat().st_size == 0:
            raise FormatError(f"{path}: the file is empty, expected at least one line")
    return sum(path.stat().st_size for path in sources)


def read_blocks(sources: Sequence[Path]) -> Iterator[TextBlock]:
    """The lines of all `sources`, file after file, in blocks of about `BLOCK_BYTES`.

    Raises:
        FormatError: a file without a line, a damaged gzip file, or a line longer than a block (file and line).
    """
    first_row = 0
    for source, path in enumerate(sources):
        first_line = position = 0
        with _open(path) as (file, stream):
            for text in _cut(path, stream):
                num_rows = count_lines(text)
                before, position = position, file.tell()
                yield TextBlock(source, path, first_line, first_row, num_rows, text, position - before)
                first_line += num_rows
                first_row += num_rows
        if first_line == 0:
            raise FormatError(f"{path}: the file is empty, expected at least one line")


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file as it is on the disk, and its text; both are one unless it is compressed."""
    try:
        with path.open("rb", buffering=0) as file:
            magic = file.read(len(_GZIP_MAGIC))
            file.seek(0)
            if magic != _GZIP_MAGIC:
                yield file, file
                return
            with gzip.GzipFile(fileobj=file) as stream:
                yield file, cast(IO[bytes], stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{path}: not a whole gzip file ({error})") from error
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror or error})") from error


def _cut(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    num_lines = 0
    while chunk := stream.read(BLOCK_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end:
            block = rest + chunk[:end]
            yield block
            num_lines += count_lines(block)
            rest = chunk[end:]
        else:
            rest += chunk
        if len(rest) > BLOCK_BYTES:
            raise FormatError(f"{path}: line {num_lines + 1} is longer than {BLOCK_BYTES} bytes, expected text lines")
    if rest:
        yield rest
