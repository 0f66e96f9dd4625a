"""Dense weights, their optimizer's states, and the statistics of BatchNorm layers. See docs/hugectr-formats.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from terarec.errors import FormatError
from terarec.formats.hugectr.fields import open_plain, write_plain
from terarec.io import read_json, write_json

FLOAT = np.dtype("<f4")


def write_floats(path: Path, arrays: Iterable[NDArray[np.float32]]) -> None:
    """Write `arrays` end to end, each row-major; without arrays the file is empty.

    Raises:
        StorageError: The disk is full; nothing is left behind.
    """
    write_plain(path, arrays, FLOAT)


def read_floats(path: Path, arrays: Sequence[tuple[str, tuple[int, ...]]]) -> list[NDArray[np.float32]]:
    """Read a file of `write_floats`.

    Args:
        path: Path of the file.
        arrays: Name, for errors, and shape of each array.

    Raises:
        DataNotFoundError: No such file.
        FormatError: A file of another size, with the array in which it ends.
    """
    sizes = [math.prod(shape) for _, shape in arrays]
    file = open_plain(path, FLOAT)
    if file.count != sum(sizes):
        where = _where_it_ends(file.count, arrays)
        raise FormatError(path, f"holds {4 * file.count} bytes, expected {4 * sum(sizes)}: {where}")
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


SUFFIX = ".ntp.json"


class BatchNormStatistics(NamedTuple):
    """Running mean and variance of a BatchNorm layer, float32[n] each."""

    mean: NDArray[np.float32]
    var: NDArray[np.float32]


def write_statistics(path: Path, layers: Sequence[BatchNormStatistics]) -> None:
    """Write the statistics of BatchNorm layers, in the order of the layers.

    Raises:
        StorageError: The disk is full; nothing is left behind.
    """
    described = [{"type": "BatchNorm", "mean": _numbers(mean), "var": _numbers(var)} for mean, var in layers]
    write_json(path, {"layers": described}, allow_nan=True)


def read_statistics(path: Path) -> list[BatchNormStatistics]:
    """Read a file of `write_statistics`.

    Raises:
        DataNotFoundError: No such file.
        FormatError: No JSON, or other contents.
    """
    content = read_json(path)
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        raise FormatError(path, 'expected an object with a list "layers"')
    return [_statistics(layer, f"{path}: layers[{index}]") for index, layer in enumerate(layers)]


def _statistics(layer: Any, where: str) -> BatchNormStatistics:
    if not isinstance(layer, dict) or layer.get("type") != "BatchNorm":
        raise FormatError(where, 'expected an object with "type": "BatchNorm"')
    mean, var = (_array(layer.get(name), f"{where}.{name}") for name in ("mean", "var"))
    if len(mean) != len(var):
        raise FormatError(where, f"got {len(mean)} means and {len(var)} variances, expected as many")
    return BatchNormStatistics(mean, var)


def _array(values: Any, where: str) -> NDArray[np.float32]:
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise FormatError(where, "expected a list of numbers")
    try:
        return np.array(values, np.float32)
    except OverflowError:
        raise FormatError(where, "got an integer beyond float64, expected numbers that fit float32") from None


def _numbers(array: NDArray[np.float32]) -> list[float]:
    """Format numbers as the shortest decimals that read back as the same float32."""
    return [float(str(number)) for number in np.asarray(array, np.float32)]
