"""Dense weights and their optimizer's states: float32 arrays end to end. Described in docs/hugectr-formats.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.hugectr.plain import open_plain, write_plain

FLOAT = np.dtype("<f4")


def write_floats(path: Path, arrays: Iterable[NDArray[np.float32]]) -> None:
    """Write `arrays` end to end, each row-major; none at all make an empty file.

    Raises:
        StorageError: the disk is full; nothing is left behind.
    """
    write_plain(path, arrays, FLOAT)


def read_floats(path: Path, arrays: Sequence[tuple[str, tuple[int, ...]]]) -> list[NDArray[np.float32]]:
    """Read what `write_floats` wrote.

    Args:
        path: the file.
        arrays: name, for errors, and shape of each array.

    Raises:
        DataNotFoundError: no such file.
        FormatError: a file of another size, with the array in which it ends.
    """
    sizes = [math.prod(shape) for _, shape in arrays]
    file = open_plain(path, FLOAT)
    if file.count != sum(sizes):
        where = _where_it_ends(file.count, arrays)
        raise FormatError(f"{path}: holds {4 * file.count} bytes, expected {4 * sum(sizes)}: {where}")
    flat = file.read(0, file.count)
    stops = list(itertools.accumulate(sizes))
    return [
        flat[stop - size : stop].reshape(shape) for stop, size, (_, shape) in zip(stops, sizes, arrays, strict=True)
    ]


def _where_it_ends(count: int, arrays: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    start = 0
    for name, shape in arrays:
        stop = start + math.prod(shape)
        if count < stop:
            return f"{name} {list(shape)} is bytes {4 * start} to {4 * stop}"
        start = stop
    return f"the last array ends at byte {4 * start}"
