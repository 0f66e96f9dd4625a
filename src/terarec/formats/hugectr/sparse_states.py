"""The optimizer states of an embedding: whole buffers, device by device. Described in docs/hugectr-formats.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.hugectr.plain import PlainFile, open_plain, spans, write_plain
from terarec.formats.hugectr.sparse_rows import CHUNK_ROWS

_FLOAT = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of a file of states: float32 ``[num_states, devices, rows, width]``.

    Attributes:
        num_states: states of the optimizer, such as 2 for Adam.
        devices: number of devices, each with a buffer of its own.
        rows: rows of each buffer, used or not.
        width: length D of a vector.
    """

    num_states: int
    devices: int
    rows: int
    width: int

    def first(self, state: int, device: int) -> int:
        """Number of the first row of a buffer in the file."""
        return (state * self.devices + device) * self.rows


@dataclass(frozen=True, slots=True)
class SparseStates:
    """A file of states, looked at but not read."""

    file: PlainFile
    layout: StateLayout

    def read(self, state: int, device: int, start: int, stop: int) -> NDArray[np.float32]:
        """The rows ``start <= i < stop`` of a buffer, float32[stop - start, D]."""
        first = self.layout.first(state, device)
        return self.file.read(first + start, first + stop)


def open_sparse_states(path: Path, *, num_states: int, devices: int, width: int) -> SparseStates:
    """Look at a file of states; how many rows its buffers have follows from its size.

    Raises:
        DataNotFoundError: no such file.
        FormatError: a size that no number of rows has.
    """
    file = open_plain(path, np.dtype((_FLOAT, width)))
    rows, rest = divmod(file.count, num_states * devices) if num_states else (0, file.count)
    if rest:
        raise FormatError(
            f"{path}: holds {path.stat().st_size} bytes, expected {num_states} states of {devices} devices "
            f"with as many rows of {4 * width} bytes each"
        )
    return SparseStates(file, StateLayout(num_states, devices, rows, width))


def write_sparse_states(
    path: Path, layout: StateLayout, chunks: Callable[[int, int], Iterator[NDArray[np.float32]]]
) -> None:
    """Write a file of states; what `chunks` leaves of a buffer is zero.

    Args:
        path: the file.
        layout: its shape; without states the file is empty.
        chunks: (state, device) -> the rows in use of that buffer from the first on, float32[n, D] a chunk.

    Raises:
        FormatError: more rows than a buffer has.
        StorageError: the disk is full; nothing is left behind.
    """
    write_plain(path, _buffers(path, layout, chunks), _FLOAT)


def _buffers(
    path: Path, layout: StateLayout, chunks: Callable[[int, int], Iterator[NDArray[np.float32]]]
) -> Iterator[NDArray[np.float32]]:
    for state in range(layout.num_states):
        for device in range(layout.devices):
            used = 0
            for chunk in chunks(state, device):
                used += len(chunk)
                if used > layout.rows:
                    raise FormatError(f"{path}: device {device} holds {used} rows, expected at most {layout.rows}")
                yield chunk
            for start, stop in spans(layout.rows - used, CHUNK_ROWS):
                yield np.zeros((stop - start, layout.width), np.float32)
