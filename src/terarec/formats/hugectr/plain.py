"""Files of equal records without metadata, in which HugeCTR keeps weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import DataNotFoundError, FormatError
from terarec.io import atomic_file


@dataclass(frozen=True, slots=True)
class PlainFile:
    """File of `count` records of `dtype` that start at byte `header_bytes`; it is not loaded into memory."""

    path: Path
    dtype: np.dtype[Any]
    header_bytes: int
    count: int

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the records ``start <= i < stop``, which must exist.

        Raises:
            FormatError: The file has become shorter since it was opened.
        """
        offset = self.header_bytes + start * self.dtype.itemsize
        records = np.fromfile(self.path, self.dtype, stop - start, offset=offset)
        if len(records) != stop - start:
            end = offset + records.nbytes
            raise FormatError(self.path, f"ended at byte {end}, expected {self.count} records of {self.dtype}")
        return records


def open_plain(path: Path, dtype: np.dtype[Any], *, header_bytes: int = 0) -> PlainFile:
    """Open a file and check its size without reading it.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A size that no integer number of records has.
    """
    if not path.is_file():
        raise DataNotFoundError(path, "no such file")
    size = path.stat().st_size
    count, rest = divmod(size - header_bytes, dtype.itemsize)
    if size < header_bytes or rest:
        after = f" after {header_bytes} bytes of header" if header_bytes else ""
        raise FormatError(path, f"holds {size} bytes, expected records of {dtype.itemsize} bytes{after}")
    return PlainFile(path, dtype, header_bytes, count)


def write_plain(path: Path, chunks: Iterable[NDArray[Any]], dtype: np.dtype[Any], *, header: bytes = b"") -> int:
    """Write `chunks` atomically, one after the other, as little-endian `dtype`.

    Returns:
        Number of records.

    Raises:
        StorageError: The disk is full; nothing is left behind.
    """
    count = 0
    with atomic_file(path) as partial, partial.open("wb") as stream:
        stream.write(header)
        for chunk in chunks:
            stream.write(as_bytes(chunk, dtype))
            count += chunk.size
    return count


def as_bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> memoryview:
    """Return the bytes of `array` as rows of `dtype`, copied only if needed."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data


def spans(count: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of runs of at most `chunk` that cover ``0 <= i < count``."""
    for start in range(0, count, chunk):
        yield start, min(start + chunk, count)
